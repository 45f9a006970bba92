"""Megatron-Core's distributed optimizer under regrow. Untested: written by reading it, run against a stand-in alone.

    from regrow_recipes.adapters.megatron import Shards

    shards = Shards(model, optimizer, scheduler)
    session.protect(part=shards.part, shards=shards)
    for step in session.steps(batches, until=steps):
        with step as batch, shards.step(step):
            losses = forward_backward(...)                     # get_forward_backward_func()(...)
            step.log(loss=...)                                 # reduced here, and not behind the update
            optimizer.step(); scheduler.step(increment=batch_size)

The state is this rank's pieces of the fp32 weights and of Adam's moments; bf16 parameters follow from them, and are
gathered as the first act of a body. Nobody else has a rank's pieces: `regrow run --buddy-every K` keeps copies. See
docs/adopt.md.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from regrow.core.errors import UsageError
from regrow_recipes.adapters import read_names

if TYPE_CHECKING:
    from regrow.train.step import Step

__all__ = ["Shards"]


class Shards:
    """This rank's pieces of a training of Megatron's, as protected state.

    Args:
        model: the chunks, each wrapped by Megatron's `DistributedDataParallel`.
        optimizer: of `get_megatron_optimizer`, with `use_distributed_optimizer`.
        scheduler: an `OptimizerParamScheduler`.

    Raises:
        UsageError: what is given keeps state in another way.
    """

    def __init__(self, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        read_names.tell_untested("megatron.core")
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._stale = False
        self._step: Step | None = None
        for each in read_names.sharding_optimizers(optimizer):
            _refuse(each)
            read_names.on_ready_gradients(each, self._begins)

    @property
    def part(self) -> str:
        """Name that distinguishes this rank's pieces from those of others, for `session.protect(part=...)`."""
        return f"rank{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}"

    @contextmanager
    def step(self, step: "Step") -> Iterator[None]:
        """The body of a step: parameters are gathered first, and gradients are zero."""
        self._step = step
        if self._stale:
            read_names.gather_parameters(self._optimizer, self._model)
            self._stale = False
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        try:
            yield
        finally:
            self._step = None

    def gather(self) -> None:
        """The model is as the last step has left it: before an evaluation, in a `@regrow.restartable` function."""
        read_names.gather_parameters(self._optimizer, self._model)

    def _begins(self) -> None:
        if self._step is None:
            raise UsageError(
                "the optimizer steps outside a step", hint="write `with step as batch, shards.step(step):`"
            )
        self._step.update()
        self._stale = True

    # --- as protected state ---

    def state_dict(self) -> dict[str, Any]:
        """Pieces by their places, and what the optimizers' groups and the scheduler count."""
        optimizers = read_names.sharding_optimizers(self._optimizer)
        return {
            "pieces": {
                place: {name: tensor.detach().clone() for name, tensor in kept.items()}
                for place, kept in read_names.shards(self._optimizer).items()
            },
            "groups": [[_settings(group) for group in each.optimizer.param_groups] for each in optimizers],
            "scheduler": self._scheduler.state_dict(),
        }

    def load_state_dict(self, received: Mapping[str, Any]) -> None:
        """Take them over, in place. Model parameters follow in the next body."""
        if read_names.shards(self._optimizer).keys() != received["pieces"].keys():
            raise UsageError(
                "the pieces of this rank lie elsewhere than those that it is given",
                hint="start with the same parallel sizes and bucket sizes",
            )
        read_names.put_shards(self._optimizer, received["pieces"])
        optimizers = read_names.sharding_optimizers(self._optimizer)
        for each, groups in zip(optimizers, received["groups"], strict=True):
            for group, settings in zip(each.optimizer.param_groups, groups, strict=True):
                group.update(settings)
        self._scheduler.load_state_dict(received["scheduler"])
        self._stale = True


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _refuse(optimizer: Any) -> None:
    if not hasattr(optimizer, "gbuf_ranges"):
        raise UsageError(
            f"{type(optimizer).__name__} does not shard its state",
            hint="use_distributed_optimizer=True; else give its inner optimizer and the model to session.protect",
        )
    if getattr(getattr(optimizer, "ddp_config", None), "num_distributed_optimizer_instances", 1) > 1:
        raise UsageError(
            "Megatron keeps the state twice by itself (num_distributed_optimizer_instances)",
            hint="leave it at 1: regrow run --buddy-every K keeps copies",
        )
    if getattr(optimizer, "grad_scaler", None) is not None:
        raise UsageError("a gradient scaler of Megatron is no part of what is protected", hint="train in bf16")
