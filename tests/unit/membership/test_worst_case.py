"""The longest that each rung may take: what the documentation says is what the settings come to."""

import re
from pathlib import Path

import msgspec
import pytest

from regrow.core.ids import JobId
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import Warmth
from regrow.membership.incident import RUNGS
from regrow.membership.recovery import hangs
from regrow.membership.recovery.worst_case import Wait, formulas, waits, worst_cases

PROTOCOL = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
DEFAULTS = JobSpec(
    JobId("unit"),
    nproc=2,
    nodes=2,
    standbys=1,
    warmth=Warmth.BUILT,
    max_faults=100,
    window=3600.0,
    max_restarts=None,
    durable=True,
    checkpoint_every=300.0,
)
"""With checkpoints: without, none is waited for."""
FACTORS = (1.0, hangs.BETWEEN)


def minutes(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 60 else f"{seconds / 60:.1f} min"


def both(figures: list[float]) -> str:
    return " | ".join(minutes(each) for each in figures)


@pytest.mark.parametrize("wait", Wait)
def test_the_documentation_gives_each_wait_its_default(wait: Wait) -> None:
    figures = [waits(DEFAULTS, factor=each)[wait] for each in FACTORS]
    assert re.search(rf"^\| {wait} \| [^|]+ \| {both(figures)} \|$", PROTOCOL, re.M), both(figures)


@pytest.mark.parametrize("rung", formulas(Warmth.BUILT))
def test_the_documentation_gives_each_rung_its_sum(rung: str) -> None:
    cases = [worst_cases(DEFAULTS, factor=each)[rung] for each in FACTORS]
    row = f"{cases[0].formula} | {both([case.total for case in cases])} |"
    assert re.search(rf"^\| `{rung}`[^|]* \| {re.escape(row)}$", PROTOCOL, re.M), row


def test_every_rung_that_an_incident_may_take_has_a_sum() -> None:
    assert set(RUNGS) <= formulas(Warmth.BUILT).keys()


def test_a_sum_follows_the_settings() -> None:
    quick = msgspec.structs.replace(DEFAULTS, hang_timeout=30.0)
    for factor in FACTORS:
        was, now = worst_cases(DEFAULTS, factor=factor), worst_cases(quick, factor=factor)
        assert now["retry"].total < was["retry"].total
    blocked, computing = (worst_cases(quick, factor=each)["retry"] for each in (1.0, hangs.COMPUTING))
    assert blocked == computing, "a bound that was ordered holds for all that happens in a step"
    again = worst_cases(quick, factor=1.0, patience=hangs.MOST_PATIENCE)["retry"]
    assert again == blocked, "and is not raised"
    raised = worst_cases(DEFAULTS, factor=1.0, patience=hangs.MOST_PATIENCE)["retry"]
    assert raised.total > worst_cases(DEFAULTS, factor=1.0)["retry"].total


def test_a_standby_that_waits_before_its_script_has_one_stage_more_to_go() -> None:
    formula = {warmth: worst_cases(msgspec.structs.replace(DEFAULTS, warmth=warmth), factor=1.0) for warmth in Warmth}
    assert formula[Warmth.BUILT]["fork"].formula == "max(H, 2 B) + F + C"
    assert formula[Warmth.IMPORTS]["fork"].formula == "max(H, 3 B) + F + C"
