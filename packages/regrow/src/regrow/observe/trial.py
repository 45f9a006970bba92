"""Results of a trial: judges each kill in a run by comparison with the same run undisturbed. Pure, except for tables.

A run has many kills, one every few steps. Each step records the digest of the state with which it began, so the first
step that differs shows which kill changed something.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.table import Table
from rich.text import Text

from regrow.core.exit_codes import UNPROVEN
from regrow.core.ids import Rank, Seconds, StepNo
from regrow.core.messages.vocabulary import STATE_METRIC, FaultStage
from regrow.core.records import IncidentClosed
from regrow.observe.ledger import Ledger
from regrow.observe.story import seconds

PHASES = (
    FaultStage.DATA,
    FaultStage.BEGIN,
    FaultStage.FORWARD,
    FaultStage.BACKWARD,
    FaultStage.REDUCE,
    FaultStage.VOTE,
    FaultStage.UPDATE,
    FaultStage.COMMIT,
    FaultStage.AFTER,
    FaultStage.BETWEEN,
)
"""Phases in which a trial kills; a script may have no vote (only sharded worlds do) and no restartable function."""
_TITLES = {
    FaultStage.DATA: "reading its batch",
    FaultStage.BEGIN: "before the body",
    FaultStage.FORWARD: "forward",
    FaultStage.BACKWARD: "backward",
    FaultStage.REDUCE: "reducing gradients",
    FaultStage.VOTE: "after the vote",
    FaultStage.UPDATE: "before the update",
    FaultStage.COMMIT: "after the update",
    FaultStage.AFTER: "after the body",
    FaultStage.BETWEEN: "restartable function",
}
Numbers = Mapping[tuple[StepNo, Rank], Mapping[str, float]]


class Outcome(StrEnum):
    """Outcome of one kill."""

    EQUAL = "equal"
    DIFFERS = "DIFFERS"
    ENDED = "ENDED"
    ABSENT = "–"
    """The script never reached this phase."""
    UNTRIED = "untried"


@dataclass(frozen=True)
class Kill:
    """A planned kill. `fault`: its name in the records."""

    fault: str
    rank: Rank
    step: StepNo
    phase: FaultStage


@dataclass(frozen=True)
class Result:
    """Result of a kill. `why`: the difference, or the last lines of the job's output."""

    kill: Kill
    outcome: Outcome
    rung: str = ""
    total: Seconds | None = None
    why: str = ""


def first_difference(one: Ledger, other: Ledger, *, until: StepNo | None = None) -> tuple[StepNo, str] | None:
    """The first step at which two runs differ, with a description; `until`: compare only steps below it."""
    mine, theirs = one.numbers, other.numbers
    for at in sorted(mine.keys() | theirs.keys()):
        if until is not None and at[0] >= until:
            break
        if text := difference_at(mine, theirs, at):
            return at[0], text
    return None


def difference_at(mine: Numbers, theirs: Numbers, at: tuple[StepNo, Rank]) -> str:
    """Describe the difference of two runs in one step of a rank; empty if there is none."""
    place = f"step {at[0]}, rank {at[1]}"
    if at not in mine or at not in theirs:
        return f"{place} was committed in one of the runs only"
    a, b = mine[at], theirs[at]
    # A rank that adopted a step from its peers recorded no digest of the state before it.
    looked = {STATE_METRIC} if STATE_METRIC in a and STATE_METRIC in b else set()
    reported = ((a.keys() | b.keys()) - {STATE_METRIC}) | looked
    names = [name for name in sorted(reported) if not _same(a.get(name), b.get(name))]
    if STATE_METRIC in names:
        return f"{place} begins with another protected state"
    return f"{place}: {names[0]} is {a.get(names[0])} and {b.get(names[0])}" if names else ""


def _same(a: float | None, b: float | None) -> bool:
    return a is b if a is None or b is None else struct.pack("<d", a) == struct.pack("<d", b)


def judge(kills: Sequence[Kill], struck: Ledger, alone: Ledger, *, code: int, output: str = "") -> list[Result]:
    """Judge each kill of a run, in order of steps.

    The last kill before the first difference is blamed for it, and the last kill of all for a job that failed. Kills
    planned after the blamed one count as untried, even if they happened. A difference is reported with the run's own
    finding about it: the collective, the object or the variable that differs in a newcomer.

    Args:
        kills: the kills of the run, as planned.
        struck: ledger of the run with kills.
        alone: ledger of the undisturbed run.
        code: exit code of the run with kills.
        output: the last lines of its output.
    """
    fired = {fault.fault: fault.step for fault in struck.injected}
    reached = struck.last_step
    ends = None if code == 0 else StepNo(0 if reached is None else reached)
    difference = first_difference(struck, alone, until=ends)
    order = sorted(kills, key=lambda kill: fired.get(kill.fault, kill.step))
    before = [k for k in order if k.fault in fired and (difference is None or fired[k.fault] <= difference[0])]
    blamed = before[-1] if before and (difference is not None or code != 0) else None
    outcome = Outcome.DIFFERS if difference is not None else Outcome.ENDED
    why = difference[1] if difference is not None else output
    if difference is not None and struck.refuted:
        why += f"; {struck.refuted[0].reason}"
    elif difference is not None and code == UNPROVEN:
        why += f"; {output}"
    results = []
    for kill in order:
        passed = blamed is None or order.index(kill) < order.index(blamed)
        if kill is blamed:
            results.append(Result(kill, outcome, why=why))
        elif kill.fault not in fired:
            results.append(Result(kill, Outcome.ABSENT if passed and code == 0 else Outcome.UNTRIED))
        elif passed:
            results.append(_mended(kill, fired[kill.fault], struck.incidents))
        else:
            results.append(Result(kill, Outcome.UNTRIED))
    return results


def _mended(kill: Kill, step: StepNo, incidents: Sequence[IncidentClosed]) -> Result:
    """The recovery of a kill: the first incident of its rank that ends at its step or later; kills may share one."""
    mine = next((each for each in incidents if kill.rank in each.ranks and each.step >= step), None)
    if mine is None:
        return Result(kill, Outcome.EQUAL)
    return Result(kill, Outcome.EQUAL, mine.rung, mine.total)


def table(title: str, results: Sequence[Result]) -> Table:
    """A table of phases by ranks: the time of recovery, or the failure."""
    ranks = sorted({result.kill.rank for result in results})
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 3, 0, 0))
    drawn.add_column("killed")
    for rank in ranks:
        drawn.add_column(f"rank {rank}")
    for phase in PHASES:
        row = {result.kill.rank: result for result in results if result.kill.phase is phase}
        if any(result.outcome is not Outcome.ABSENT for result in row.values()):
            drawn.add_row(_TITLES[phase], *(_cell(row.get(rank)) for rank in ranks))
    return drawn


def _cell(result: Result | None) -> Text:
    if result is None:
        return Text("")
    if result.outcome is not Outcome.EQUAL:
        return Text(result.outcome, style="dim" if result.outcome in (Outcome.ABSENT, Outcome.UNTRIED) else "bold red")
    took = f" {seconds(result.total)} {result.rung}" if result.total is not None else ""
    return Text.assemble(("equal", "green"), took)


def complaint(result: Result) -> str:
    """A failed kill in one line."""
    kill = result.kill
    return f"rank {kill.rank}, killed at {kill.phase} ({_TITLES[kill.phase]}) of step {kill.step}: {result.why}"


def advice(results: Mapping[str, Sequence[Result]]) -> list[str]:
    """Advice on the script, from the kills that failed. `results`: by the way in which lost ranks were replaced."""
    failed = {way: [r for r in each if r.outcome in (Outcome.DIFFERS, Outcome.ENDED)] for way, each in results.items()}
    found = []
    if failed.get("standby") and "fork" in failed and not failed["fork"]:
        found.append(
            "Only standbys fail: something that was read or made before the loop belongs to another rank. Ask "
            "session.rank, session.is_main and RANK in the loop, or run with --warmth imports."
        )
    differs = [r for each in failed.values() for r in each if r.outcome is Outcome.DIFFERS]
    phases = {r.kill.phase for r in differs}
    if any("begins with another protected state" in r.why for r in differs):
        between = phases <= {FaultStage.COMMIT, FaultStage.AFTER, FaultStage.BETWEEN, FaultStage.UPDATE}
        found.append(
            "The protected state depends on the kill. What changes it "
            + ("between two steps" if between else "in a step")
            + " must be protected too: every optimizer, average, scaler, scheduler and generator that a step reads. "
            "Change it in the body of the step, after optimizer.step()."
        )
    elif differs:
        found.append(
            "Losses depend on the kill, the protected state does not: a step reads something that a newcomer has not "
            "seen. Protect it (an object with state_dict), or work it out from step.number; a tensor kept in an "
            "object that holds nothing protected, or in a generator around the steps, is not what it was."
        )
    if any(failed.values()):
        found.append("What regrow asks of a script, habit by habit: docs/habits.md")
    return found
