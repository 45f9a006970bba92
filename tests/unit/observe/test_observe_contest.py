"""Measures that the recovery benchmark takes from records: the same for every side."""

from pathlib import Path

import pytest
from contest import Job, JobStuck, Kill, lost_seconds, redone_steps
from tests.unit.observe.observe_records import FakeJob, commit

from regrow.core.ids import Generation, JobId
from regrow.core.records import JobStarted, StepCommitted
from regrow.observe.ledger import Ledger


def _side(redone: int) -> Ledger:
    """Ten steps of half a second on two ranks; at 5.2 s a kill; at 7 s the job goes on, `redone` steps further back."""
    steps = [(step, 0.5 * (step + 1), 0) for step in range(10)]
    steps += [(10 - redone + number, 7.5 + 0.5 * number, 1) for number in range(redone + 5)]
    commits = [commit(step, rank, at, generation=generation) for step, at, generation in steps for rank in range(2)]
    return Ledger([JobStarted(0.0, JobId("side"), 2, 1, 0, []), *commits])


KILL = Kill(rank=1, killed_at=5.2, ended=Generation(0), recovered=True)


def test_redone_steps_are_lost_time_as_well() -> None:
    assert lost_seconds(_side(redone=0), KILL) == pytest.approx(7.5 - 5.2 - 0.5)
    assert lost_seconds(_side(redone=4), KILL) == pytest.approx(7.5 - 5.2 - 0.5 + 4 * 0.5)
    assert (redone_steps(_side(redone=0), KILL), redone_steps(_side(redone=4), KILL)) == (0, 4)


def test_a_step_that_some_ranks_finished_before_and_others_after_the_kill_is_not_redone() -> None:
    commits = [commit(0, 0, 1.0, generation=0), commit(0, 1, 1.4, generation=1), commit(1, 0, 2.0, generation=1)]
    assert redone_steps(Ledger(commits), KILL) == 0


def test_time_lost_to_a_kill_under_regrow_agrees_with_what_the_job_did() -> None:
    records = FakeJob(step=0.5).run(10, kills={4: 2})
    generation_two = next(r.at for r in records if isinstance(r, StepCommitted) and r.generation == 2)
    kill = Kill(rank=2, killed_at=generation_two - 0.75, ended=Generation(1), recovered=True)
    assert lost_seconds(Ledger(records), kill) == pytest.approx(FakeJob.mend)
    assert redone_steps(Ledger(records), kill) == 0


def _job(folder: Path, script: str) -> Job:
    return Job("side", ["sh", "-c", script], records=folder, log=folder / "log", world=2, environment={})


def test_a_job_that_ends_instead_of_stepping_is_stuck_at_once_and_says_where_its_output_is(tmp_path: Path) -> None:
    with _job(tmp_path, "echo broken; exit 3") as job, pytest.raises(JobStuck, match="the job has ended; its output"):
        job.wait_steps(1, deadline=60.0)
    assert (tmp_path / "log").read_text() == "broken\n"


def test_a_job_that_does_not_recover_is_counted_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = '"type":"StepCommitted","at":1,"step":0,"worker":"w","generation":0,"seconds":0.1,"metrics":{"pid":$$}'
    lines = "\n".join(f'{{{fields},"rank":{rank}}}' for rank in range(2))
    with _job(tmp_path, f"cat > {tmp_path}/steps.a.jsonl <<EOF\n{lines}\nEOF\nexec sleep 60") as job:
        job.wait(lambda: job.world_step >= 0, deadline=20.0, what="step")
        kill = job.kill(1)
    assert not kill.recovered
    assert "not recovered: side: no recovery from the kill of rank 1" in capsys.readouterr().out
