"""A batch comes out of the cache as it went in: the same types, the same bits."""

import contextlib
import math
import struct
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from regrow.core.errors import NotCacheable
from regrow.data.cache.layout import aligned
from regrow.data.cache.leaves import _DTYPES
from regrow.data.cache.tree import from_tree, to_tree


def again(batch: object) -> Any:
    tree, buffers = to_tree(batch)
    memory = bytearray(64)  # nothing says that the payload begins at 0
    for buffer in buffers:
        memory += bytes(buffer) + bytes(aligned(len(buffer)) - len(buffer))
    return from_tree(tree, memory, 64)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


class Pair(NamedTuple):
    left: Any
    right: Any = 0


Legacy = namedtuple("Legacy", "a b")


class Encoding(UserDict[str, Any]):
    """As a tokenizer's output."""

    def __init__(self, data: dict[str, Any], encodings: object = None) -> None:
        super().__init__(data)
        self._encodings = encodings


class EntryStore(MutableMapping[str, Any]):
    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Titled(UserDict[str, Any]):
    title = "none"


class Doubling(UserDict[str, Any]):
    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__({key: item * 2 for key, item in data.items()})


class Checked(tuple):  # type: ignore[type-arg]
    _fields = ("a",)

    def __new__(cls, a: int) -> "Checked":
        return tuple.__new__(cls, (a + 1,))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False),
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.lists(parts, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)), parts)
        | st.builds(Pair, parts, parts)
    ),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """The value with the types of all its parts, which `==` does not look at."""
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    return type(value), math.copysign(1, value) if isinstance(value, float) else 0, value


@given(batch=plain)
def test_plain_values_keep_type_and_value(batch: object) -> None:
    assert typed(again(batch)) == typed(batch)


@pytest.mark.parametrize(
    "text", ["", "plain", "naïve", "\x00", "\ud800", "a\udfffb", "\U0001f600", "x" * 100_000, "\ud83d\ude00"]
)
def test_text_is_exact_even_where_it_is_no_unicode(text: str) -> None:
    assert again([text, {text: text}]) == [text, {text: text}]


@pytest.mark.parametrize(
    "number", [0, -1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**100, -(10**100)]
)
def test_integers_of_any_size_are_exact(number: int) -> None:
    assert again(number) == number
    assert type(again(number)) is int


@pytest.mark.parametrize("word", [0x7FF8000000000001, 0xFFF8DEADBEEF0001, 0x7FF0000000000000, 0x8000000000000000, 1])
def test_every_bit_of_a_float_is_kept(word: int) -> None:
    raw = struct.pack("<Q", word)
    (value,) = struct.unpack("<d", raw)
    assert bits(again([value])[0]) == raw
    assert again(np.frombuffer(raw)).tobytes() == raw
    assert again(np.frombuffer(raw)[0]).tobytes() == raw
    assert again(torch.frombuffer(bytearray(raw), dtype=torch.float64)).numpy().tobytes() == raw
    assert bits(again(complex(1, value)).imag) == raw


def test_true_is_not_one_and_one_is_not_one_point_zero() -> None:
    assert [type(item) for item in again([True, 1, 1.0, False, 0])] == [bool, int, float, bool, int]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (2, 3, 4), (1, 1, 5)])
@pytest.mark.parametrize("name", sorted(_DTYPES))
def test_tensors_of_every_dtype_and_shape_are_exact(name: str, shape: tuple[int, ...]) -> None:
    dtype = _DTYPES[name]
    count = math.prod(shape)
    raw = torch.randint(0, 2 if name == "bool" else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    tensor = (raw.view(dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)
    back = again({"x": tensor})["x"]
    assert type(back) is torch.Tensor and back.dtype is dtype and back.shape == tensor.shape
    assert back.stride() == tensor.stride() and not back.requires_grad and back.is_leaf
    if count:
        assert torch.equal(back.reshape(-1).view(torch.uint8), raw)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4)[:, 1:],
        torch.arange(24.0).reshape(4, 6)[::2, ::3],
        torch.tensor([1.0]).expand(5),
        torch.arange(6.0).flip(0),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).imag,
    ],
)
def test_a_scattered_tensor_comes_back_in_one_piece(tensor: torch.Tensor) -> None:
    back = again(tensor)
    assert torch.equal(back, tensor)
    assert back.is_contiguous()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(1, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(4, 4)[2:].t(),
    ],
)
def test_a_dense_tensor_keeps_its_strides_as_kernels_choose_by_them(tensor: torch.Tensor) -> None:
    back = again(tensor)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


def test_requires_grad_is_kept_and_nothing_is_tracked() -> None:
    back = again(
        [torch.ones(3, requires_grad=True), torch.empty(0, requires_grad=True), torch.ones(2, 2).t().requires_grad_()]
    )
    assert [(item.requires_grad, item.is_leaf, item.grad) for item in back] == [(True, True, None)] * 3
    (back[0] * 2).sum().backward()
    assert back[0].grad.tolist() == [2, 2, 2]


def test_one_tensor_in_two_places_stays_one() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    back = again({"a": tensor, "b": [tensor], "c": torch.zeros(3), "d": (array, array)})
    back["a"][0] = 5
    assert back["b"][0] is back["a"] and back["d"][0] is back["d"][1]
    assert back["c"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(20)[::3],
        np.array(3.5),
        np.zeros((0, 4), np.int16),
        np.array([True, False]),
        np.array(["2020-01-01", "NaT"], "M8[ns]"),
        np.array([1, 2], "m8[D]"),
        np.array(["a", "bcd\ud800"]),
        np.array([b"a", b"bcd"]),
        np.array([1, 2], ">i4"),
        np.array([1.5], np.float16),
        np.array([1 + 2j], np.complex64),
        np.array([1.25], np.longdouble),
        np.array([(1, 2.0, [1, 2])], [("a", "<i4"), ("b", ">f8"), ("c", "u1", 2)]),
        np.array([(1, (2, b"x"))], [("a", "i1"), ("b", [("c", "i2"), ("d", "S3")])]),
        np.zeros(3, "V5"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_keep_dtype_shape_order_and_bytes(array: NDArray[Any]) -> None:
    back = again([array])[0]
    assert type(back) is np.ndarray and back.dtype == array.dtype and back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    if array.flags.c_contiguous or array.flags.f_contiguous:
        assert back.strides == array.strides
    assert back.flags.writeable


@pytest.mark.parametrize(
    "scalar",
    [
        *(np.float32(-0.0), np.float64(1.5), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1 - 2j)),
        *(np.datetime64("2020-01-01", "s"), np.timedelta64(3, "h"), np.float16(1), np.longdouble(1) / 3),
        *(np.str_("a\x00"), np.str_(""), np.bytes_(b"a\x00"), np.str_("\ud800")),
    ],
    ids=repr,
)
def test_numpy_scalars_keep_their_types(scalar: np.generic) -> None:
    back = again((scalar,))[0]
    assert type(back) is type(scalar) and back == scalar
    assert np.asarray(back).tobytes() == np.asarray(scalar).tobytes()


@pytest.mark.parametrize(
    "batch",
    [
        Pair(1, [torch.ones(2).tolist()]),
        Legacy("x", None),
        Encoding({"ids": [1, 2]}),
        Encoding({"ids": [1, 2]}, encodings=object()),
        EntryStore({"b": 1, "a": 2}),
        OrderedDict([("b", 1), ("a", 2)]),
        Counter("abca"),
        {"b": 1, "a": 2, 3: 4, (1, "x"): 5, None: 6, Pair(1, 2): 7},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_types_with_names_come_back_as_themselves(batch: Any) -> None:
    back = again(batch)
    assert type(back) is type(batch)
    assert list(back) == list(batch)
    if isinstance(batch, MutableMapping):
        assert dict(back.items()) == dict(batch.items())
    else:
        assert back == batch


def test_every_reading_has_containers_of_its_own() -> None:
    tree, buffers = to_tree({"a": [1], "b": Encoding({"c": [2]})})
    first, second = from_tree(tree, b"", 0), from_tree(tree, b"", 0)
    first["a"].append(5)
    first["b"]["c"].append(5)
    assert not buffers and second["a"] == [1] and second["b"]["c"] == [2]


def _attributed() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.note = "mine"  # type: ignore[attr-defined]
    return tensor


def _titled() -> Titled:
    titled = Titled({"a": 1})
    titled.title = "mine"
    return titled


def _with_grad() -> torch.Tensor:
    tensor = torch.ones(1, requires_grad=True)
    tensor.grad = torch.ones(1)
    return tensor


def _endless() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(1)


class Unfit(NamedTuple):
    what: Any


def _local() -> Any:
    class Local(NamedTuple):
        a: int

    return Local(1)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({1, 2}, "set"),
        (object(), "object"),
        (lambda: 0, "function"),
        ({"x": [bytearray(b"a")]}, r"\['x'\]\[0\] is of type builtins.bytearray"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8), "quint8"),
        (torch.ones(1, device="meta"), "meta"),
        (torch.ones(1, requires_grad=True) * 2, "gradient history"),
        (_with_grad(), "gradient"),
        (_inference(), "inference"),
        (_attributed(), "attributes"),
        (np.array([object()]), "dtype object"),
        (np.array([(1, object())], [("a", "i4"), ("b", "O")]), "dtype"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        (np.zeros(2, np.dtype("i4", metadata={"a": 1})), "dtype"),
        (np.array(["a"], np.dtypes.StringDType()), "dtype"),
        (defaultdict(int, a=1), "defaultdict"),
        (Doubling({"a": 1}), "has others"),
        (_titled(), "title"),
        (Checked(1), "fields"),
        (_local(), "no name in a module"),
        (torch.Size([1]), "Size"),
        ({torch.ones(1): 1}, "key"),
        (_endless(), "levels"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_given_again_exactly_is_refused_by_name(batch: object, words: str) -> None:
    with pytest.raises(NotCacheable, match=words) as refused:
        to_tree(batch)
    assert refused.value.reason == str(refused.value)


def test_a_class_is_only_looked_for_among_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    tree, _ = to_tree([Pair(1, 2), Encoding({})])
    monkeypatch.delitem(sys.modules, Pair.__module__)
    with pytest.raises(NotCacheable, match="imported in this process"):
        from_tree(tree, b"", 0)
    assert Pair.__module__ not in sys.modules


@pytest.mark.parametrize(
    "name", ["builtins:tuple", "os:system", "subprocess:Popen", "collections:UserString", "x:y", ""]
)
def test_a_tree_cannot_name_just_any_callable(name: str) -> None:
    tree, _ = to_tree(Pair(1, 2))
    own = f"{Pair.__module__}:Pair".encode()
    from msgspec import msgpack

    forged = tree.replace(msgpack.encode(own.decode()), msgpack.encode(name))
    assert forged != tree
    with pytest.raises(NotCacheable):
        from_tree(forged, b"", 0)


@given(junk=st.binary(max_size=40))
def test_junk_raises_nothing_but_what_callers_expect(junk: bytes) -> None:
    with contextlib.suppress(ValueError, NotCacheable):  # some few bytes are the tree of some plain value
        from_tree(junk, bytearray(64), 0)


def test_every_cut_of_a_tree_is_refused() -> None:
    whole = to_tree({"a": [1, 2.5, "text", None], "b": (True, 7)})[0]
    for size in range(len(whole)):
        with pytest.raises(ValueError):
            from_tree(whole[:size], bytearray(64), 0)


@pytest.mark.parametrize("at", [-1, 1 << 40])
def test_a_tensor_beyond_the_payload_is_refused(at: int) -> None:
    import msgspec

    from regrow.data.cache.tree_nodes import TensorNode

    tree = msgspec.msgpack.encode(TensorNode(0, at, "float32", [4], [], False))
    with pytest.raises(ValueError):
        from_tree(tree, bytearray(64), 0)
    tree = msgspec.msgpack.encode(TensorNode(0, 0, "float32", [2, 2], [1000, 1], False))
    with pytest.raises(ValueError):
        from_tree(tree, bytearray(64), 0)
