"""Copies of state between real processes: workers and agents that die, lines that break, bytes that flip."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.process.copies_world import TOKEN, Line, Node, Process, State, Worker, blank, tensors

from regrow.core.errors import GenerationHalted, HydrationError, StateError
from regrow.core.ids import Rank, StepNo
from regrow.core.messages.copies import CopySource
from regrow.hydration.copies import restore as copies_restore
from regrow.hydration.copies.restore import Restoration, restore

MIB = 1 << 20
Start = Callable[..., Any]


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def node(running: ExitStack, tmp_path: Path) -> Start:
    """Starts a vault in its process; returns both."""

    def start(name: str, *, local: bool = True, patience: float = 20.0) -> tuple[Process, str]:
        process = Process(lambda _: Node(name, tmp_path, local=local, patience=patience))
        running.callback(process.kill)
        process.ask("held")
        process.before = process.descriptors()
        return process, process.ask("open")

    return start


@pytest.fixture
def worker(running: ExitStack) -> Start:
    """Starts a worker that has state."""

    def start(rank: int = 0, *, size: int = 1 << 19) -> Process:
        process = Process(lambda pipe: Worker(rank, pipe, size))
        running.callback(process.kill)
        return process

    return start


@pytest.fixture
def line(running: ExitStack, tmp_path: Path) -> Start:
    def start(endpoint: str, **more: Any) -> Line:
        made = Line(endpoint, tmp_path / "line", **more)
        running.callback(made.close)
        return made

    return start


def take(agent: Process, worker: Process, step: int) -> Any:
    """The worker copies its state and its agent is told, as by the channel."""
    fact = worker.ask("take", step)
    agent.ask("taken", fact, worker.pid)
    return fact


def stored(agent: Process, step: int) -> str:
    answer = agent.ask("stored", step)
    assert answer is not None, f"no word about the copy of state@{step}"
    error: str = answer.error
    return error


def bring_back(endpoint: str, step: int, rank: int = 0, *, size: int = 1 << 19, token: str = TOKEN) -> None:
    """Restore, and compare with what the worker had, bit by bit."""
    sink = blank(rank, size)
    restore(sink, CopySource(Rank(rank), StepNo(step), endpoint), token=token, deadline=time.monotonic() + 20)
    assert sink.finished
    for name, tensor in tensors(rank, step, size).items():
        assert torch.equal(sink.tensors[name], tensor), name


@pytest.mark.parametrize("local", [True, False])
def test_a_copy_is_stored_when_its_buddy_has_it_and_comes_back_bitwise_from_both(
    node: Start, worker: Start, local: bool
) -> None:
    (a, a_at), (b, b_at) = node("a", local=local), node("b", local=local)
    assert a_at.startswith("unix:" if local else "tcp:")
    a.ask("place", "b", b_at)
    trainer = worker()
    for step in (0, 5):
        take(a, trainer, step)
        assert stored(a, step) == ""
    assert a.ask("held") == b.ask("held") == [(0, 0), (0, 5)]
    for endpoint in (a_at, b_at):
        for step in (0, 5):
            bring_back(endpoint, step)
    streamed = a.ask("streamed")[0]
    assert (streamed.buddy, streamed.rank, streamed.step, streamed.error) == ("b", 0, 0, "")
    assert streamed.nbytes > 4 * MIB and streamed.seconds > 0


def test_copies_outlive_the_worker(node: Start, worker: Start) -> None:
    a, a_at = node("a")
    trainer = worker()
    take(a, trainer, 5)
    trainer.kill()
    a.ask("ended", "w0")
    bring_back(a_at, 5)


def test_a_worker_killed_in_the_middle_of_a_copy_leaves_the_one_before(node: Start, worker: Start) -> None:
    (a, a_at), (_, b_at) = node("a"), node("b")
    a.ask("place", "b", b_at)
    trainer = worker()
    for step in (0, 5):
        take(a, trainer, step)
        stored(a, step)
    trainer.send("take_half", 10)
    assert trainer.answer() == "half"
    trainer.kill()
    a.ask("ended", "w0")
    assert a.ask("held") == [(0, 5)]
    bring_back(a_at, 5)
    with pytest.raises(HydrationError, match="no whole copy"):
        bring_back(a_at, 0)
    bring_back(b_at, 0)


def test_who_takes_the_place_of_a_dead_worker_goes_on_with_the_copies(node: Start, worker: Start) -> None:
    (a, _), (b, b_at) = node("a"), node("b")
    a.ask("place", "b", b_at)
    first = worker()
    for step in (0, 5, 10):
        take(a, first, step)
        stored(a, step)
    first.kill()
    a.ask("ended", "w0")
    a.ask("formed", 5)
    assert a.ask("held") == [(0, 5)]
    second = worker()
    take(a, second, 10)
    assert a.ask("held") == [(0, 5), (0, 10)]
    take(a, second, 15)
    assert stored(a, 15) == ""
    assert b.ask("held") == [(0, 10), (0, 15)]
    bring_back(b_at, 10)


def test_a_copy_that_was_on_its_way_to_a_dead_buddy_goes_to_the_next(node: Start, worker: Start, line: Start) -> None:
    (a, _), (b, b_at), (_, c_at) = node("a"), node("b"), node("c")
    slow = line(b_at, limit=2 * MIB)
    a.ask("place", "b", slow.endpoint)
    trainer = worker()
    take(a, trainer, 5)
    assert slow.held.wait(20)
    b.kill()
    slow.cut()
    a.ask("place", "c", c_at)
    assert stored(a, 5) == ""
    bring_back(c_at, 5)


def test_without_another_buddy_training_goes_on_after_a_while_and_it_is_told_once(
    node: Start, worker: Start, line: Start
) -> None:
    (a, a_at), (b, b_at) = node("a", patience=0.5), node("b")
    slow = line(b_at, limit=2 * MIB)
    a.ask("place", "b", slow.endpoint)
    trainer = worker()
    take(a, trainer, 5)
    assert slow.held.wait(20)
    b.kill()
    slow.cut()
    assert "node b did not take the copy of rank 0's state@5" in stored(a, 5)
    take(a, trainer, 10)
    assert "node b" in stored(a, 10)
    assert [fact.step for fact in a.ask("streamed")] == [5]
    bring_back(a_at, 10)


def test_a_buddy_that_comes_late_gets_what_there_is(node: Start, worker: Start) -> None:
    a, _ = node("a")
    trainer = worker()
    for step in (0, 5, 10):
        take(a, trainer, step)
        assert stored(a, step) == ""
    b, b_at = node("b")
    a.ask("place", "b", b_at)
    assert b.ask("wait_held", 0, 5) and b.ask("wait_held", 0, 10)
    bring_back(b_at, 5)


def test_a_broken_line_costs_only_what_had_not_arrived(node: Start, worker: Start, line: Start) -> None:
    (a, _), (_, b_at) = node("a"), node("b")
    slow = line(b_at, limit=3 * MIB)
    a.ask("place", "b", slow.endpoint)
    trainer = worker()
    take(a, trainer, 5)
    assert slow.held.wait(20)
    slow.cut()
    assert stored(a, 5) == ""
    bring_back(b_at, 5)
    whole = sum(tensor.nbytes for tensor in tensors(0, 5).values())
    assert len(slow.passed) == 2 and slow.passed[1] <= whole - 2 * MIB + (64 << 10)


def test_a_bit_that_flips_on_the_line_is_noticed_and_sent_again(node: Start, worker: Start, line: Start) -> None:
    (a, _), (b, b_at) = node("a"), node("b")
    bad = line(b_at, flip=2 * MIB)
    a.ask("place", "b", bad.endpoint)
    take(a, worker(), 5)
    assert stored(a, 5) == ""
    assert b.ask("held") == [(0, 5)] and len(bad.passed) == 2
    bring_back(b_at, 5)


def test_a_bit_that_flips_in_a_copy_is_noticed_and_that_copy_given_to_nobody(node: Start, worker: Start) -> None:
    (a, a_at), (b, b_at) = node("a"), node("b")
    a.ask("place", "b", b_at)
    trainer = worker()
    fact = take(a, trainer, 5)
    stored(a, 5)
    memory = os.open(f"/proc/{trainer.pid}/fd/{fact.descriptor}", os.O_RDWR)
    at = os.fstat(memory).st_size // 3
    os.pwrite(memory, bytes([os.pread(memory, 1, at)[0] ^ 1]), at)
    os.close(memory)
    sink = blank(0)
    with pytest.raises(HydrationError, match="hung up"):
        restore(sink, CopySource(Rank(0), StepNo(5), a_at), token=TOKEN, deadline=time.monotonic() + 20)
    assert not sink.finished
    assert a.ask("held") == [] and b.ask("held") == [(0, 5)]
    bring_back(b_at, 5)


def test_two_versions_a_rank_are_kept_and_no_more_memory(node: Start, worker: Start) -> None:
    (a, _), (b, b_at) = node("a"), node("b")
    a.ask("place", "b", b_at)
    trainers = [worker(rank) for rank in (0, 1)]
    for step in range(12):
        for trainer in trainers:
            take(a, trainer, step)
        for _ in trainers:
            stored(a, step)
        assert b.ask("wait_held", 0, step) and b.ask("wait_held", 1, step)
        for process in (a, b):
            assert process.ask("held") == [(r, s) for r in (0, 1) for s in (step - 1, step) if s >= 0]
            assert len(process.segments()) <= 4
        assert all(len(trainer.segments()) <= 2 for trainer in trainers)


def test_copies_of_a_rank_that_went_elsewhere_are_dropped(node: Start, worker: Start) -> None:
    a, _ = node("a")
    stays, goes = worker(0), worker(1)
    for step in (0, 5):
        take(a, stays, step)
        take(a, goes, step)
    goes.kill()
    for step in (10, 15):
        take(a, stays, step)
    assert a.ask("held") == [(0, 10), (0, 15)]


def test_a_buddy_without_memory_refuses_at_once_and_keeps_what_it_has(node: Start, worker: Start) -> None:
    (a, a_at), (b, b_at) = node("a"), node("b")
    a.ask("place", "b", b_at)
    small, large = worker(0, size=1 << 18), worker(1, size=1 << 20)
    take(a, small, 0)
    assert stored(a, 0) == ""
    b.ask("limit_memory", 4 * MIB)
    began = time.monotonic()
    take(a, large, 5)
    assert "cannot be had" in stored(a, 5)
    assert time.monotonic() - began < 10
    assert b.ask("held") == [(0, 0)]
    bring_back(a_at, 5, 1, size=1 << 20)


def test_fifty_rounds_of_dying_leave_no_descriptor_thread_or_memory(node: Start, worker: Start) -> None:
    (a, a_at), (b, b_at) = node("a"), node("b")
    a.ask("place", "b", b_at)
    seen: list[tuple[int, int, int, int]] = []
    for step in range(50):
        trainer = worker(size=1 << 16)
        take(a, trainer, step)
        assert stored(a, step) == ""
        if step % 10 == 0:
            bring_back(a_at, step, size=1 << 16)
            bring_back(b_at, step, size=1 << 16)
        trainer.kill()
        a.ask("ended", "w0")
        seen.append((len(a.descriptors()), len(b.descriptors()), len(a.segments()), len(b.segments())))
    # A connection that has just ended may still be there for a moment.
    for numbers in zip(*seen, strict=True):
        assert max(numbers[-10:]) <= max(numbers[2:12]) + 1
    assert a.ends_threads(3) and len(a.segments()) == 2
    assert b.ends_threads(3) and len(b.segments()) == 2


def test_a_closed_vault_leaves_nothing_behind(node: Start, worker: Start, tmp_path: Path) -> None:
    (a, _), (b, b_at) = node("a"), node("b")
    a.ask("place", "b", b_at)
    trainer = worker()
    take(a, trainer, 0)
    stored(a, 0)
    for process in (a, b):
        process.ask("close")
        assert process.descriptors() == process.before
        assert process.ends_threads(1) and not process.segments()
    assert not list(tmp_path.iterdir())


def test_nobody_gets_a_copy_without_the_jobs_token(node: Start, worker: Start) -> None:
    (a, a_at), (_, _) = node("a"), node("b")
    take(a, worker(), 0)
    with pytest.raises(HydrationError, match="token"):
        bring_back(a_at, 0, token="guessed")


def test_a_copy_that_is_not_there_is_refused_with_the_reason(node: Start, worker: Start) -> None:
    a, a_at = node("a")
    take(a, worker(), 0)
    with pytest.raises(HydrationError, match="no whole copy of rank 0's state@7"):
        bring_back(a_at, 7)
    with pytest.raises(HydrationError, match="could not be received from unix:/nowhere"):
        bring_back("unix:/nowhere", 7)


def test_a_copy_that_does_not_fit_changes_nothing(node: Start, worker: Start) -> None:
    a, a_at = node("a")
    take(a, worker(), 0)
    sink = State({"other": torch.zeros(3)})
    with pytest.raises(StateError):
        restore(sink, CopySource(Rank(0), StepNo(0), a_at), token=TOKEN, deadline=time.monotonic() + 20)
    assert not sink.tensors["other"].any()


def test_a_return_to_a_copy_can_be_cancelled_while_the_vault_is_silent(
    node: Start, worker: Start, line: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else it would end by itself after 5 s.
    monkeypatch.setattr(copies_restore, "allow", lambda sock, *_, **__: sock.settimeout(300.0))
    a, a_at = node("a")
    take(a, worker(), 0)
    silent = line(a_at, limit=0)
    returning = Restoration(
        blank(0), CopySource(Rank(0), StepNo(0), silent.endpoint), token=TOKEN, deadline=time.monotonic() + 60
    )
    errors: list[Exception] = []

    def run() -> None:
        try:
            returning.run()
        except Exception as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert silent.held.wait(20)
    returning.cancel()
    thread.join(50)
    assert [type(error) for error in errors] == [GenerationHalted]
