"""Digests of values; large ones are sampled evenly."""

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

_SAMPLED_BYTES = 1 << 20
_CHUNK = 4096
SAMPLED_ITEMS = 1024

Digest = bytes


def sampled(items: Sequence[Any]) -> Iterable[Any]:
    """All items; if there are more than 1024, that many evenly spaced ones, including the first and the last."""
    count = len(items)
    if count <= SAMPLED_ITEMS:
        return items
    return [items[place * (count - 1) // (SAMPLED_ITEMS - 1)] for place in range(SAMPLED_ITEMS)]


def of(*parts: str | bytes | int) -> Digest:
    """A digest of 16 bytes that depends on all parts and their order."""
    state = xxhash.xxh3_128()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        raw = raw if isinstance(raw, bytes) else str(raw).encode()
        state.update(struct.pack("<Q", len(raw)))
        state.update(raw)
    return state.digest()


def of_atom(value: Any) -> Digest:
    """Digest of None, a number, text or bytes; includes the type, and the bits of floats."""
    if type(value) is float:
        return of("float", struct.pack("<d", value))
    if type(value) is complex:
        return of("complex", struct.pack("<dd", value.real, value.imag))
    if type(value) is str:
        return of("str", of_bytes(value.encode("utf-8", "surrogatepass")))
    if type(value) is bytes:
        return of("bytes", of_bytes(value))
    return of(type(value).__name__, hex(value) if type(value) is int else str(value))


def of_bytes(value: bytes | bytearray | memoryview) -> Digest:
    """Digest of all bytes; if there are more than 1 MiB, of that many, in evenly spaced pieces."""
    view = memoryview(value)
    if len(view) <= _SAMPLED_BYTES:
        return of(bytes(view))
    pieces = _SAMPLED_BYTES // _CHUNK
    last = len(view) - _CHUNK
    starts = [piece * last // (pieces - 1) for piece in range(pieces)]
    return of(len(view), *(bytes(view[start : start + _CHUNK]) for start in starts))


def bytes_of_array(value: "np.ndarray[Any, Any]") -> memoryview:
    """The bytes of an array; only those of some rows if it is large and not contiguous."""
    if not value.nbytes:
        return memoryview(b"")
    while not value.flags.c_contiguous and value.nbytes > _SAMPLED_BYTES and value.shape[0] > 1:
        value = value[:: max(2, value.shape[0] // SAMPLED_ITEMS)]
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def of_tensor(value: torch.Tensor) -> Digest:
    """Digest of dtype, shape and layout and, for a dense CPU tensor, of the elements."""
    about = (str(value.dtype), str(tuple(value.shape)), str(value.layout))
    if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized or not value.numel():
        return of("tensor", *about)
    plain = value.detach().resolve_conj().resolve_neg()
    while not plain.is_contiguous() and plain.nbytes > _SAMPLED_BYTES and plain.shape[0] > 1:
        plain = plain[:: max(2, plain.shape[0] // SAMPLED_ITEMS)]
    return of("tensor", *about, of_bytes(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data))
