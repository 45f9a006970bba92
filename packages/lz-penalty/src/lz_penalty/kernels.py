"""The penalty in Triton: one program a sequence, two launches a step for any batch size.

It is used if the logits are on a GPU and Triton is installed, as it is with torch's CUDA builds. It was run in
Triton's interpreter on a CPU (`TRITON_INTERPRET=1`), with the same results as the other implementations. **It has not
been run on a GPU.** Triton is imported at the first use, never before.

A token that occurs several times in the window is penalised once, by the program's lane of its newest position. No two
lanes write to one logit, so there are no atomic operations, and the result is deterministic.
"""

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lz_penalty import devices
from lz_penalty.parameters import MODES
from lz_penalty.rows import RowParameters

_CHUNK = 16
"""Positions of the window that are compared with all others at a time."""


@cache
def available() -> bool:
    """True if there is a GPU, and Triton is installed."""
    return devices.kernels_possible() and importlib.util.find_spec("triton") is not None


def match_lengths(window: Tensor, rows: RowParameters) -> Tensor:
    """As `matches.match_lengths`, in one launch."""
    window = window.contiguous()
    lengths = torch.empty_like(window, dtype=torch.int32)
    if len(window):
        _compiled().lengths[(len(window),)](
            window, lengths, rows.lookback, WIDTH=window.shape[1], BLOCK=_block(window), MOST=rows.most_lookback
        )
    return lengths


def penalise_window(
    logits: Tensor, window: Tensor, lengths: Tensor, rows: RowParameters, lines: Tensor | None = None
) -> Tensor:
    """As `penalty.penalise_window`, in one launch with a program for each sequence."""
    if not rows.modes or not len(window):
        return logits
    if logits.stride(1) != 1:
        raise ValueError(f"LZ penalty: a row of logits is not contiguous, its stride is {logits.stride(1)}")
    if window.stride(1) != 1:
        window = window.contiguous()
    _compiled().penalty[(len(window),)](
        logits,
        window,
        lengths.contiguous(),
        lines if lines is not None else torch.arange(len(window), device=logits.device),
        rows.strength,
        rows.window,
        rows.min_match,
        rows.mode,
        logits.shape[1],
        logits.stride(0),
        window.stride(0),
        WIDTH=window.shape[1],
        BLOCK=_block(window),
        CHUNK=_CHUNK,
        AMORTIZED=MODES.index("amortized"),
        DISTANCE=MODES.index("distance"),
    )
    return logits


def _block(window: Tensor) -> int:
    """The block width for a window: a power of two, at least one chunk."""
    return max(_CHUNK, 1 << (window.shape[1] - 1).bit_length())


@cache
def _compiled() -> Any:
    from lz_penalty import triton_kernels

    return triton_kernels
