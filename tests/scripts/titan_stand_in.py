"""A trainer with the signatures of torchtitan's (`trainer.py` at 003fe28) and nothing of its inside, for processors."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def clip_grad_norm_(parameters: Any, norm: float, **_: Any) -> torch.Tensor:
    """As `distributed.utils` has it."""
    return nn.utils.clip_grad_norm_(parameters, norm)


class Dims:
    """Meshes by their names."""

    def __init__(self, world: int) -> None:
        self._mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("batch",)) if world > 1 else None

    def get_optional_mesh(self, _: str) -> DeviceMesh | None:
        return self._mesh


class Schedulers:
    """A container with `schedulers`, and a state."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]

    def step(self) -> None:
        for each in self.schedulers:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [each.state_dict() for each in self.schedulers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            each.load_state_dict(state)


class Optimizers:
    """A container that is gone through, and steps all."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __iter__(self) -> Any:
        return iter(self._optimizers)

    def step(self) -> None:
        for each in self._optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self._optimizers:
            each.zero_grad()


class Metrics:
    """Logs each second step."""

    def __init__(self) -> None:
        self.ntokens_since_last_log = 0
        self.lines: list[tuple[int, float]] = []

    def should_log(self, step: int) -> bool:
        return step % 2 == 0

    def log(self, step: int, loss: float, largest: float, norm: float, extra_metrics: dict[str, Any]) -> None:
        assert largest >= loss > 0
        assert norm > 0
        assert extra_metrics["lr"] > 0
        self.lines.append((step, loss))


class Trainer:
    """torchtitan's, as far as its adapter sees it."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.parallel_dims = self.init_distributed()
        torch.manual_seed(3)
        model: nn.Module = nn.Sequential(nn.Embedding(16, 8), nn.Dropout(0.1), nn.Linear(8, 16))
        self.model_parts = [DistributedDataParallel(model) if dist.is_initialized() else model]
        made = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in self.model_parts]
        self.optimizers, self.lr_schedulers = Optimizers(list(made)), Schedulers(list(made))
        self.metrics_processor = Metrics()
        self.gradient_accumulation_steps = 1
        self.step = self.ntokens_seen = 0
        self.saved: list[int] = []
        self.checkpointer = SimpleNamespace(load=lambda step: None, save=self._save)
        self.validator = SimpleNamespace(should_validate=lambda step: False)

    def _save(self, step: int, *, last_step: bool) -> None:
        if dist.is_initialized():
            dist.barrier()
        self.saved.append(step)

    def init_distributed(self) -> Dims:
        dist.init_process_group("gloo")
        return Dims(dist.get_world_size() if dist.is_initialized() else 1)

    def forward_backward_step(
        self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        scores = self.model_parts[0](input_dict["input"])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / global_valid_tokens
        # DDP takes the mean over ranks where torchtitan's sums.
        torch.autograd.backward(loss * (dist.get_world_size() if dist.is_initialized() else 1))
        return loss

    def train_step(self, data_iterator: Any) -> None:
        self.optimizers.zero_grad()
        parts = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        tokens = torch.tensor(sum(int((labels != -100).sum()) for _, labels in parts))
        if dist.is_initialized():
            dist.all_reduce(tokens)
        for inputs, labels in parts:
            self.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens)
        clip_grad_norm_([each for part in self.model_parts for each in part.parameters()], 1.0)
        self.optimizers.step()
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            raise AssertionError("a number would be reduced behind the update")


# Where the adapter finds `clip_grad_norm_`.
sys.modules |= {name: ModuleType(name) for name in ("torchtitan", "torchtitan.distributed")}
sys.modules["torchtitan.distributed.utils"] = sys.modules[__name__]
