"""Judgement of a trial's runs: the kill to blame, and the table."""

import io
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console
from tests.unit.observe.observe_records import FakeJob, commit

from regrow.core.errors import UsageError
from regrow.core.ids import Rank, StepNo, WorkerId
from regrow.core.messages.vocabulary import STATE_METRIC, FaultStage
from regrow.core.records import FaultInjected, IncidentClosed, JobEnded, Record, ReplacementJudged, StepCommitted
from regrow.launch.trial import again, plan_kills
from regrow.observe.ledger import Ledger
from regrow.observe.trial import (
    PHASES,
    Kill,
    Outcome,
    Result,
    advice,
    complaint,
    first_difference,
    judge,
    table,
)

KILLS = {3: 0, 6: 1, 9: 0}
PLAN = [
    Kill(f"fault-{at + 1}", Rank(rank), StepNo(step), phase)
    for at, ((step, rank), phase) in enumerate(
        zip(KILLS.items(), (FaultStage.DATA, FaultStage.REDUCE, FaultStage.COMMIT), strict=True)
    )
]
CALM = FakeJob(world=2).run(12, kills={})


def struck(*, wrong_from: int = 99, last: int = 99) -> Ledger:
    """Twelve steps and three kills; from a step on the losses are others, or there are no steps behind `last`."""
    return Ledger(
        _changed(record, wrong_from) for record in FakeJob(world=2).run(12, KILLS) if not _behind(record, last)
    )


def _changed(record: Record, wrong_from: int) -> Record:
    if isinstance(record, StepCommitted) and record.step >= wrong_from:
        return commit(record.step, record.rank, record.at, generation=record.generation, loss=9.0)
    return record


def _behind(record: Record, last: int) -> bool:
    return isinstance(record, StepCommitted | FaultInjected) and record.step > last


def test_where_nothing_differs_every_kill_is_equal_and_says_how_long_it_took() -> None:
    results = judge(PLAN, struck(), Ledger(CALM), code=0)
    assert [result.outcome for result in results] == [Outcome.EQUAL] * 3
    assert {result.rung for result in results} == {"standby"}
    assert all(result.total == pytest.approx(0.75) for result in results)


def test_kills_that_were_mended_together_say_both_how_long_it_took() -> None:
    told = FakeJob(world=2).run(12, {6: 1, 9: 0})
    first, last = (record for record in told if isinstance(record, IncidentClosed))
    both = msgspec.structs.replace(last, ranks=[Rank(1), Rank(0)], rung="fork", total=2.0)
    ledger = Ledger(both if record is last else record for record in told if record is not first)
    results = judge(
        [replace(PLAN[1], fault="fault-1"), replace(PLAN[2], fault="fault-2")], ledger, Ledger(CALM), code=0
    )
    assert [(result.outcome, result.rung, result.total) for result in results] == [(Outcome.EQUAL, "fork", 2.0)] * 2


def test_the_last_kill_before_the_first_difference_is_to_blame_and_those_behind_it_are_untried() -> None:
    results = judge(PLAN, struck(wrong_from=7), Ledger(CALM), code=0)
    assert [result.outcome for result in results] == [Outcome.EQUAL, Outcome.DIFFERS, Outcome.UNTRIED]
    assert results[1].why == "step 7, rank 0: loss is 9.0 and 0.125"
    assert complaint(results[1]).startswith("rank 1, killed at reduce (reducing gradients) of step 6: step 7")


def test_a_difference_is_told_with_what_the_run_has_found_of_it() -> None:
    found = "`stats` is another tensor, as `dist.broadcast` at train.py:12 was answered otherwise"
    refuted = struck(wrong_from=7)
    refuted.add(ReplacementJudged(at=9.0, rank=Rank(1), step=StepNo(7), reason=found))
    assert judge(PLAN, refuted, Ledger(CALM), code=0)[1].why == f"step 7, rank 0: loss is 9.0 and 0.125; {found}"
    unproven = judge(PLAN, struck(wrong_from=7), Ledger(CALM), code=76, output="rank 1 differs")
    assert unproven[1].why.endswith("; rank 1 differs")


def test_the_last_kill_of_a_job_that_ended_is_to_blame_and_its_last_words_are_told() -> None:
    results = judge(PLAN, struck(last=6), Ledger(CALM), code=1, output="the last copy was lost")
    assert [result.outcome for result in results] == [Outcome.EQUAL, Outcome.ENDED, Outcome.UNTRIED]
    assert results[1].why == "the last copy was lost"


def test_a_kill_at_a_place_to_which_the_script_never_comes_is_no_failure() -> None:
    absent = Kill("fault-9", Rank(1), StepNo(5), FaultStage.BETWEEN)
    results = judge([*PLAN, absent], struck(), Ledger(CALM), code=0)
    assert {result.kill.fault: result.outcome for result in results}["fault-9"] is Outcome.ABSENT


def test_another_state_is_told_before_the_losses_that_follow_from_it() -> None:
    ledgers = [Ledger(), Ledger()]
    for number, ledger in enumerate(ledgers):
        ledger.add(commit(4, 0, 1.0, loss=float(number)))
        ledger.commits[StepNo(4)][Rank(0)].metrics[STATE_METRIC] = float(number)
    assert first_difference(*ledgers) == (4, "step 4, rank 0 begins with another protected state")


@pytest.mark.parametrize(("theirs", "differs"), [(None, False), (1.0, False), (2.0, True)])
def test_who_has_taken_a_step_over_has_not_looked_at_the_state_before_it(theirs: float | None, differs: bool) -> None:
    ledgers = [Ledger(), Ledger()]
    for ledger, looked in zip(ledgers, (1.0, theirs), strict=True):
        ledger.add(commit(4, 0, 1.0, loss=0.5))
        if looked is not None:
            ledger.commits[StepNo(4)][Rank(0)].metrics[STATE_METRIC] = looked
    said = (4, "step 4, rank 0 begins with another protected state")
    assert first_difference(*ledgers) == (said if differs else None)


def test_a_step_that_one_run_has_not_committed_is_a_difference_unless_it_had_ended_before() -> None:
    short = struck(last=5)
    assert first_difference(short, Ledger(CALM)) == (6, "step 6, rank 0 was committed in one of the runs only")
    assert first_difference(short, Ledger(CALM), until=StepNo(6)) is None


def _drawn(results: list[Result]) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(table("replaced by fork", results))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_table_has_a_row_for_each_phase_that_was_struck_and_a_column_for_each_rank() -> None:
    absent = Result(Kill("x", Rank(1), StepNo(9), FaultStage.VOTE), Outcome.ABSENT)
    drawn = _drawn([*judge(PLAN, struck(wrong_from=7), Ledger(CALM), code=0), absent])
    lines = [line.split() for line in drawn.splitlines()]
    assert ["reading", "its", "batch", "equal", "0.75", "s", "standby"] in lines
    assert ["reducing", "gradients", "DIFFERS"] in lines
    assert "after the update" in drawn and "untried" in drawn
    assert "vote" not in drawn


def _failing(way: str, why: str) -> dict[str, list[Result]]:
    fails = Result(PLAN[0], Outcome.DIFFERS, why=why)
    return {"fork": [], "standby": []} | {way: [fails]}


def test_what_fails_with_standbys_alone_is_the_rank_that_was_asked_too_early() -> None:
    assert "Ask session.rank" in advice(_failing("standby", "loss is 1.0 and 2.0"))[0]
    assert not any("Ask session.rank" in line for line in advice(_failing("fork", "loss is 1.0 and 2.0")))


def test_advice_tells_protected_state_from_what_nobody_protected() -> None:
    assert "must be protected too" in advice(_failing("fork", "step 4, rank 0 begins with another protected state"))[0]
    assert "work it out from step.number" in advice(_failing("fork", "step 4, rank 0: loss is 1.0 and 2.0"))[0]
    assert advice({"fork": judge(PLAN, struck(), Ledger(CALM), code=0)}) == []


def test_each_rank_is_killed_in_each_phase_and_few_kills_are_spread_over_the_phases() -> None:
    everything = plan_kills(ranks=3)
    assert {(kill.rank, kill.phase) for kill in everything} == {(rank, phase) for rank in range(3) for phase in PHASES}
    assert len({kill.step for kill in everything}) == len(everything)
    few = plan_kills(ranks=3, kills=5)
    assert [kill.phase for kill in few] == list(PHASES[:5])
    assert len({kill.rank for kill in few}) == 3


def test_as_many_kills_are_planned_as_the_steps_have_room_for() -> None:
    assert len(plan_kills(ranks=2, steps=11)) == 3
    assert all(kill.step < 11 - 1 for kill in plan_kills(ranks=2, steps=11))
    with pytest.raises(UsageError, match="--steps 3 leaves no room for a kill"):
        plan_kills(ranks=2, steps=3)


def test_what_is_tried_again_starts_at_the_first_step_under_names_of_the_new_plan() -> None:
    kills = again(plan_kills(ranks=2)[5:7])
    assert [(kill.fault, kill.step) for kill in kills] == [("plan-1", 2), ("plan-2", 5)]


def test_a_run_that_never_ended_well_has_its_words_kept() -> None:
    ledger = Ledger(
        [JobEnded(0.0, 1, "no"), FaultInjected(0.0, "fault-1", WorkerId("w"), Rank(0), StepNo(3), "data", "k")]
    )
    assert judge(PLAN[:1], ledger, Ledger(CALM), code=1, output="no")[0].outcome is Outcome.ENDED
