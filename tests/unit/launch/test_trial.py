"""The runs of `regrow try`: kills are judged by the names that the job read from the plan file."""

import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.observe.observe_records import FakeJob, commit

from regrow.core.ids import Rank, WorkerId
from regrow.core.messages.vocabulary import FaultSpec, FaultStage
from regrow.core.records import FaultInjected, Record, StepCommitted
from regrow.launch.plan import load_faults
from regrow.launch.trial import TAIL, TrialFlags, TrialRun, _Trial, plan_kills
from regrow.membership.diagnosis import died_building
from regrow.observe.ledger import Ledger
from regrow.observe.trial import Outcome, Result

ABSENT = (FaultStage.VOTE, FaultStage.BETWEEN)
"""Phases that this script does not have."""
BLAMED = (Rank(1), FaultStage.REDUCE)
"""The kill after which a run with standbys differs."""


class Scripted(_Trial):
    """A trial whose runs are made up of records; the job reads the plan file as a real one does."""

    tables: dict[str, list[Result]]

    def _start(self, what: str, steps: int, *more: str) -> TrialRun:
        self._runs += 1
        plans = [Path(flag.partition("=")[2]) for flag in more if flag.startswith("--fault-plan=")]
        faults = [fault for plan in plans for fault in load_faults(plan, world=2) if fault.stage not in ABSENT]
        wrong_from = next((_step(fault) + 1 for fault in faults if (fault.rank, fault.stage) == BLAMED), steps)
        wrong_from = wrong_from if "--standby=1" in more else steps
        records = [_changed(record, wrong_from) for record in FakeJob(world=2).run(steps, kills={})]
        return TrialRun(0, Ledger([*map(_injected, faults), *records]), "", 1.0)

    def _report(self, results: dict[str, list[Result]], *, kills: int) -> int:
        self.tables = results
        return super()._report(results, kills=kills)


def _step(fault: FaultSpec) -> int:
    assert fault.step is not None
    return fault.step


def _injected(fault: FaultSpec) -> FaultInjected:
    assert fault.step is not None
    return FaultInjected(0.0, fault.fault, WorkerId("w"), fault.rank, fault.step, str(fault.stage), "sigkill")


def _changed(record: Record, wrong_from: int) -> Record:
    if isinstance(record, StepCommitted) and record.step >= wrong_from:
        return commit(record.step, record.rank, record.at, generation=record.generation, loss=9.0)
    return record


def test_where_a_phase_is_absent_each_kill_of_the_second_way_is_judged_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kills = plan_kills(ranks=2)
    trial = Scripted(TrialFlags("train.py"), tmp_path, Console(width=200), kills[-1].step + TAIL)
    assert trial.run(kills) == 1
    for way, results in trial.tables.items():
        found = {(each.kill.rank, each.kill.phase): each.outcome for each in results}
        differs = {BLAMED} if way == "standby" else set()
        assert {place for place, outcome in found.items() if outcome is Outcome.DIFFERS} == differs
        absent = {place for place, outcome in found.items() if outcome is Outcome.ABSENT}
        assert absent == {(Rank(rank), phase) for rank in range(2) for phase in ABSENT}
        assert len(results) == len(kills) and Outcome.UNTRIED not in found.values()
    assert "rank 1, killed at reduce" in capsys.readouterr().out


LAUNCHED = """
import pathlib, sys
job = next(word.partition("=")[2] for word in sys.argv if word.startswith("--job="))
logs = pathlib.Path({home!r}) / job / "logs"
logs.mkdir(parents=True)
(logs / "rank0.log").write_text("other")
(logs / "rank1.log").write_text("".join(f"line {{at}}\\n" for at in range(20)) + "train.py: error: no --epoch")
(logs.parent / "events.jsonl").touch()
sys.exit("regrow: job j: " + {told!r})
"""


def test_a_script_that_ends_before_its_first_step_is_reported_with_the_last_lines_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!{sys.executable}\n{LAUNCHED.format(home=str(tmp_path), told=died_building(Rank(1), 2))}")
    launcher.chmod(0o755)
    monkeypatch.setattr("regrow.launch.trial.jobs_home", lambda: tmp_path)
    monkeypatch.setattr(sys, "executable", str(launcher))
    assert _Trial(TrialFlags("train.py"), tmp_path, Console(width=200), 6).run(plan_kills(ranks=2)) == 1
    said = capsys.readouterr().out
    assert "the script fails without any kill (exit code 1)" in said
    assert said.endswith("".join(f"line {at}\n" for at in range(11, 20)) + "train.py: error: no --epoch\n")
    assert "line 10\n" not in said and "other" not in said
