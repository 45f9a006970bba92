"""Fault plans: what a file says is what happens, and what it says wrong is named."""

from pathlib import Path

import pytest

from regrow.core.errors import UsageError
from regrow.core.messages.vocabulary import FaultHow, FaultStage
from regrow.launch.plan import load_faults, parse_faults


def test_listed_faults_come_in_order_of_their_steps() -> None:
    faults = parse_faults(
        """
        [[fault]]
        rank = 2
        step = 30
        at = "reduce"
        how = "exit"
        [[fault]]
        rank = 0
        step = 7
        """,
        world=4,
    )
    assert [(f.rank, f.step, f.stage, f.how) for f in faults] == [
        (0, 7, FaultStage.FORWARD, FaultHow.SIGKILL),
        (2, 30, FaultStage.REDUCE, FaultHow.EXIT),
    ]
    assert len({f.fault for f in faults}) == 2


def test_a_fault_in_a_recovery_needs_no_step() -> None:
    (fault,) = parse_faults('[[fault]]\nrank = 1\nat = "hydrate"', world=2)
    assert fault.step is None


def test_the_same_seed_draws_the_same_faults_and_another_seed_others() -> None:
    text = '[random]\nseed = {}\ncount = 50\nfirst_step = 10\nevery = 3\nstages = ["reduce", "update"]'
    first, again, other = (parse_faults(text.format(seed), world=4) for seed in (1, 1, 2))
    assert first == again != other
    assert [fault.step for fault in first] == list(range(10, 160, 3))
    assert {fault.stage for fault in first} == {FaultStage.REDUCE, FaultStage.UPDATE}
    assert {fault.rank for fault in first} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank =", "is not TOML"),
        ("", "has no fault"),
        ("[fault]\nrank = 1", "double brackets"),
        ("[[random]]", "single brackets"),
        ("[[faults]]\nrank = 1", "unknown key 'faults'"),
        ("[[fault]]\nstep = 1", "fault 1: rank is missing"),
        ("[[fault]]\nrank = 1\nstep = 1\n[[fault]]\nrank = 4\nstep = 1", "fault 2: rank = 4 is out of range"),
        ("[[fault]]\nrank = -1\nstep = 1", "rank = -1 is out of range"),
        ("[[fault]]\nrank = true\nstep = 1", "rank = True is not a whole number"),
        ("[[fault]]\nrank = 1", "step is missing"),
        ('[[fault]]\nrank = 1\nstep = 1\nat = "lunch"', "one of now, data, begin, forward"),
        ('[[fault]]\nrank = 1\nstep = 1\nhow = "politely"', "one of sigkill"),
        ("[[fault]]\nrank = 1\nstep = 1\nwhen = 3", "unknown key 'when'"),
        ("[random]\nseed = 1", "random: count is missing"),
        ("[random]\ncount = 3\nstages = []", "stages is not a list of names"),
        ("[random]\ncount = 3\nworld = 9", "world = 9 is out of range"),
    ],
)
def test_a_wrong_plan_is_refused_with_file_entry_and_cure(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        load_faults(path, world=4)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_plan_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml cannot be read: No such file"):
        load_faults(tmp_path / "none.toml", world=1)


def test_the_plan_that_the_page_shows_is_one() -> None:
    page = (Path(__file__).parents[3] / "docs" / "detection.md").read_text(encoding="utf-8")
    shown = page.split("## Faults on demand", 1)[1].split("```toml\n", 1)[1].split("```", 1)[0]
    assert len(parse_faults(shown, world=2)) == 101
