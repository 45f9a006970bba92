"""Tests each accelerator of torch: a context, its memory, the memory's speed, and products with a known answer.

It uses `torch.accelerator`, so that it works for CUDA, ROCm, XPU and others. A context takes some hundreds of MiB on a
CUDA device: do not run it on GPUs that workers fill.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from regrow.health.probes import known_answer
from regrow.health.readings import (
    BandwidthReading,
    MemoryReading,
    NotApplicable,
    ProbeAt,
    ProbeSettings,
    ProductReading,
    Reading,
)

if TYPE_CHECKING:
    import torch

_PATTERN_BYTES = 64 << 20
_COPY_BYTES = 256 << 20
_COPIES = 10
_TILES = 8
"""Number of copies of the factors side by side, so that all parts of a large chip have work."""
_PRODUCTS = 8


def read(settings: ProbeSettings) -> Iterator[ProbeAt | Reading]:
    """Memory, bandwidth and products of each device."""
    yield ProbeAt("accelerator")
    try:
        import torch
    except ImportError as error:
        yield NotApplicable(f"torch cannot be imported: {error}")
        return
    kind = torch.accelerator.current_accelerator(check_available=True) if hasattr(torch, "accelerator") else None
    if kind is None:
        yield NotApplicable("torch has no accelerator here")
        return
    for index in range(torch.accelerator.device_count()):
        name = f"{kind.type}{index}"
        if name not in settings.skip:
            yield ProbeAt("accelerator", name)
            yield from _device(torch, torch.device(kind.type, index), name)


def _device(torch: Any, device: "torch.device", name: str) -> Iterator[Reading]:
    """Readings of one device. Errors of torch pass through, and are reported as the probe's failure."""
    start = time.perf_counter()
    tried, wrong = _pattern(torch, device)
    seconds = time.perf_counter() - start
    free, total = _memory(torch, device)
    yield MemoryReading(name, _title(torch, device), tried, wrong, seconds, free, total)
    yield _bandwidth(torch, device, name, free)
    for dtype in known_answer.BOUNDS:
        try:
            yield _products(torch, device, name, dtype)
        except NotImplementedError as error:
            yield NotApplicable(f"no matrix product of {dtype}: {error}", name)


def _pattern(torch: Any, device: "torch.device") -> tuple[int, int]:
    """Write each bit as 0 and as 1, and read it back on the host; returns the bytes tried and the wrong ones."""
    wrong = 0
    block = torch.empty(_PATTERN_BYTES, dtype=torch.uint8, device=device)
    for value in (0x55, 0xAA):
        block.fill_(value)
        wrong += int(np.count_nonzero(block.cpu().numpy() != value))
    return _PATTERN_BYTES, wrong


def _memory(torch: Any, device: "torch.device") -> tuple[int | None, int | None]:
    ask = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    if ask is None:
        return None, None
    free, total = ask(device)
    return int(free), int(total)


def _title(torch: Any, device: "torch.device") -> str:
    ask = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(ask(device)) if ask is not None else device.type


def _bandwidth(torch: Any, device: "torch.device", name: str, free: int | None) -> Reading:
    if free is not None and free < 3 * _COPY_BYTES:
        return NotApplicable("too little memory is free to time a copy", name)
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(_COPIES):
        target.copy_(source)
    torch.accelerator.synchronize(device)
    return BandwidthReading(name, 2 * _COPY_BYTES * _COPIES / (time.perf_counter() - start))


def _products(torch: Any, device: "torch.device", name: str, dtype: str) -> ProductReading:
    """Compute products, and compare them on the host: a faulty device may compare wrongly too."""
    wrong, first = 0, ""
    kind = getattr(torch, dtype)
    for number in range(_PRODUCTS):
        left, right = known_answer.factors(known_answer.BOUNDS[dtype], seed=number)
        want = np.tile(known_answer.product(left, right), (_TILES, _TILES))
        a = torch.from_numpy(np.tile(left, (_TILES, 1))).to(device=device, dtype=kind)
        b = torch.from_numpy(np.tile(right, (1, _TILES))).to(device=device, dtype=kind)
        missed, where = known_answer.differences((a @ b).float().cpu().numpy(), want)
        wrong, first = wrong + missed, first or where
    return ProductReading(name, dtype, _PRODUCTS, wrong, first)
