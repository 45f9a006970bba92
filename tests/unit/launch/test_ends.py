"""The last lines of a launcher."""

from pathlib import Path

import pytest

from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.ids import JobId
from regrow.launch.console import Console
from regrow.launch.job import HostEnvironment, RunFlags, make_plan
from regrow.launch.local import _Launch
from regrow.membership.orders import EndJob


@pytest.mark.parametrize("saves", [False, True])
def test_a_stopped_job_without_checkpoints_says_that_the_next_run_begins_at_step_0(
    saves: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = RunFlags(script="train.py", checkpoint_dir=str(tmp_path) if saves else "")
    plan = make_plan(flags, HostEnvironment(cpus=2, gpus=0, stamp="s", jobs_home=tmp_path))
    _Launch(plan, [], [], Console())._say_end(JobId("j"), tmp_path, EndJob(RUN_AGAIN, "stopped at step 114"), "")
    said = capsys.readouterr().err
    assert "job j: stopped at step 114 (exit code 75: it can be run again" in said
    assert ("from step 0: without --checkpoint-dir nothing was saved" in said) is not saves
