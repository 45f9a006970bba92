"""Jobs are found by their folders, and nobody else can read their secrets."""

import os
import stat
import time
from pathlib import Path

import pytest
from tests.process.agent_harness import spec

from regrow.core.errors import UsageError
from regrow.core.ids import JobId
from regrow.launch import folder


def entry(jobs: Path, name: str, **changes: object) -> folder.JobEntry:
    job, job_dir = folder.make_job_dir(jobs, JobId(name))
    logs = str(job_dir / "logs")
    made = folder.describe(spec(job=job), "127.0.0.1:1", "secret", command=["t.py"], log_dir=logs)
    values = {field: getattr(made, field) for field in made.__struct_fields__} | changes
    made = folder.JobEntry(**values)
    folder.write_entry(job_dir, made)
    return made


def test_folder_and_description_are_their_owners_only(tmp_path: Path) -> None:
    entry(tmp_path / "jobs", "a")
    assert stat.S_IMODE((tmp_path / "jobs" / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "jobs" / "a" / "job.json").stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "jobs" / "a") == ["job.json"]


def test_the_only_running_job_needs_no_name(tmp_path: Path) -> None:
    entry(tmp_path, "old", ended=time.time(), code=0)
    mine = entry(tmp_path, "new")
    assert folder.find_job(tmp_path, None) == mine


def test_a_job_whose_launcher_died_is_not_running(tmp_path: Path) -> None:
    entry(tmp_path, "killed", pid_started=1.0)
    with pytest.raises(UsageError, match="job killed is not running any more: it died"):
        folder.find_job(tmp_path, "killed")


def test_an_ended_job_is_named_with_its_exit_code(tmp_path: Path) -> None:
    entry(tmp_path, "done", ended=time.time(), code=1)
    with pytest.raises(UsageError, match="ended with exit code 1"):
        folder.find_job(tmp_path, "done")
    assert folder.find_job(tmp_path, None, running=False).job == "done"


def test_several_running_jobs_must_be_told_apart(tmp_path: Path) -> None:
    entry(tmp_path, "a")
    entry(tmp_path, "b")
    with pytest.raises(UsageError, match="name one of a, b"):
        folder.find_job(tmp_path, None)


def test_no_job_and_an_unknown_job_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no job is running"):
        folder.find_job(tmp_path / "none", None)
    with pytest.raises(UsageError, match="there is no job 'x'"):
        folder.find_job(tmp_path, "x")


def test_a_name_in_use_is_refused_and_one_that_was_used_gets_a_number(tmp_path: Path) -> None:
    entry(tmp_path, "a")
    with pytest.raises(UsageError, match="a job named a is running"):
        folder.make_job_dir(tmp_path, JobId("a"))
    entry(tmp_path, "b", ended=1.0, code=0)
    assert folder.make_job_dir(tmp_path, JobId("b"))[0] == "b-2"


def test_two_jobs_cannot_write_their_checkpoints_to_one_folder(tmp_path: Path) -> None:
    shared = tmp_path / "new" / "checkpoints"
    with folder.hold_checkpoints(str(shared)):
        second = folder.hold_checkpoints(str(shared))
        with pytest.raises(UsageError, match="another job writes its checkpoints"), second:
            pass
        with folder.hold_checkpoints(str(tmp_path / "other")), folder.hold_checkpoints(""):
            pass
        with folder.hold_checkpoints("memory://shared"), folder.hold_checkpoints("memory://shared"):
            pass
    with folder.hold_checkpoints(str(shared)):
        assert os.listdir(shared) == [], "nothing of ours lies among the checkpoints"


def test_a_checkpoint_folder_that_cannot_be_made_is_left_to_who_writes_to_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with folder.hold_checkpoints(str(tmp_path / "file" / "checkpoints")):
        pass
