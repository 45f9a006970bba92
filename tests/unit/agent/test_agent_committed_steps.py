import math
import os
from pathlib import Path

import msgspec
import pytest

from regrow.agent import committed_steps
from regrow.agent.committed_steps import CommittedSteps, LastSeen, StepsFile
from regrow.core.board import BatchShown
from regrow.core.ids import Generation, Rank, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.data import BatchRecord, OrderDeclared, OrderSpec
from regrow.core.records import OrderStated, StepCommitted
from regrow.observe.tail import RecordTail


class Book:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "steps.n0.jsonl"
        self.file = StepsFile(self.path)
        self.ledger = CommittedSteps(self.file)

    def commits(self, worker: str, step: int, rank: int, generation: int = 1) -> None:
        self.ledger.committed(
            facts.WorkerCommitted(
                WorkerId(worker),
                Generation(generation),
                StepNo(step),
                at=step + 0.5,
                seconds=0.1,
                metrics={"loss": 2.0},
            ),
            Rank(rank),
        )

    def dies(
        self,
        worker: str,
        rank: int,
        *,
        staged: int | None,
        committed: int | None,
        generation: int = 1,
        read: int | None = None,
    ) -> None:
        shown = (
            []
            if staged is None
            else [facts.WorkerStaged(WorkerId(worker), Generation(generation), StepNo(staged), {"loss": 1.5})]
        )
        said = None if committed is None else (Generation(generation), StepNo(committed))
        batch = (
            None if read is None else BatchShown(Generation(generation), StepNo(read), BatchRecord(rank, 2, "d" * 16))
        )
        self.ledger.died(LastSeen(WorkerId(worker), lambda _: Rank(rank), 9.0, shown, batch, said))

    def records(self) -> list[StepCommitted]:
        self.file.flush()
        text = self.path.read_text() if self.path.exists() else ""
        return [msgspec.json.decode(line, type=StepCommitted) for line in text.splitlines()]

    def lines(self) -> list[tuple[int, int, bool]]:
        return [(record.rank, record.step, record.adopted) for record in self.records()]


def test_a_commit_becomes_a_line_with_the_wall_clock(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.commits("a", 3, rank=1)
    assert book.lines() == [(1, 3, False)]
    line = msgspec.json.decode(book.path.read_bytes())
    assert line["type"] == "StepCommitted" and line["time"] > 1e9 and line["metrics"] == {"loss": 2.0}


def test_a_step_that_others_had_committed_counts_for_the_rank_that_died_in_it(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.commits("b", 4, rank=1)
    book.dies("a", 0, staged=4, committed=3)
    assert book.lines() == [(1, 4, False)]
    book.ledger.formed(Generation(2), StepNo(5))
    assert book.lines() == [(1, 4, False), (0, 4, True)]


def test_a_step_that_others_commit_after_the_death_counts_too(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.dies("a", 0, staged=4, committed=3)
    assert book.lines() == []
    book.commits("b", 4, rank=1)
    book.ledger.formed(Generation(2), StepNo(5))
    assert book.lines() == [(1, 4, False), (0, 4, True)]


@pytest.mark.parametrize(("step", "adopted"), [(4, False), (5, True)])
def test_a_death_that_is_known_after_the_new_generation_is_judged_by_it_and_by_no_later_one(
    tmp_path: Path, step: int, adopted: bool
) -> None:
    book = Book(tmp_path)
    book.ledger.formed(Generation(1), StepNo(0))
    book.ledger.formed(Generation(2), StepNo(step))
    book.ledger.formed(Generation(3), StepNo(9))
    book.dies("a", 0, staged=4, committed=3)
    assert book.lines() == ([(0, 4, True)] if adopted else [])
    book.ledger.formed(Generation(4), StepNo(11))
    assert len(book.lines()) == adopted


def test_a_commit_that_was_lost_with_all_who_had_it_is_not_adopted(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.commits("b", 4, rank=1)
    book.dies("a", 0, staged=4, committed=3)
    book.dies("b", 1, staged=4, committed=4)
    book.ledger.formed(Generation(2), StepNo(4))
    assert book.lines() == [(1, 4, False)]


def test_a_generation_so_old_that_its_end_is_forgotten_adopts_nothing(tmp_path: Path) -> None:
    book = Book(tmp_path)
    for number in range(2, 100):
        book.ledger.formed(Generation(number), StepNo(number))
    book.dies("a", 0, staged=1, committed=0)
    assert book.lines() == []


def test_the_state_of_the_next_generation_tells_when_the_others_are_elsewhere(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.dies("a", 0, staged=4, committed=3)
    book.ledger.formed(Generation(2), StepNo(5))
    assert book.lines() == [(0, 4, True)]


def test_who_left_one_step_behind_is_judged_by_the_next_generation_and_not_by_one_that_comes_back(
    tmp_path: Path,
) -> None:
    book = Book(tmp_path)
    book.dies("a", 0, staged=4, committed=3)
    book.ledger.formed(Generation(2), StepNo(4))  # elsewhere, where the step runs again
    book.ledger.formed(Generation(7), StepNo(30))
    book.ledger.end()
    assert book.lines() == []


def test_a_step_that_runs_again_is_not_counted_for_the_dead(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.dies("a", 0, staged=4, committed=3)
    book.ledger.formed(Generation(2), StepNo(4))
    book.commits("b", 4, rank=1, generation=2)
    book.ledger.formed(Generation(3), StepNo(9))
    assert book.lines() == [(1, 4, False)]


def test_a_step_that_the_dead_had_committed_itself_is_not_counted_twice(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.commits("a", 4, rank=0)
    book.dies("a", 0, staged=4, committed=4)
    book.commits("b", 4, rank=1)
    assert book.lines() == [(0, 4, False), (1, 4, False)]


def test_what_a_dead_rank_had_read_is_written_with_its_line_though_it_had_logged_nothing(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.dies("a", 0, staged=None, committed=3, read=4)
    book.ledger.formed(Generation(2), StepNo(5))
    (record,) = book.records()
    assert (record.step, record.rank, record.adopted, record.metrics) == (4, 0, True, {})
    assert record.data == BatchRecord(0, 2, "d" * 16)


def test_a_dead_rank_s_metrics_and_what_it_had_read_come_into_one_line(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.dies("a", 0, staged=4, committed=3, read=4)
    book.ledger.formed(Generation(2), StepNo(5))
    (record,) = book.records()
    assert (record.metrics, record.data) == ({"loss": 1.5}, BatchRecord(0, 2, "d" * 16))


@pytest.mark.parametrize(("staged", "parts"), [(4, 2), (3, 0)])
def test_what_a_dead_rank_had_read_for_its_micro_batches_comes_with_the_metrics_of_that_step(
    tmp_path: Path, staged: int, parts: int
) -> None:
    book = Book(tmp_path)
    records = [BatchRecord(share, 8, "d" * 16) for share in (2, 3)]
    shown = facts.WorkerStaged(WorkerId("a"), Generation(1), StepNo(staged), {"loss": 1.5}, records)
    batch = BatchShown(Generation(1), StepNo(4), BatchRecord(0, 2)) if staged < 4 else None
    book.ledger.died(LastSeen(WorkerId("a"), lambda _: Rank(0), 9.0, [shown], batch, (Generation(1), StepNo(3))))
    book.ledger.formed(Generation(2), StepNo(5))
    (record,) = book.records()
    assert record.parts == records[:parts]
    assert record.reads == (records if parts else [BatchRecord(0, 2)])


def shown(step: int, *, untold: bool = False) -> facts.WorkerStaged:
    read = BatchRecord(0, step, "d" * 16) if untold else None
    return facts.WorkerStaged(
        WorkerId("a"), Generation(1), StepNo(step), {"loss": float(step)}, data=read, untold=untold
    )


@pytest.mark.parametrize(("formed", "adopted"), [(4, []), (5, [4]), (6, [4, 5])])
def test_who_dies_in_a_step_while_its_device_has_not_shown_the_one_before_may_have_done_both(
    tmp_path: Path, formed: int, adopted: list[int]
) -> None:
    book = Book(tmp_path)
    batch = BatchShown(Generation(1), StepNo(5), BatchRecord(0, 5, "d" * 16))
    said = (Generation(1), StepNo(3))
    staged = [shown(4, untold=True), shown(5)]
    book.ledger.died(LastSeen(WorkerId("a"), lambda _: Rank(0), 9.0, staged, batch, said))
    book.ledger.formed(Generation(2), StepNo(formed))
    assert [(record.step, record.metrics["loss"]) for record in book.records()] == [(at, float(at)) for at in adopted]
    assert [record.data for record in book.records()] == [BatchRecord(0, at, "d" * 16) for at in adopted]


def test_what_was_shown_of_a_step_that_was_told_afterwards_counts_no_more(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.commits("a", 4, rank=0)
    staged = [shown(4, untold=True), shown(5)]
    book.ledger.died(LastSeen(WorkerId("a"), lambda _: Rank(0), 9.0, staged, None, (Generation(1), StepNo(4))))
    book.ledger.formed(Generation(2), StepNo(5))
    assert book.lines() == [(0, 4, False)]


def test_metrics_of_an_earlier_step_are_not_those_of_the_step_that_was_read(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.dies("a", 0, staged=3, committed=3, read=4)
    book.ledger.formed(Generation(2), StepNo(5))
    (record,) = book.records()
    assert (record.step, record.metrics) == (4, {})


def test_what_was_read_for_a_step_that_runs_again_is_not_written(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.dies("a", 0, staged=None, committed=3, read=4)
    book.ledger.formed(Generation(2), StepNo(4))
    assert book.lines() == []


def test_a_worker_that_went_back_and_died_in_a_step_it_had_once_committed_is_adopted(tmp_path: Path) -> None:
    book = Book(tmp_path)
    batch = BatchShown(Generation(2), StepNo(4), BatchRecord(0, 2))
    last = LastSeen(WorkerId("a"), lambda _: Rank(0), 9.0, (), batch, (Generation(1), StepNo(10)))
    book.ledger.formed(Generation(2), StepNo(4))
    book.ledger.died(last)
    book.ledger.formed(Generation(3), StepNo(5))
    assert book.lines() == [(0, 4, True)]


@pytest.mark.parametrize("other", [3, 4])
def test_at_the_job_s_end_a_step_counts_for_a_dead_rank_if_another_has_committed_it(tmp_path: Path, other: int) -> None:
    book = Book(tmp_path)
    book.commits("b", other, rank=1)
    book.dies("a", 0, staged=None, committed=3, read=4)
    book.ledger.end()
    assert book.lines() == [(1, other, False)] + [(0, 4, True)] * (other == 4)


def test_the_order_of_a_worker_is_a_line_of_its_own(tmp_path: Path) -> None:
    book = Book(tmp_path)
    order = OrderSpec("ordered", seed=3, global_batch=24)
    book.ledger.stated(OrderDeclared(WorkerId("a"), Rank(1), order), at=2.5)
    book.file.flush()
    record = msgspec.json.decode(book.path.read_bytes(), type=OrderStated)
    assert record == OrderStated(2.5, Rank(1), WorkerId("a"), order)


def test_half_a_line_of_an_agent_that_was_killed_is_taken_away_before_the_next_writes(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.commits("a", 0, rank=0)
    book.file.flush()
    with book.path.open("ab") as file:
        file.write(b'{"type":"StepCommitted","at":1.5,"st' + b"x" * 70_000)
    successor = Book(tmp_path)
    successor.commits("b", 1, rank=0)
    assert successor.lines() == [(0, 0, False), (0, 1, False)]


def test_a_disk_that_is_full_in_the_middle_of_a_line_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Book(tmp_path)
    book.commits("a", 0, rank=0)
    book.file.flush()
    before, write = book.path.read_bytes(), os.write

    def fills_up(descriptor: int, text: bytes) -> int:
        if len(text) < 50:
            raise OSError(28, "No space left on device")
        return write(descriptor, text[:-20])

    book.commits("a", 1, rank=0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fills_up)
        book.file.flush()
    assert book.path.read_bytes() == before
    assert book.lines() == [(0, 0, False), (0, 1, False)]


def test_lines_that_a_full_disk_refuses_are_kept_for_later(tmp_path: Path) -> None:
    book = Book(tmp_path / "missing")
    book.commits("a", 0, rank=0)
    book.file.flush()
    assert book.file.waiting
    (tmp_path / "missing").mkdir()
    assert book.lines() == [(0, 0, False)]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_can_be_read_again(tmp_path: Path, loss: float) -> None:
    file = StepsFile(tmp_path / "steps.node0.jsonl")
    CommittedSteps(file).committed(
        facts.WorkerCommitted(
            WorkerId("w"), Generation(1), StepNo(3), at=1.0, seconds=0.1, metrics={"loss": loss, "lr": 0.5}
        ),
        Rank(0),
    )
    file.flush()
    (record,) = RecordTail(tmp_path).poll()
    assert isinstance(record, StepCommitted)
    assert record.metrics["lr"] == 0.5
    assert repr(record.metrics["loss"]) == repr(loss)


def test_who_dies_with_a_new_rank_is_adopted_under_the_one_it_had_in_the_step(tmp_path: Path) -> None:
    book = Book(tmp_path)
    staged = facts.WorkerStaged(WorkerId("a"), Generation(3), StepNo(4), {"loss": 1.5})
    ranks = {Generation(3): Rank(3), Generation(4): Rank(2)}
    book.ledger.formed(Generation(4), StepNo(5))
    book.ledger.died(LastSeen(WorkerId("a"), ranks.__getitem__, 9.0, [staged], None, (Generation(3), StepNo(3))))
    assert book.lines() == [(3, 4, True)]


def test_what_cannot_be_written_is_kept_up_to_a_bound_and_said_once_and_when_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed_steps, "KEPT_BYTES", 2000)
    (tmp_path / "gone").mkdir()
    book = Book(tmp_path / "gone")
    (tmp_path / "gone").rename(tmp_path / "back")
    for step in range(100):
        book.commits("a", step, rank=0)
        book.file.flush()
    assert len([each for each in caplog.messages if "cannot write" in each]) == 1
    (tmp_path / "back").rename(tmp_path / "gone")
    steps = [step for _, step, _ in book.lines()]
    assert steps == list(range(100 - len(steps), 100)), "the newest"
    assert 1 < len(steps) < 20
    assert caplog.messages[-1].endswith(f"is written again; {100 - len(steps)} lines of it are missing")
    book.commits("a", 100, rank=0)
    book.file.flush()
    assert len(caplog.messages) == 2
