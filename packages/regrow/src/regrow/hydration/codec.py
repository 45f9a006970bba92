"""Conversion of small Python state to bytes and back: exact types, exact float bits, no pickle.

None, bool, 64-bit int, float, str, bytes, list and dict with text keys are plain msgpack; every other type is a msgpack
extension whose payload is msgpack again. Tensors are not included: each becomes a reference to a named tensor that is
sent separately.
"""

import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from inspect import getattr_static
from pathlib import PosixPath
from types import FunctionType
from typing import Any, cast

import msgspec
import numpy as np
import torch

from regrow.core.errors import StateError

Lift = Callable[[str, torch.Tensor], str]
"""Called with the path of a tensor inside the state; returns the name under which the tensor is sent."""
Resolve = Callable[[str], object]
"""Called with a tensor's name; returns the object that takes its place."""

_BIG_INT, _COMPLEX, _TUPLE, _SET, _FROZENSET, _PAIRS, _ORDERED, _COUNTER = range(1, 9)
_NUMPY_SCALAR, _NUMPY_ARRAY, _DTYPE, _DEVICE, _SIZE, _BYTEARRAY, _TENSOR, _LARGE_ARRAY, _DEQUE = range(9, 18)
_ODD_TEXT, _EXACT, _BY_NAME = 18, 19, 20
"""Extension codes: text that is not valid Unicode; objects for numbers and dates; named tuples and enums."""
_PARTS: dict[type, Callable[[Any], list[object]]] = {
    Decimal: lambda each: [str(each)],
    PosixPath: lambda each: [str(each)],
    Fraction: lambda each: [each.numerator, each.denominator],
    timedelta: lambda each: [each.days, each.seconds, each.microseconds],
    timezone: lambda each: [each.utcoffset(None)],
    date: lambda each: [each.year, each.month, each.day],
    datetime: lambda each: [*each.timetuple()[:6], each.microsecond, each.tzinfo],
}
"""For each type: a function that returns the arguments by which an equal object is constructed."""
EXACT_KINDS = frozenset(_PARTS)
_NAMED = {kind.__name__: kind for kind in _PARTS}
_LARGE_BYTES = 64 << 10
"""Largest array in bytes that is encoded here; larger ones are sent as tensors."""
_DEEPEST = 64
_OF_NUMBERS = (ArithmeticError, LookupError)
_encoder = msgspec.msgpack.Encoder()


class TensorRef(msgspec.Struct, frozen=True):
    """Placeholder for a tensor in decoded state, when no resolver was given."""

    name: str


def encode(value: object, *, path: str = "", lift: Lift | None = None, canonical: bool = False) -> bytes:
    """Encode state as bytes.

    Args:
        value: the state: nested containers of plain values.
        path: name of the state, for names of tensors and for error messages.
        lift: names the tensors in the state; without it a tensor is an error.
        canonical: sort dictionaries, so that equal state gives equal bytes whatever the order of insertion.

    Raises:
        StateError: a value's type cannot be encoded; the message has its path.
    """
    return _encoder.encode(_Packer(lift, canonical).pack(value, path, 0))


def decode(data: bytes, *, resolve: Resolve = TensorRef) -> object:
    """Decode state from bytes that `encode` has made. Raises `StateError` for any other bytes."""

    def hook(code: int, payload: memoryview) -> object:
        return _unpack(code, payload, decoder, resolve)

    decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(ext_hook=hook)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError, AttributeError, RecursionError, *_OF_NUMBERS) as error:
        raise StateError(f"the Python state that was received does not decode: {error}") from error


class _Packer:
    """Converts one state, in one walk over it."""

    def __init__(self, lift: Lift | None, canonical: bool) -> None:
        self._lift = lift
        self._canonical = canonical

    def pack(self, value: object, path: str, depth: int) -> object:
        """Convert the value to types that msgpack knows."""
        kind = type(value)
        if value is None or kind is bool or kind is float or kind is bytes:
            return value
        if depth > _DEEPEST:
            raise StateError(f"{path} nests deeper than {_DEEPEST} levels", hint="does it contain itself?")
        if kind is str or kind is int:
            return _plain(value)
        if kind is list:
            return self._items(cast(list[object], value), path, depth)
        if kind is dict or kind is defaultdict:
            return self._dict(value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        return msgspec.msgpack.Ext(*self._extension(value, path, depth))

    def _items(self, values: Iterable[object], path: str, depth: int) -> list[object]:
        return [self.pack(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(values)]

    def _dict(self, value: object, path: str, depth: int) -> object:
        items = cast(dict[object, object], value)
        if not all(type(key) is str and not _is_odd(key) for key in items):
            return msgspec.msgpack.Ext(_PAIRS, self._pairs(items, path, depth))
        texts = sorted(cast(dict[str, object], items)) if self._canonical else cast(dict[str, object], items)
        return {key: self.pack(items[key], _join(path, key), depth + 1) for key in texts}

    def _pairs(self, items: dict[object, object], path: str, depth: int) -> bytes:
        pairs: list[tuple[bytes, object]] = []
        for key, item in items.items():
            packed = self.pack(key, f"{path} key {key!r}", depth + 1)
            pairs.append((_encoder.encode(packed), self.pack(item, _join(path, key), depth + 1)))
        if self._canonical:
            pairs.sort(key=lambda pair: pair[0])
        return _encoder.encode([part for key, item in pairs for part in (msgspec.Raw(key), item)])

    def _tensor(self, value: torch.Tensor, path: str) -> msgspec.msgpack.Ext:
        if self._lift is None:
            raise StateError(f"{path} is a tensor, where only plain values can be")
        return msgspec.msgpack.Ext(_TENSOR, self._lift(path, value).encode())

    def _extension(self, value: object, path: str, depth: int) -> tuple[int, bytes]:
        kind = type(value)
        if kind is tuple:
            return _TUPLE, _encoder.encode(self._items(cast(tuple[object, ...], value), path, depth))
        if kind is set or kind is frozenset:
            members = sorted(_encoder.encode(item) for item in self._items(cast(set[object], value), path, depth))
            code = _SET if kind is set else _FROZENSET
            return code, _encoder.encode([msgspec.Raw(member) for member in members])
        if kind is OrderedDict or kind is Counter:
            code = _ORDERED if kind is OrderedDict else _COUNTER
            return code, self._pairs(cast(dict[object, object], value), path, depth)
        if isinstance(value, deque) and kind is deque:
            return _DEQUE, _encoder.encode([value.maxlen, self._items(value, path, depth)])
        if isinstance(value, complex) and kind is complex:
            return _COMPLEX, _encoder.encode([value.real, value.imag])
        if kind in _PARTS:
            return _EXACT, _encoder.encode([kind.__name__, *self._items(_PARTS[kind](value), path, depth)])
        if isinstance(value, torch.dtype):
            return _DTYPE, dtype_name(value).encode()
        if isinstance(value, torch.device):
            return _DEVICE, str(value).encode()
        if isinstance(value, torch.Size):
            return _SIZE, _encoder.encode(list(value))
        if isinstance(value, bytearray) and kind is bytearray:
            return _BYTEARRAY, bytes(value)
        if isinstance(value, np.generic | np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
            if self._lift is not None and isinstance(value, np.ndarray) and value.nbytes > _LARGE_BYTES:
                # As bytes: torch has no counterpart of some kinds, such as text and dates.
                plain = np.require(value, requirements=["C", "W"])
                flat = torch.from_numpy(plain.reshape(-1).view(np.uint8))
                kept = [value.dtype.str, list(value.shape), self._lift(path, flat)]
                return _LARGE_ARRAY, _encoder.encode(kept)
            code = _NUMPY_SCALAR if isinstance(value, np.generic) else _NUMPY_ARRAY
            return code, _encoder.encode([value.dtype.str, list(value.shape), value.tobytes()])
        if by_name(kind):
            items = [value._name_] if isinstance(value, enum.Enum) else list(cast(tuple[object, ...], value))
            return _BY_NAME, _encoder.encode([kind.__module__, kind.__qualname__, *self._items(items, path, depth)])
        raise StateError(
            f"{path or 'the state'}: {kind.__name__} cannot be protected",
            hint="leave it out of state_dict(), or keep it as numbers, text, lists, dicts or tensors",
        )


def by_name(kind: type) -> bool:
    """True for a named tuple or an enum (no flags) of a module, whose values are made without running its code."""
    named = kind.__base__ is tuple and hasattr(kind, "_fields") and not kind.__dictoffset__
    if any(isinstance(getattr(kind, each, None), FunctionType) for each in ("__eq__", "__iter__", "__len__")):
        return False
    members = issubclass(kind, enum.Enum) and not issubclass(kind, enum.Flag)
    return (named or members) and "<" not in kind.__qualname__


def _of_class(module: str, path: str, *items: Any) -> object:
    kind: Any = reduce(getattr_static, path.split("."), sys.modules[module])  # imports nothing, and runs no code
    if not isinstance(kind, type) or not by_name(kind):
        raise ValueError(f"{path} is no class of named tuples")
    return kind.__members__[items[0]] if isinstance(kind, enum.EnumMeta) else tuple.__new__(cast(Any, kind), items)


def _is_odd(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _plain(value: object) -> object:
    if type(value) is int:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    text = str(value)
    return msgspec.msgpack.Ext(_ODD_TEXT, text.encode("utf-8", "surrogatepass")) if _is_odd(text) else value


def _join(path: str, key: object) -> str:
    if type(key) is str and not _is_odd(key):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def _unpack(code: int, payload: memoryview, decoder: msgspec.msgpack.Decoder[object], resolve: Resolve) -> object:
    if code == _BIG_INT:
        return int.from_bytes(payload, "big", signed=True)
    if code == _TENSOR:
        return resolve(str(payload, "utf-8"))
    if code == _DTYPE:
        return dtype_of(str(payload, "utf-8"))
    if code == _DEVICE:
        return torch.device(str(payload, "utf-8"))
    if code == _BYTEARRAY:
        return bytearray(payload)
    if code == _ODD_TEXT:
        return str(payload, "utf-8", "surrogatepass")
    items = decoder.decode(payload)
    if not isinstance(items, list):
        raise ValueError(f"extension {code} holds no list")
    if code in (_PAIRS, _ORDERED, _COUNTER):
        pairs = dict(zip(items[::2], items[1::2], strict=True))
        return OrderedDict(pairs) if code == _ORDERED else Counter(pairs) if code == _COUNTER else pairs
    if code in (_NUMPY_SCALAR, _NUMPY_ARRAY):
        kind, shape, raw = items
        array = np.frombuffer(raw, dtype=np.dtype(kind)).reshape(shape)
        return array[()] if code == _NUMPY_SCALAR else array.copy()
    if code == _LARGE_ARRAY:
        return _array(resolve(items[2]), items[0], items[1])
    if code == _BY_NAME:
        return _of_class(*items)
    if code == _EXACT:
        return _NAMED[items[0]](*items[1:])
    if code == _COMPLEX:
        return complex(*items)
    if code == _DEQUE:
        return deque(items[1], maxlen=items[0])
    makers: dict[int, Callable[[list[object]], object]] = {
        _TUPLE: tuple,
        _SET: set,
        _FROZENSET: frozenset,
        _SIZE: torch.Size,  # type: ignore[dict-item]
    }
    if code not in makers:
        raise ValueError(f"unknown extension {code}")
    return makers[code](items)


def _array(place: object, kind: str, shape: list[int]) -> object:
    """An array over the memory of a tensor, which may be filled later."""
    if not isinstance(place, torch.Tensor):
        return place
    return place.detach().numpy().view(np.dtype(kind)).reshape(shape)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """`torch.float32` for `float32`. Raises `StateError` when this torch has no such dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"{name!r} is no dtype of this torch {torch.__version__}", hint="run one version everywhere")
    return dtype
