"""Digests of attribute values, to detect changes. Computing them runs none of the script's code."""

import random
import sys
from collections import deque
from types import FunctionType, MethodType, ModuleType

import numpy as np
import torch
import xxhash

from regrow.train.values.plain import ATOMS

_LEAVES = 5_000
_MOST_BYTES = 1 << 20
"""Largest tensor or array that is read. Larger tensors are compared by torch's version counter, arrays not at all."""
_OPAQUE = (torch.nn.Module, FunctionType, MethodType, ModuleType, type)
_LIBRARIES = frozenset(
    {
        "accelerate",
        "datasets",
        "numpy",
        "peft",
        "regrow",
        "regrow_recipes",
        "tokenizers",
        "torch",
        "transformers",
        "trl",
    }
)


def fingerprint(value: object) -> str:
    """A digest of values, containers, tensors, arrays, generators and attributes of the script's own objects.

    Values after the first 5,000 leaves are ignored, as are models, functions and objects of libraries: the digest of
    one of these alone is empty.
    """
    if _content(value) is None:
        return ""
    digest, stack, seen, room = xxhash.xxh3_64(), [value], set[int](), _LEAVES
    while stack and room:
        thing, room = stack.pop(), room - 1
        digest.update(type(thing).__qualname__.encode())
        if type(thing) in ATOMS:
            digest.update(repr(thing).encode())
        elif id(thing) not in seen:
            seen.add(id(thing))
            content = _content(thing) or b""
            digest.update(content if isinstance(content, bytes) else str(len(content)).encode())
            stack += content if isinstance(content, list) else []
    return digest.hexdigest()


def _content(thing: object) -> list[object] | bytes | None:
    """Bytes of a value, or the values in it; None: it is ignored."""
    if isinstance(thing, torch.Tensor):
        if thing.device.type != "cpu" or thing.layout != torch.strided or thing.nbytes > _MOST_BYTES:
            return str((tuple(thing.shape), 0 if thing.is_inference() else thing._version)).encode()
        return thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(thing, np.ndarray):
        return list(thing.flat) if thing.dtype.hasobject else thing.tobytes() if thing.nbytes <= _MOST_BYTES else b""
    if isinstance(thing, random.Random):
        return list(thing.getstate())
    if isinstance(thing, np.random.Generator):
        return [dict(thing.bit_generator.state)]
    if isinstance(thing, dict):
        return [each for item in dict.items(thing) for each in item]
    if isinstance(thing, list | tuple | deque):
        return list(thing)
    if isinstance(thing, set | frozenset):
        return [*sorted(map(repr, thing))] if all(type(each) in ATOMS for each in thing) else [len(thing)]
    if type(thing) in ATOMS:
        return repr(thing).encode()
    root = type(thing).__module__.partition(".")[0]
    if isinstance(thing, _OPAQUE) or root in _LIBRARIES or root in sys.stdlib_module_names:
        return None
    found = getattr(thing, "__dict__", None)
    return [each for item in found.items() for each in item] if type(found) is dict else None
