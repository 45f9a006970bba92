from typing import Any

import pytest

from regrow.agent.workers.evidence import Evidence
from regrow.agent.workers.progress_watch import BoardView, Watcher
from regrow.core.board import BoardReading, Flight
from regrow.core.ids import NodeId, WorkerId
from regrow.core.messages.observations import NodeSeen, WorkerObservation
from regrow.core.phase import Phase

A, B = WorkerId("a"), WorkerId("b")


class Bench:
    """A watcher whose clock, boards and kernel a test plays."""

    def __init__(self, bound: float = 20.0) -> None:
        self.kernel: dict[WorkerId, Evidence] = {A: Evidence("S", 1.0), B: Evidence("S", 1.0)}
        self.boards = {A: board(), B: board()}
        self.watcher = Watcher(NodeId("n"), bound, lambda: self.kernel)
        self.now = 100.0

    def look(self, after: float = 0.25) -> NodeSeen | None:
        self.now += after
        return self.watcher.look(self.boards, self.now)

    def until(self, seconds: float) -> list[NodeSeen]:
        """Looks as an agent does; what it tells."""
        end, told = self.now + seconds, []
        while self.now < end:
            if (seen := self.look()) is not None:
                told.append(seen)
        return told

    def sight(self, worker: WorkerId = A, seconds: float = 8.0) -> WorkerObservation:
        return next(sight for sight in self.until(seconds)[-1].observations if sight.worker == worker)


def board(beats: int = 1, *, step: int = 7, calls: int = 2, phase: Phase = Phase.COMPUTING, **flight: Any) -> BoardView:
    return BoardView(
        BoardReading(beats, step, calls, 1, phase), Flight(flight.get("number", 0), flight.get("oldest", "")), True
    )


def test_nothing_is_told_of_workers_that_go_on() -> None:
    bench = Bench()
    for beats in range(40):
        bench.boards = {A: board(beats), B: board(beats)}
        assert bench.look() is None


def test_all_workers_are_told_of_while_one_stands_still_and_once_after_that() -> None:
    bench = Bench()
    for beats in range(28):
        bench.boards[B] = board(beats)
        told = bench.look()
        assert told is None or {sight.worker for sight in told.observations} == {A, B}
    (still, moves) = told.observations if told is not None else bench.until(2.5)[-1].observations
    assert still.seconds > 5.0 and moves.seconds < 3.0
    bench.boards = {A: board(90), B: board(90)}
    assert bench.look() is not None
    assert bench.look() is None


def test_a_pause_of_the_agent_is_held_against_nobody() -> None:
    bench = Bench()
    bench.until(3.0)
    assert bench.look(after=60.0) is None
    assert bench.sight(seconds=6.0).seconds < 10.0


def test_who_is_stopped_is_told_so() -> None:
    bench = Bench()
    bench.kernel[A] = Evidence("T", 1.0)
    seen = bench.sight()
    assert (seen.stopped, seen.busy) == (True, False)


@pytest.mark.parametrize("state", ["R", "D"])
def test_who_runs_or_waits_for_a_disk_is_busy(state: str) -> None:
    bench = Bench()
    bench.kernel[A] = Evidence(state, 1.0)
    assert bench.sight().busy


def test_who_uses_the_processor_is_busy_and_who_naps_is_not() -> None:
    bench = Bench()
    told: list[NodeSeen] = []
    for tick in range(80):
        bench.kernel = {A: Evidence("S", 1.0 + 0.2 * tick), B: Evidence("S", 1.0 + 0.001 * tick)}
        told += [seen] if (seen := bench.look()) is not None else []
    computing, napping = told[-1].observations
    assert (computing.busy, napping.busy) == (True, False)


def test_who_waits_in_a_collective_is_told_with_its_name() -> None:
    bench = Bench()
    bench.boards = {A: board(number=2, oldest="allreduce on w"), B: board(number=-1)}
    seen = bench.until(8.0)[-1]
    waits, unknown = seen.observations
    assert (waits.waits, waits.awaits) == (True, "allreduce on w")
    assert unknown.waits is None, "on a GPU that cannot be seen"


def test_the_longest_of_the_last_fifty_steps_is_told() -> None:
    bench = Bench()
    for seconds in (20.0, *[0.5] * 30, 7.0, *[0.5] * 40):
        bench.watcher.step_took(seconds)
    assert bench.until(8.0)[-1].longest == 7.0


@pytest.mark.parametrize("bound", [1.0, 2.0, 90.0])
def test_who_stands_still_for_the_bound_is_told_of_within_a_fifth_of_it(bound: float) -> None:
    bench, looks, seconds = Bench(bound), 0, 0.0
    began = bench.now
    while seconds < bound:
        seen, looks = bench.look(bench.watcher.interval), looks + 1
        seconds = seen.observations[0].seconds if seen is not None else 0.0
    assert bench.now - began <= 1.2 * bound
    assert looks <= 40 if bound < 10.0 else bench.watcher.interval == 0.25


def test_boards_are_looked_at_often_only_while_somebody_stands_still() -> None:
    bench = Bench(2.0)
    assert bench.watcher.interval == 0.25
    bench.until(1.0)
    assert bench.watcher.interval == 0.05
    bench.boards = {A: board(90), B: board(90)}
    bench.look()
    assert bench.watcher.interval == 0.25


def test_a_standby_that_waits_is_looked_at_no_more_often_and_told_of_seldom() -> None:
    bench, told = Bench(2.0), list[NodeSeen | None]()
    for beats in range(80):
        bench.boards = {A: board(beats), B: board()._replace(holds_rank=False)}
        told.append(bench.look(bench.watcher.interval))
        assert bench.watcher.interval == 0.25, "all that this costs would be taken from the ranks beside it"
    assert sum(seen is not None for seen in told) == 10
    bench.boards[B] = board()
    assert [bench.look(bench.watcher.interval) is not None for _ in range(3)] == [True] * 3, "it has a rank now"
