"""Stand-ins for the interfaces of vLLM and SGLang, of our own making: what those call, in the order in which they do.

Neither is installed where regrow is tested. What is stubbed was read in their public sources; see the adapters.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from importlib import import_module, reload
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

V1 = "vllm.v1.sample.logits_processor"
V2 = "vllm.v1.worker.gpu.sample.logits_processor"
SGLANG = "sglang.srt.sampling.custom_logit_processor"


class V1Interface:
    """vLLM's base class for the V1 model runner."""


class V2Interface:
    """vLLM's base class for Model Runner V2."""


class SglangInterface:
    """SGLang's base class."""


def install(patch: pytest.MonkeyPatch, interfaces: dict[str, type], base: str) -> None:
    """Let modules be found that have these base classes under the name `base`, and no others of their packages."""
    for name, interface in interfaces.items():
        words = name.split(".")
        for count in range(1, len(words)):
            package = ".".join(words[:count])
            if package not in sys.modules:
                made = ModuleType(package)
                made.__path__ = []
                patch.setitem(sys.modules, package, made)
        module = ModuleType(name)
        setattr(module, base, interface)
        patch.setitem(sys.modules, name, module)


def load(name: str) -> Any:
    """A class by its qualified name, as vLLM's command line gives it; the module is run anew."""
    module, _, qualified = name.partition(":")
    fresh = module not in sys.modules
    found = import_module(module)
    return getattr(found if fresh else reload(found), qualified)


class Direction(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass
class BatchUpdate:
    """Change of a V1 batch; a processor takes the removals first, then the additions, then the moves."""

    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[tuple[int, Any, list[int] | None, list[int]]] = ()
    moved: Sequence[tuple[int, int, Direction]] = ()


def params(**extra: object) -> SimpleNamespace:
    """Sampling parameters of a request."""
    return SimpleNamespace(extra_args=extra or None)


class Buffer(SimpleNamespace):
    """A tensor of V2's, of which a processor reads the device's side."""

    gpu: Tensor


@dataclass
class RequestState:
    """V2's state of all requests."""

    max_num_reqs: int
    most_tokens: int
    vocab_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.all_token_ids = Buffer(gpu=torch.full((self.max_num_reqs, self.most_tokens), 7, dtype=torch.int32))
        self.prompt_len = Buffer(gpu=torch.zeros(self.max_num_reqs, dtype=torch.int32))


def context(rows: Sequence[tuple[int, int, int, int]]) -> SimpleNamespace:
    """A V2 step: of each row of logits its slot, its offset within its request, the token fed, and its position."""
    slots, offsets, tokens, positions = (torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))
    each = list(dict.fromkeys(row[0] for row in rows))
    return SimpleNamespace(
        expanded_idx_mapping=slots,
        idx_mapping=torch.tensor(each, dtype=torch.int32),
        idx_mapping_np=np.array(each, dtype=np.int32),
        expanded_local_pos=offsets,
        input_ids=tokens,
        pos=positions.to(torch.int64),
    )
