"""Copies of a worker's state: which segment is written over, what waits for what."""

import threading
import time
from collections.abc import Callable

import msgspec
import pytest
import torch

from regrow.core.errors import DeadlineExceeded, StateError
from regrow.core.ids import Rank, StepNo, WorkerId
from regrow.core.messages.copies import SnapshotTaken
from regrow.hydration.copies import segment as segments
from regrow.hydration.copies.segment import Segment, layout
from regrow.hydration.copies.snapshot import SnapshotKeeper
from regrow.hydration.inventory import Inventory, TensorEntry

RANK = Rank(1)


class State:
    """A source over a dictionary of tensors."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def inventory(self, step: StepNo) -> Inventory:
        if step < 0:
            raise StateError("it does not stand there")
        return Inventory(step, [TensorEntry.of(name, each) for name, each in sorted(self.tensors.items())], b"py")

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


class Keeper:
    """A keeper whose facts and warnings are remembered."""

    def __init__(self) -> None:
        self.told: list[SnapshotTaken] = []
        self.warned: list[str] = []
        self.keeper = SnapshotKeeper(WorkerId("w"), send=self.told.append, warn=self.warned.append)

    def take(self, step: int, state: State | None = None) -> SnapshotTaken | None:
        return self.keeper.take(state or State(a=torch.full((100,), float(step))), StepNo(step), RANK, "all")

    def whole(self) -> set[int]:
        found = set()
        for descriptor in {fact.descriptor for fact in self.told}:
            found.add(Segment.attach(f"/proc/self/fd/{descriptor}").step)
        return found - {-1}


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


def read(fact: SnapshotTaken, source: State) -> None:
    """Compare a segment with the state it was made of, bit by bit."""
    segment = Segment.attach(f"/proc/self/fd/{fact.descriptor}")
    head = segment.head()
    inventory = msgspec.msgpack.decode(head.inventory, type=Inventory)
    assert inventory == source.inventory(fact.step)
    offsets, total = layout(entry.nbytes for entry in inventory.entries)
    assert total == head.payload
    for entry, offset in zip(inventory.entries, offsets, strict=True):
        expected = source.tensor(entry.name).detach().resolve_conj().contiguous()
        assert bytes(segment.payload()[offset : offset + entry.nbytes]) == bytes(
            expected.reshape(-1).view(torch.uint8).numpy().data
        ), entry.name


def test_every_kind_of_tensor_is_copied_bit_by_bit(keeper: Keeper) -> None:
    source = State(
        plain=torch.randn(1000),
        half=torch.randn(33).to(torch.bfloat16),
        flag=torch.tensor([True, False, True]),
        number=torch.tensor(7),
        none=torch.empty(0, 4),
        crooked=torch.randn(30, 40).t(),
        strided=torch.randn(100)[::3],
        conjugate=torch.randn(8, dtype=torch.complex64).conj(),
        grad=torch.nn.Parameter(torch.randn(5)),
    )
    fact = keeper.take(3, source)
    assert fact is not None
    read(fact, source)


def test_two_segments_are_used_in_turn_and_the_newest_whole_one_is_never_written_over(keeper: Keeper) -> None:
    for step in range(0, 50, 5):
        keeper.take(step)
        keeper.keeper.stored(StepNo(step))
        assert keeper.whole() == {step, step - 5} - {-5}
    assert len({fact.descriptor for fact in keeper.told}) == 2
    assert keeper.keeper.newest == 45


def test_a_step_that_is_taken_again_takes_the_place_of_its_first_copy(keeper: Keeper) -> None:
    for step in (0, 5, 10):
        keeper.take(step)
    keeper.keeper.rewind(StepNo(5))
    assert keeper.whole() == {5} and keeper.keeper.newest == 5
    keeper.take(10)
    assert keeper.whole() == {5, 10}


def test_a_larger_state_grows_the_segments(keeper: Keeper) -> None:
    for step in range(4):
        source = State(a=torch.randn(1 << (10 + 4 * step)))
        fact = keeper.take(step, source)
        assert fact is not None
        read(fact, source)
    assert len({fact.descriptor for fact in keeper.told}) == 2


def test_without_memory_training_goes_on_and_it_is_said_once(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "room_for_copies", lambda: 0)
    assert keeper.take(0) is None and keeper.take(5) is None
    assert len(keeper.warned) == 1 and "rank 1 has no copy" in keeper.warned[0]
    assert keeper.keeper.wait_stored(time.monotonic() + 5)


def test_state_that_does_not_stand_there_is_not_copied(keeper: Keeper) -> None:
    with pytest.raises(StateError):
        keeper.take(-3)
    assert not keeper.told


def in_a_thread(call: Callable[[], bool]) -> tuple[threading.Thread, list[bool]]:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def test_waiting_ends_when_the_agent_answers(keeper: Keeper) -> None:
    assert keeper.keeper.wait_stored(time.monotonic())
    keeper.take(5)
    thread, results = in_a_thread(lambda: keeper.keeper.wait_stored(time.monotonic() + 60))
    keeper.keeper.stored(StepNo(0))
    assert results == []
    keeper.keeper.stored(StepNo(5))
    thread.join(30)
    assert results == [True]


def test_waiting_ends_when_the_generation_is_given_up(keeper: Keeper) -> None:
    keeper.take(5)
    halted = threading.Event()
    thread, results = in_a_thread(lambda: keeper.keeper.wait_stored(time.monotonic() + 60, halted=halted.is_set))
    halted.set()
    keeper.keeper.wake()
    thread.join(30)
    assert results == [False]


def test_waiting_ends_at_the_deadline(keeper: Keeper) -> None:
    keeper.take(5)
    with pytest.raises(DeadlineExceeded, match="state@5"):
        keeper.keeper.wait_stored(time.monotonic() + 0.01)


def test_going_back_ends_the_wait_for_a_copy_that_is_void(keeper: Keeper) -> None:
    keeper.take(5)
    keeper.take(10)
    keeper.keeper.rewind(StepNo(5))
    assert keeper.keeper.wait_stored(time.monotonic())


def test_a_buddy_that_takes_nothing_is_told_once_until_it_takes_again(keeper: Keeper) -> None:
    for step in (0, 1, 2):
        keeper.take(step)
        keeper.keeper.stored(StepNo(step), "node n1 did not take it")
        assert keeper.keeper.wait_stored(time.monotonic())
    assert len(keeper.warned) == 1
    keeper.keeper.stored(StepNo(3))
    keeper.keeper.stored(StepNo(4), "node n1 did not take it")
    assert len(keeper.warned) == 2
