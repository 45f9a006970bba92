"""The pause that `benchmarks/moves.py` takes from the commits of a rank that stays."""

from moves import SETTLE, pause_of

from regrow.core.ids import Generation, Rank, StepNo, WorkerId
from regrow.core.records import StepCommitted


def commits(gaps: list[tuple[int, float]]) -> list[StepCommitted]:
    """Commits of a rank. `gaps`: generation of each step, and seconds since the one before."""
    at, made = 0.0, []
    for step, (generation, gap) in enumerate(gaps):
        at += gap
        made.append(
            StepCommitted(
                at=at,
                generation=Generation(generation),
                step=StepNo(step),
                rank=Rank(0),
                worker=WorkerId("a"),
                seconds=gap,
                metrics={},
            )
        )
    return made


def sleep(step: int) -> float:
    """Each step sleeps a tenth of a second longer than the one before."""
    return 0.1 * step


def test_a_pause_is_the_first_step_beyond_a_median_one_whatever_each_of_them_sleeps() -> None:
    own = [0.5] * 4 + [0.5 + 0.25] + [0.5] * (SETTLE + 1)
    gaps = [(1 if step < 4 else 2, sleep(step) + seconds) for step, seconds in enumerate(own)]
    step, pause = pause_of(commits(gaps), 2, sleep)
    assert (round(step, 6), round(pause, 6)) == (0.5, 0.25)
