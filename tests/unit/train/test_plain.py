"""Plain values: what is kept of them, what is the same, and how they come back."""

import time
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch

from regrow.core.errors import NotPlain, TooLarge
from regrow.hydration.codec import decode, encode
from regrow.train.values import plain
from regrow.train.values.arrays import Keep
from regrow.train.values.plain import LEAVES, GrownCopy, copied, is_refused, keep, put_back, same, still, take_over

NAN = float("nan")


def a_list_of_itself() -> list[Any]:
    made: list[Any] = [1]
    made += [made] * 900
    return made


@pytest.mark.parametrize(
    "value",
    [torch.zeros(1), [torch.zeros(1)], {"a": object()}, {object(): 1}, len, pytest, {"a": [lambda: 0]}, range(3)],
)
def test_what_is_not_plain_is_not_kept(value: Any) -> None:
    with pytest.raises(NotPlain):
        keep(value)


@pytest.mark.parametrize(
    "value", [[0] * (LEAVES + 1), {"a": [[0] * 500, [0] * 501]}, "x" * 100_000, [[]] * 2000, a_list_of_itself()]
)
def test_what_is_large_or_holds_itself_is_not_kept(value: Any) -> None:
    with pytest.raises((TooLarge, NotPlain)):
        keep(value)


def test_containers_come_back_in_their_place_at_every_depth() -> None:
    inner: list[int] = [1, 2]
    window: deque[float] = deque([0.5], maxlen=3)
    counts = Counter("aab")
    tree = {"inner": inner, "window": window, "counts": counts, "pair": (inner, {3}), "n": 1, "gone": None}
    before = keep(tree)
    inner.append(3)
    window.extend([1.0, 2.0, 3.0])
    counts["c"] += 1
    tree["inner"] = [9]
    tree["new"] = 5
    del tree["gone"]
    assert put_back(before) is tree
    assert tree["inner"] is inner and inner == [1, 2]
    assert tree["window"] is window and list(window) == [0.5] and window.maxlen == 3
    assert counts == Counter("aab") and list(tree) == ["inner", "window", "counts", "pair", "n", "gone"]


@pytest.mark.parametrize(
    "value", [[1, [2]], {"a": (1, {2})}, deque([1, [2]], maxlen=3), Counter("ab"), OrderedDict(b=1, a=frozenset({3}))]
)
def test_a_copy_is_equal_and_shares_no_container(value: Any) -> None:
    kept = keep(value)
    made: Any = copied(kept)
    assert made == value and type(made) is type(value) and made is not value
    value.clear()
    assert made and copied(kept) == made


def test_what_has_not_changed_is_not_written_to() -> None:
    class Watched(Exception):
        pass

    there = {"a": [1, 2], "b": {3, 4}}
    seen = iter(there["a"])
    assert put_back(keep(there)) is there
    assert next(seen) == 1  # a cleared list would have ended it
    for _ in there:
        put_back(keep(there))  # a changed dictionary would end this loop with an error


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (NAN, float("nan"), True),
        ([1, [2]], [1, [2]], True),
        ([1, [2]], [1, [3]], False),
        ([1], (1,), False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        (None, 0, False),
    ],
)
def test_values_are_the_same_in_type_and_content(one: Any, other: Any, alike: bool) -> None:
    assert same(keep(one), keep(other)) is alike


@pytest.mark.parametrize(
    ("present", "arrived"),
    [
        ([1], [1, 2, 3]),
        ({"a": 1}, {"b": [2]}),
        ({1}, {2, 3}),
        (deque([1], maxlen=2), deque([2, 3], maxlen=2)),
        (Counter("a"), Counter("bb")),
        (OrderedDict(a=1), OrderedDict(b=2)),
    ],
)
def test_what_arrives_is_taken_over_in_place_or_instead(present: Any, arrived: Any) -> None:
    sent = decode(encode(arrived))
    other = take_over(present, sent, in_place=False)
    assert other is not present and other == arrived != present and type(other) is type(arrived)
    assert take_over(present, sent, in_place=True) is present
    assert present == arrived and type(present) is type(arrived)


@pytest.mark.parametrize("begun", [["a"], []])
def test_a_default_of_missing_keys_is_that_of_what_is_here(begun: list[str]) -> None:
    nested: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for key in begun:
        nested[key]["x"].append(1)
    arrived = decode(encode({"a": {"x": [1, 2]}, "b": {"y": [3]}}))
    taken: Any = take_over(nested, arrived, in_place=True)
    assert taken is nested
    taken["b"]["z"].append(4)
    taken["c"]["z"].append(5)
    assert taken == {"a": {"x": [1, 2]}, "b": {"y": [3], "z": [4]}, "c": {"z": [5]}}


def test_a_deque_travels_with_its_bound() -> None:
    sent = decode(encode({"losses": deque([1.0, 2.0], maxlen=2)}))
    assert isinstance(sent, dict) and sent["losses"] == deque([1.0, 2.0]) and sent["losses"].maxlen == 2


def test_arrays_of_what_is_only_added_to_stay_themselves() -> None:
    made = torch.zeros(2)
    grown: list[Any] = [made, (1, made)]
    before = keep(grown, Keep.ITSELF)
    assert still(before, grown) and same(before, keep(grown, Keep.ITSELF))
    grown.append(torch.ones(2))
    assert not still(before, grown) and not same(before, keep(grown, Keep.ITSELF))
    assert put_back(before) is grown and len(grown) == 2 and grown[0] is made and grown[1][1] is made


@pytest.mark.parametrize("added", [[object()], [0.0] * (LEAVES + 1), [torch.zeros(1)] * LEAVES + [object()]])
def test_a_list_that_is_only_added_to_may_hold_anything_and_be_long(added: list[Any]) -> None:
    grown = {"a": list(added)}
    before = keep(grown, Keep.ITSELF)
    assert still(before, grown)
    grown["a"].append(1)
    assert not still(before, grown) and not same(before, keep(grown, Keep.ITSELF))
    put_back(before)
    assert grown == {"a": added}
    with pytest.raises((NotPlain, TooLarge)):
        keep(grown)


def test_keys_that_are_tuples_come_back_as_they_were() -> None:
    table: dict[Any, float] = {(0, 1): 0.5, ("a", 2): 1.0, frozenset({1}): 2.0, "b": 3.0}
    before, then = keep(table), dict(table)
    assert still(before, table) and same(before, keep(table))
    table[0, 1] += 1
    table[5, 6] = 1.0
    assert copied(before) == then and decode(encode(copied(before))) == then
    assert put_back(before) is table and table == then and (0, 1) in table
    with pytest.raises(NotPlain):
        keep({(torch.zeros(1), 1): 0.0}, Keep.CONTENT)


def test_a_long_list_is_told_with_what_was_in_it() -> None:
    grown = [0.5] * 5_000
    before = keep(grown, Keep.ITSELF)
    grown.append(1.0)
    assert isinstance(before, GrownCopy) and copied(before.values()) == [0.5] * 5_000
    with pytest.raises(NotPlain):
        GrownCopy.of([object()], Keep.ITSELF).values()


def test_a_look_at_a_long_list_does_not_go_through_it() -> None:
    keep(grown := [0.5] * 3_000_000, Keep.CONTENT)
    started = time.perf_counter()
    for _ in range(20):
        keep(grown, Keep.CONTENT)
    assert time.perf_counter() - started < 0.2
    with pytest.raises(TooLarge):
        keep([torch.zeros(1)] * 5_000, Keep.CONTENT)


def test_to_be_refused_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(plain, "fill", lambda found: made.extend(found))
    assert is_refused([torch.zeros(1)]) and is_refused([torch.zeros(1)] * 500, Keep.CONTENT)
    assert not is_refused([torch.zeros(1)] * 50, Keep.CONTENT) and made == []
    keep([torch.zeros(1)] * 50, Keep.CONTENT)
    assert len(made) == 50
