"""Converts a batch to a tree of plain nodes and the buffers of its tensors, and back, exactly and without pickle.

The tree is msgpack. None, bool, 64-bit int, float and str are stored directly; everything else is a tagged list of one
of the types in `tree_nodes`. The elements of tensors and arrays are not in the tree: each node has their offset in the
payload. A class that is unknown here, such as a named tuple or a tokenizer's output, is stored by name; reading looks
it up only in modules that are already imported.
"""

import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NoReturn, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from regrow.core.errors import NotCacheable
from regrow.data.cache.layout import Bytes, aligned
from regrow.data.cache.leaves import (
    array_bytes,
    described_dtype,
    dtype_description,
    read_array,
    read_scalar,
    read_tensor,
    scalar_bytes,
    tensor_bytes,
    tensor_dtype,
)
from regrow.data.cache.tree_nodes import (
    ArrayNode,
    BigIntNode,
    BytesNode,
    ComplexNode,
    DictNode,
    ListNode,
    MappingNode,
    NamedNode,
    Node,
    NodeBase,
    NumpyTextNode,
    OddTextNode,
    ScalarNode,
    TensorNode,
    TupleNode,
)

__all__ = ["from_tree", "to_tree"]

_DEEPEST = 64
_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Node] = msgspec.msgpack.Decoder(Node)


def to_tree(batch: object) -> tuple[bytes, list[Bytes]]:
    """Convert a batch to a tree and the buffers of its payload; each buffer must begin at a multiple of 64.

    The buffers refer to the batch's own memory if that is dense, without a copy. Raises `NotCacheable`.
    """
    writer = _Writer()
    node = writer.node(batch, "the batch", 0)
    try:
        return _encoder.encode(node), writer.buffers
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise NotCacheable(f"the batch is too large a tree: {error}") from error


def from_tree(tree: Bytes, memory: Any, payload_at: int) -> Any:
    """The batch, in new containers; its tensors are views of `memory`, in which the payload begins at `payload_at`.

    `memory`: writable, such as a private mapping; the tensors keep it alive. Raises `NotCacheable` if a class is not
    imported in this process, and `ValueError` if the tree is invalid.
    """
    try:
        return _Reader(memory, payload_at).value(_decoder.decode(tree))
    except (msgspec.MsgspecError, RuntimeError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"this is no tree of a batch: {error}") from error


# --- writing ---------------------------------------------------------------------------------------------------------


class _Writer:
    """Converts one batch to nodes."""

    def __init__(self) -> None:
        self.buffers: list[Bytes] = []
        self._at = 0
        self._known: dict[int, tuple[object, TensorNode | ArrayNode]] = {}
        """Nodes by the id of their object; holds the object, so that no other object gets its id meanwhile."""

    def node(self, value: Any, path: str, depth: int) -> Node:
        """Convert a value to a node."""
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return cast(Node, value)
        if kind is str:
            return _text(value)
        if kind is int:
            return _int(value)
        if depth > _DEEPEST:
            raise NotCacheable(f"{path[:80]}… nests deeper than {_DEEPEST} levels")
        if kind is list:
            return ListNode(self._items(value, path, depth))
        if kind is tuple:
            return TupleNode(self._items(value, path, depth))
        if kind is dict:
            return DictNode(*self._pairs(value, path, depth))
        if isinstance(value, torch.Tensor | np.ndarray):
            if id(value) not in self._known:
                node = self._tensor(value, path) if isinstance(value, torch.Tensor) else self._array(value, path)
                self._known[id(value)] = (value, node)
            return self._known[id(value)][1]
        return self._other(value, path, depth)

    def _other(self, value: Any, path: str, depth: int) -> Node:
        kind = type(value)
        if kind is bytes:
            return BytesNode(value)
        if kind is complex:
            return ComplexNode(value.real, value.imag)
        if kind is np.str_:
            return NumpyTextNode(_text(str.__str__(value)))
        if kind is np.bytes_:
            return NumpyTextNode(BytesNode(bytes(value)))
        if isinstance(value, np.generic):
            return ScalarNode(self._dtype(value.dtype, path), scalar_bytes(value, path))
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            parts = self._items(value, path, depth)
            name = _class_name(kind, path)
            if not _same_parts(_rebuilt(lambda: kind(*value), kind, path), value):
                raise NotCacheable(f"{path}: a {kind.__qualname__} is not what its fields make anew")
            return NamedNode(name, parts)
        if isinstance(value, MutableMapping):
            keys, parts = self._pairs(value, path, depth)
            name = _class_name(kind, path)
            _check_mapping(value, path)
            return MappingNode(name, keys, parts)
        raise NotCacheable(f"{path} is of type {kind.__module__}.{kind.__qualname__}")

    def _items(self, values: Iterable[Any], path: str, depth: int) -> list[Node]:
        return [self.node(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(values)]

    def _pairs(self, values: MutableMapping[Any, Any], path: str, depth: int) -> tuple[list[Node], list[Node]]:
        keys = list(values)
        count = len(self.buffers)
        key_nodes = [self.node(key, f"a key of {path}", depth + 1) for key in keys]
        if len(self.buffers) != count:
            raise NotCacheable(f"a key of {path} holds a tensor")
        return key_nodes, [self.node(values[key], f"{path}[{key!r}]", depth + 1) for key in keys]

    def _append(self, buffer: Bytes) -> int:
        at = self._at
        self.buffers.append(buffer)
        self._at += aligned(len(buffer))
        return at

    def _tensor(self, value: torch.Tensor, path: str) -> TensorNode:
        raw, strides = tensor_bytes(value, path)
        number = len(self.buffers)
        at = self._append(raw)
        return TensorNode(number, at, tensor_dtype(value), list(value.shape), strides, value.requires_grad)

    def _array(self, value: NDArray[Any], path: str) -> ArrayNode:
        dtype = self._dtype(value.dtype, path)
        raw, columns_first = array_bytes(value, path)
        number = len(self.buffers)
        return ArrayNode(number, self._append(raw), dtype, list(value.shape), columns_first)

    def _dtype(self, dtype: "np.dtype[Any]", path: str) -> Node:
        return self.node(dtype_description(dtype, path), f"the dtype of {path}", 0)


def _int(value: int) -> Node:
    if _LEAST_INT <= value <= _MOST_INT:
        return value
    return BigIntNode(value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _text(value: str) -> str | OddTextNode:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        return OddTextNode(value.encode("utf-8", "surrogatepass"))
    return value


def _class_name(kind: type, path: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_of(name) is not kind:
        raise NotCacheable(f"{path} is of {name}, which is no name in a module")
    return name


def _rebuilt(make: Callable[[], object], kind: type, path: str) -> object:
    """The object that `make` makes from the parts. Raises `NotCacheable` if it is not of the class `kind`."""
    try:
        again = make()
    except Exception as error:
        raise NotCacheable(f"{path}: a {kind.__qualname__} cannot be made from its parts: {error}") from error
    if type(again) is not kind:
        raise NotCacheable(f"{path}: a {kind.__qualname__} made from its parts is a {type(again).__qualname__}")
    return again


def _same_parts(again: object, value: Sequence[Any]) -> bool:
    parts = cast(Sequence[Any], again)
    return len(parts) == len(value) and all(mine is its for mine, its in zip(parts, value, strict=True))


def _check_mapping(value: MutableMapping[Any, Any], path: str) -> None:
    """Raise `NotCacheable` if the mapping's class makes a different mapping from the same pairs.

    Private attributes may be lost, such as the encodings in a tokenizer's output, but not public ones.
    """
    kind = type(value)
    made = _rebuilt(lambda: cast(Any, kind)(dict(value.items())), kind, path)
    again = cast(MutableMapping[Any, Any], made)
    keys = list(value)
    if list(again) != keys or any(again[key] is not value[key] for key in keys):
        raise NotCacheable(f"{path}: a {kind.__qualname__} made from its pairs has others")
    before, after = _public(value), _public(again)
    for name in before.keys() | after.keys():
        mine, its = cast(Any, before.get(name)), cast(Any, after.get(name))
        if mine is not its and (type(mine) not in (int, str, bool, float) or mine != its):
            alike = isinstance(mine, dict) and isinstance(its, dict) and list(mine) == list(its)
            if alike and all(mine[key] is its[key] for key in mine):
                continue  # the attribute in which it stores its pairs
            raise NotCacheable(f"{path}: a {kind.__qualname__} made from its pairs has another attribute {name}")


def _public(value: object) -> dict[str, Any]:
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    return {name: item for name, item in attributes.items() if not name.startswith("_")}


# --- reading ---------------------------------------------------------------------------------------------------------


class _Reader:
    """Converts one tree back to a batch."""

    def __init__(self, memory: Any, payload_at: int) -> None:
        self._memory = memory
        self._payload_at = payload_at
        self._known: dict[int, Any] = {}

    def value(self, node: Node) -> Any:
        """Convert a node to its value."""
        if not isinstance(node, NodeBase):
            return node
        if isinstance(node, TensorNode | ArrayNode):
            if node.number not in self._known:
                self._known[node.number] = self._viewed(node)
            return self._known[node.number]
        if isinstance(node, DictNode):
            return self._dict(node)
        if isinstance(node, ListNode):
            return [self.value(part) for part in node.parts]
        if isinstance(node, TupleNode):
            return tuple([self.value(part) for part in node.parts])
        if isinstance(node, NamedNode):
            return _named_class(node.cls)(*[self.value(part) for part in node.parts])
        if isinstance(node, MappingNode):
            return _mapping_class(node.cls)(self._dict(node))
        if isinstance(node, ComplexNode):
            return complex(node.real, node.imag)
        if isinstance(node, BytesNode):
            return node.raw
        if isinstance(node, BigIntNode):
            return int.from_bytes(node.raw, "big", signed=True)
        if isinstance(node, OddTextNode):
            return node.raw.decode("utf-8", "surrogatepass")
        if isinstance(node, NumpyTextNode):
            text = self.value(node.text)
            return np.bytes_(text) if isinstance(text, bytes) else np.str_(text)
        return read_scalar(self._dtype(node.dtype), node.raw)

    def _dict(self, node: DictNode | MappingNode) -> dict[Any, Any]:
        keys = [self.value(key) for key in node.keys]
        return dict(zip(keys, [self.value(part) for part in node.parts], strict=True))

    def _viewed(self, node: TensorNode | ArrayNode) -> Any:
        if isinstance(node, TensorNode):
            return read_tensor(node, self._memory, self._payload_at)
        return read_array(node, self._dtype(node.dtype), self._memory, self._payload_at)

    def _dtype(self, node: Node) -> "np.dtype[Any]":
        return described_dtype(self.value(node))


def _class_of(name: str) -> object:
    """The object of this name in the imported modules; None if there is none."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _named_class(name: str) -> Callable[..., Any]:
    found = _class_of(name)
    if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
        return found
    _refuse(name, "named tuple")


def _mapping_class(name: str) -> Callable[..., Any]:
    found = _class_of(name)
    if isinstance(found, type) and issubclass(found, MutableMapping):
        return found
    _refuse(name, "mapping")


def _refuse(name: str, what: str) -> NoReturn:
    raise NotCacheable(f"{name} is no {what} that is imported in this process")
