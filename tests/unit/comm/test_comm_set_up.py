"""Notes of what ranks hear before their loop: when a call is the same one, how groups are called, what is too much."""

import msgspec
import pytest
import torch

from regrow.comm.group_ranks import RankInWorld
from regrow.comm.set_up import calls, log
from regrow.comm.set_up.log import Note, NoteBounds, TensorShape

NOTED = Note("allreduce", "train.py:27", -1, 0, [TensorShape("float32", [2])])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"where": "train.py:99"}, ""),
        ({"name": "broadcast"}, "it calls broadcast at train.py:27, where the first workers called all_reduce at"),
        ({"root": 1}, "is of root 1, and was of root -1"),
        ({"op": 3}, "reduces otherwise than it did"),
        ({"outputs": [TensorShape("float32", [3])]}, "asks for float32[3], and was answered with float32[2]"),
        ({"outputs": [TensorShape("int64", [2])]}, "asks for int64[2], and was answered with float32[2]"),
    ],
)
def test_a_call_is_another_one_by_its_name_root_operation_and_shapes(changed: dict[str, object], why: str) -> None:
    found = log.differs(NOTED, msgspec.structs.replace(NOTED, **changed))
    assert why in found
    assert bool(found) is bool(why)


def test_a_group_is_called_the_same_in_a_world_of_another_size() -> None:
    def called(ranks: list[int], rank: int, world: int, *, unit: int = 2, whole: bool = False, replica: int = 0) -> str:
        return log.group_name(ranks, RankInWorld(rank, world), unit, whole=whole, replica=replica)

    assert called([0, 1, 2, 3], 1, 4, whole=True) == called(list(range(6)), 5, 6, whole=True)
    assert called([1, 3], 1, 4) == called([1, 3, 5], 5, 6) != called([0, 2], 0, 4)
    assert called([0, 1], 1, 4) == called([4, 5], 5, 6) != called([2, 3], 3, 4, replica=1)


def test_counts_of_calls_are_compared_both_ways() -> None:
    assert log.counted_differently({"x0.0": 3}, {"x0.0": 3}) is None
    assert log.counted_differently({"x0.0": 3}, {}) == ("x0.0", 0)
    assert log.counted_differently({"x0.0": 3}, {"x0.0": 3, "0,1.0": 1}) == ("0,1.0", 0)


def test_bounds_are_of_calls_and_of_bytes_of_either_kind() -> None:
    bounds = NoteBounds()
    assert [bounds.answer(NOTED, log.OWN_BYTES, own=False) for _ in range(4)] == [""] * 4
    assert bounds.answer(NOTED, log.OWN_BYTES, own=True) == ""
    assert "all_reduce at train.py:27 makes 64 MiB of answers that all ranks share" in bounds.answer(
        NOTED, 1, own=False
    )
    assert "all_reduce at train.py:27 makes 16 MiB of answers for this rank alone" in bounds.answer(NOTED, 1, own=True)
    assert [bounds.call(NOTED) for _ in range(log.CALLS)] == [""] * log.CALLS
    assert "all_reduce at train.py:27 is call 4097" in bounds.call(NOTED)


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.tensor([1.0, float("nan")]), torch.tensor(7)],
        [torch.tensor([True, False]), torch.empty(0), torch.tensor([1 + 2j]).conj()],
        [torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3).t()],
    ],
)
def test_answers_come_back_bit_for_bit(tensors: list[torch.Tensor]) -> None:
    room = [torch.zeros_like(tensor) for tensor in tensors]
    calls.fill(room, calls.value_of(tensors))
    assert calls.value_of(room) == calls.value_of(tensors)
    assert [each.shape for each in room] == [each.shape for each in tensors]
