import enum
import math
import pickle
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regrow.core.errors import StateError
from regrow.hydration import codec
from regrow.hydration.codec import TensorRef, encode

decode: Any = codec.decode

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_state_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    back = decode(encode(value))
    assert back == value
    assert back == value or back.is_nan()


@pytest.mark.parametrize(
    "value",
    [
        {1, 2, 3},
        pytest.param(frozenset({"a", ("b", 2)}), id="frozenset"),
        OrderedDict([("z", 1), ("a", 2)]),
        Counter({"a": 3, 7: 1}),
        2**200,
        -(2**64),
        2**64 - 1,
        complex(1.5, -0.0),
        torch.bfloat16,
        torch.device("cuda", 3),
        torch.Size([2, 3]),
        bytearray(b"xyz"),
        np.float32(1.1),
        np.int64(-4),
        np.bool_(True),
        (),
        {},
        {None: 1, True: 2, 2.5: 3},
        "of Latin 1: caf\udce9",
        {"caf\udce9": ["caf\udce9"], "a": 2},
    ],
    ids=repr,
)
def test_every_supported_type_keeps_its_type(value: Any) -> None:
    back = decode(encode(value))
    assert type(back) is type(value)
    assert back == value


def test_a_tensor_under_a_name_that_is_no_unicode_travels_under_one_that_is() -> None:
    names: list[str] = []

    def lift(path: str, _: torch.Tensor) -> str:
        names.append(path)
        return path

    encoded = encode({"caf\udce9": torch.ones(2)}, path="seen", lift=lift)
    assert decode(encoded) == {"caf\udce9": TensorRef("seen['caf\\udce9']")}
    assert [name.encode() for name in names] == [b"seen['caf\\udce9']"]


def test_float_bits_are_exact_even_of_nan_and_negative_zero() -> None:
    bits = [0x7FF8000000000ABC, 0x8000000000000000, 0x7FF0000000000000, 0x0000000000000001, 0xFFF0000000000000]
    floats = [struct.unpack("<d", struct.pack("<Q", pattern))[0] for pattern in bits]
    back = decode(encode(floats))
    assert [struct.unpack("<Q", struct.pack("<d", value))[0] for value in back] == bits
    assert math.isnan(decode(encode({"best": math.nan}))["best"])


def test_numpy_arrays_come_back_writable_and_equal() -> None:
    state = ("MT19937", np.arange(5, dtype=np.uint32), 3)
    back = decode(encode(state))
    assert back[1].dtype == np.uint32
    back[1][0] = 9
    assert back[1].tolist() == [9, 1, 2, 3, 4]


def test_a_defaultdict_comes_back_as_a_dict() -> None:
    assert decode(encode(defaultdict(int, a=1))) == {"a": 1}


def test_tensors_become_references_named_by_their_path() -> None:
    lifted = {}

    def lift(path: Any, tensor: Any) -> Any:
        lifted[path] = tensor
        return path

    state = {"shadow": {"w": torch.ones(2)}, "list": [torch.zeros(1)], 3: torch.ones(3)}
    data = encode(state, path="ema", lift=lift)
    assert set(lifted) == {"ema.shadow.w", "ema.list[0]", "ema[3]"}
    back = decode(data)
    assert back["shadow"]["w"] == TensorRef("ema.shadow.w")
    assert decode(data, resolve=lifted.__getitem__)["list"][0] is lifted["ema.list[0]"]


def test_what_cannot_be_carried_is_named_with_its_place_and_a_cure() -> None:
    with pytest.raises(StateError, match=r"scheduler\.lr_lambdas\[0\]: function cannot be protected .*state_dict"):
        encode({"lr_lambdas": [lambda step: step]}, path="scheduler")
    with pytest.raises(StateError, match=r"ema\.w is a tensor"):
        encode({"w": torch.ones(1)}, path="ema")


def test_state_that_contains_itself_is_refused_and_not_followed_for_ever() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="contain itself"):
        encode(loop, path="loop")


def test_canonical_bytes_do_not_depend_on_the_order_of_insertion() -> None:
    one = {"a": {"x": 1, "y": {3: 0, 1: 0}}, "b": {5, 1, 9}}
    other = {"b": {9, 1, 5}, "a": {"y": {1: 0, 3: 0}, "x": 1}}
    assert encode(one, canonical=True) == encode(other, canonical=True)
    assert list(decode(encode(other))) == ["b", "a"]


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_a_state_error_and_what_decodes_is_plain_state(data: Any) -> None:
    try:
        value = decode(data)
    except StateError:
        return
    assert repr(decode(encode(value))) == repr(value)


def test_every_cut_of_an_encoding_is_refused() -> None:
    whole = encode({"a": [1, 2.5, "text", None], "b": (True, {3}), 7: 2**70})
    for size in range(len(whole)):
        with pytest.raises(StateError):
            decode(whole[:size])


def test_nothing_is_ever_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "loads", forbidden)
    monkeypatch.setattr(pickle, "load", forbidden)
    assert decode(encode({"a": (1, np.float32(2))})) == {"a": (1, np.float32(2))}


@pytest.mark.parametrize(
    "value",
    [
        Decimal("-1.100"),
        Decimal("-NaN12"),
        Fraction(-(10**5000), 7),
        date(2024, 2, 29),
        datetime(2024, 2, 29, 23, 59, 58, 7),
        datetime(2024, 2, 29, tzinfo=timezone(timedelta(hours=-3))),
        timedelta(days=-3, microseconds=5),
    ],
)
def test_exact_numbers_and_dates_come_back_as_they_were(value: Any) -> None:
    (back,) = decode(encode([value]))
    assert type(back) is type(value) and (back == value or back.is_nan())


@pytest.mark.parametrize("sent", [["Fraction", 1, 0], ["Decimal", "x"], ["Path", "/"], [1], [], ["timedelta", 10**15]])
def test_what_makes_no_such_value_is_refused(sent: list[Any]) -> None:
    with pytest.raises(StateError):
        decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(19, msgspec.msgpack.encode(sent))))


class Shade(enum.Enum):
    """Its names run code."""

    DARK = 1

    @property
    def name(self) -> str:
        """Of one that is asked."""
        raise LookupError("not asked for")


class Flags(enum.Flag):
    """A combination is no member."""

    A, B = 1, 2


class Odd(enum.Enum):
    """Compares in its own way."""

    A = 1

    def __eq__(self, other: object) -> bool:
        raise LookupError("not asked for")

    __hash__ = enum.Enum.__hash__


class Own(NamedTuple):
    """Goes through its items in its own way."""

    item: int

    def __iter__(self) -> Iterator[int]:
        raise LookupError("not asked for")


def test_members_of_enums_and_named_tuples_travel_without_code_of_their_classes() -> None:
    assert decode(encode([Shade.DARK])) == [Shade.DARK]
    for odd in (Flags.A | Flags.B, Flags.A, Odd.A, Own(1)):
        with pytest.raises(StateError, match="cannot be protected"):
            encode(odd)


class Holder:
    """Has an attribute that runs code."""

    @property
    def asked(self) -> type:
        """The class of an enum inside."""
        raise AssertionError("code has run for a name that was received")


def test_no_code_runs_for_a_name_that_was_received(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("lazy")
    module.holder, module.__getattr__ = Holder(), lambda name: Holder().asked
    monkeypatch.setitem(sys.modules, "lazy", module)
    for path in ("absent", "holder.asked"):
        sent = msgspec.msgpack.Ext(codec._BY_NAME, msgspec.msgpack.encode(["lazy", path]))
        with pytest.raises(StateError):
            decode(msgspec.msgpack.encode(sent))
