"""Megatron-Core on processors: what it asks of CUDA by name is answered by the processor. Import it before Megatron."""

import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")
torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
_kind = torch.Tensor.type


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


torch.cuda.manual_seed = _seed


def _named_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # The optimizer takes only tensors whose type is called torch.cuda.*.
    return _kind(tensor, *args, **kwargs) if args or kwargs else "torch.cuda." + str(_kind(tensor)).rpartition(".")[2]


torch.Tensor.type = _named_cuda  # type: ignore[assignment, method-assign]


class _OnProcessors(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the processor."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


_OnProcessors().__enter__()  # type: ignore[no-untyped-call]

from megatron.core.tensor_parallel import random as _random  # noqa: E402

_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
