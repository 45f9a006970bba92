"""Nodes of a batch's tree: msgpack's own types, and a tagged list of a type below for everything else."""

from typing import Union

import msgspec


class NodeBase(msgspec.Struct, frozen=True, array_like=True, tag_field="t"):
    """A value that has no msgpack type."""


class BigIntNode(NodeBase, frozen=True, tag=1):
    """An int of more than 64 bits: two's complement, big-endian."""

    raw: bytes


class BytesNode(NodeBase, frozen=True, tag=13):
    """Bytes, which msgspec cannot distinguish from text in a union."""

    raw: bytes


class ComplexNode(NodeBase, frozen=True, tag=2):
    """A complex number; both parts are exact."""

    real: float
    imag: float


class OddTextNode(NodeBase, frozen=True, tag=3):
    """Text with lone surrogates, in UTF-8 with `surrogatepass`."""

    raw: bytes


class ListNode(NodeBase, frozen=True, tag=4):
    """A list."""

    parts: "list[Node]"


class TupleNode(NodeBase, frozen=True, tag=5):
    """A tuple."""

    parts: "list[Node]"


class NamedNode(NodeBase, frozen=True, tag=6):
    """A named tuple."""

    cls: str
    parts: "list[Node]"


class DictNode(NodeBase, frozen=True, tag=7):
    """A dict, with its items in order."""

    keys: "list[Node]"
    parts: "list[Node]"


class MappingNode(NodeBase, frozen=True, tag=8):
    """A mapping of another type than dict."""

    cls: str
    keys: "list[Node]"
    parts: "list[Node]"


class TensorNode(NodeBase, frozen=True, tag=9):
    """A tensor; nodes with the same `number` are one tensor. `at`: offset in the payload. No strides: contiguous."""

    number: int
    at: int
    dtype: str
    shape: list[int]
    strides: list[int]
    requires_grad: bool


class ArrayNode(NodeBase, frozen=True, tag=10):
    """A numpy array, with fields as in `TensorNode`. `dtype`: numpy's description of its dtype."""

    number: int
    at: int
    dtype: "Node"
    shape: list[int]
    columns_first: bool


class ScalarNode(NodeBase, frozen=True, tag=11):
    """A numpy scalar."""

    dtype: "Node"
    raw: bytes


class NumpyTextNode(NodeBase, frozen=True, tag=12):
    """A `numpy.str_` or `numpy.bytes_`, which would lose trailing zeros if it were stored as an array."""

    text: "Node"


Node = Union[  # noqa: UP007 - msgspec looks the name up while the alias is made of classes
    None,
    bool,
    int,
    float,
    str,
    BytesNode,
    BigIntNode,
    ComplexNode,
    OddTextNode,
    ListNode,
    TupleNode,
    NamedNode,
    DictNode,
    MappingNode,
    TensorNode,
    ArrayNode,
    ScalarNode,
    NumpyTextNode,
]
