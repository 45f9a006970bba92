from pathlib import Path

import msgspec
import pytest

from regrow.agent.ledger import Ledger, StepsFile
from regrow.core.events import StepCommitted
from regrow.core.ids import Generation, Rank, StepNo, WorkerId
from regrow.core.messages import WorkerCommitted, WorkerStaged


class Book:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "steps.n0.jsonl"
        self.file = StepsFile(self.path)
        self.ledger = Ledger(self.file)

    def commits(self, worker: str, step: int, rank: int, generation: int = 1) -> None:
        self.ledger.committed(
            WorkerCommitted(
                WorkerId(worker),
                Generation(generation),
                StepNo(step),
                at=step + 0.5,
                seconds=0.1,
                metrics={"loss": 2.0},
            ),
            Rank(rank),
        )

    def dies(self, worker: str, rank: int, *, staged: int | None, committed: int | None, generation: int = 1) -> None:
        shown = (
            None
            if staged is None
            else WorkerStaged(WorkerId(worker), Generation(generation), StepNo(staged), {"loss": 1.5})
        )
        self.ledger.died(shown, None if committed is None else StepNo(committed), Rank(rank), 9.0)

    def lines(self) -> list[tuple[int, int, bool]]:
        self.file.flush()
        text = self.path.read_text() if self.path.exists() else ""
        records = [msgspec.json.decode(line, type=StepCommitted) for line in text.splitlines()]
        return [(record.rank, record.step, record.adopted) for record in records]


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


def test_lines_that_a_full_disk_refuses_are_kept_for_later(tmp_path: Path) -> None:
    book = Book(tmp_path / "missing")
    book.commits("a", 0, rank=0)
    book.file.flush()
    assert book.file.waiting
    (tmp_path / "missing").mkdir()
    assert book.lines() == [(0, 0, False)]
