"""Durable checkpoints: the last resort, and what `--resume` starts from."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.process.batch import until
from tests.process.disk_watch import watched
from tests.process.launching import PATIENCE, Site, site
from tests.process.training import SCRIPTS, Fault, Outcome, outcome_of, train
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from regrow.core.records import WorkerForked
from regrow.observe.ledger import Ledger, read_records

STEPS = 30
PAUSE = ("--pause", "0.3")
"""Pause that lets the writer process start long before the end, on a busy machine too."""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


def flags(here: Site, every: str = "1ms", keep: int = 2) -> tuple[str, ...]:
    folder = str(here.folder / "durable")
    return ("--checkpoint-dir", folder, "--checkpoint-every", every, "--checkpoint-keep", str(keep))


def saves(here: Site, job: str) -> list[int]:
    """The steps of all checkpoints that a job has written."""
    lines = (here.home / "jobs" / job / "events.jsonl").read_text().splitlines()
    return [event["step"] for event in map(json.loads, lines) if event["type"] == "CheckpointSaved"]


def losses_of(here: Site, job: str) -> dict[int, float]:
    """By step, of what a job has committed so far."""
    return dict(Ledger(read_records(here.home / "jobs" / job)).curve())


def begun(outcome: Outcome) -> int:
    return min(step for step, _ in outcome.losses)


def test_a_resumed_job_ends_like_one_that_was_never_stopped(here: Site) -> None:
    whole = train(here, "whole", world=2, steps=STEPS)
    script = (str(SCRIPTS / "train_small.py"), "--steps", str(STEPS), "--pace", "1.0")  # steps are left when it ends
    with here.start("run", "--job", "first", "--nproc-per-node", "2", *flags(here), *script) as first:
        first.wait_for("beside the training")
        lines = [b" ".join(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")) for pid in here.processes()]
        writers = [line for line in lines if b"regrow.agent.checkpoints.writer" in line]
        assert writers and not any(b"durable" in line for line in writers), "a URL may carry credentials"
        first.signal(signal.SIGTERM)
        assert first.wait() == 75
    second = train(here, "second", "--resume", *flags(here), world=2, steps=STEPS)
    assert second.code == 0, second.output
    assert second.finals == whole.finals
    assert begun(second) == saves(here, "first")[-1]
    assert second.losses == {place: loss for place, loss in whole.losses.items() if place[0] >= begun(second)}


@pytest.mark.parametrize("how", ["SIGTERM", "regrow stop"])
def test_who_ends_a_job_loses_no_step_of_it_however_seldom_checkpoints_are_written(here: Site, how: str) -> None:
    rare = flags(here, every="10min")
    script = (str(SCRIPTS / "train_small.py"), "--steps", "1000", *PAUSE)
    with here.start("run", "--job", "first", "--nproc-per-node", "2", *rare, *script) as first:
        until(lambda: len(losses_of(here, "first")) > 3)
        asked = max(losses_of(here, "first"))
        if how == "SIGTERM":
            first.signal(signal.SIGTERM)
        else:
            assert "is stopping" in here.regrow("stop", "first").stdout
        assert first.wait() == 75, first.output
        assert "the state goes to disk first, for which there are 30 s" in first.output
    (saved,) = saves(here, "first")
    assert saved >= asked
    second = train(here, "second", "--resume", *rare, world=2, steps=saved + 3)
    assert second.code == 0, second.output
    assert begun(second) == saved
    once, again = losses_of(here, "first"), losses_of(here, "second")
    assert all(once[step] == again[step] for step in once.keys() & again.keys()), "committed meanwhile, and once more"


def test_the_last_state_is_on_disk_before_the_job_ends_and_the_newest_k_stay(here: Site) -> None:
    outcome = train(here, "job", *flags(here, keep=3), world=2, steps=STEPS, extra=PAUSE)
    assert outcome.code == 0, outcome.output
    steps = saves(here, "job")
    assert steps[-1] == STEPS
    assert sorted(os.listdir(here.folder / "durable")) == sorted(f"step-{step}" for step in steps[-3:])
    content = {"model.0.weight": torch.zeros(64, 16), "regrow.step": torch.tensor(0)}
    dcp_load(content, checkpoint_id=here.folder / "durable" / f"step-{STEPS}", no_dist=True)
    assert content["model.0.weight"].any()
    assert content["regrow.step"] == STEPS
    again = train(here, "again", "--resume", *flags(here), world=2, steps=STEPS)
    assert again.code == 0, again.output
    assert again.finals == outcome.finals
    assert again.losses == {}


def lose_all(here: Site, *words: str) -> Outcome:
    """A job of two ranks that is trained to its end; both die at once when it has checkpoints, or ten steps without.

    A fault plan would not do: on a busy machine one rank can die, and be replaced, before the other comes to the step.
    """
    script = (
        str(SCRIPTS / "train_small.py"),
        "--steps",
        str(STEPS),
        "--pace",
        "0.3",
        "--out",
        str(here.folder / "lost.out"),
    )
    with here.start("run", "--job", "lost", "--nproc-per-node", "2", *words, *script) as job:
        deadline = time.monotonic() + PATIENCE
        while not ready_to_lose(here, bool(words)):
            assert time.monotonic() < deadline, job.output
            time.sleep(0.02)
            job.drain()
        pids = [line.pid for line in read_records(here.home / "jobs" / "lost") if isinstance(line, WorkerForked)]
        assert len(pids) == 2
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a rank that is stopped gives no state to another
            for pid in pids:
                os.kill(pid, number)
        (here.folder / "hurry").touch()
        code = job.wait()
        return outcome_of(here, "lost", 2, code, job.output)


def ready_to_lose(here: Site, saved: bool) -> bool:
    """True if the job has trained for ten steps, and has a checkpoint if it writes any."""
    if not (here.home / "jobs" / "lost" / "events.jsonl").exists():
        return False
    trained = max(Ledger(read_records(here.home / "jobs" / "lost")).commits, default=0)
    return trained >= 10 and (not saved or bool(saves(here, "lost")))


def test_all_ranks_lost_at_once_go_back_to_the_durable_checkpoint(here: Site) -> None:
    whole = train(here, "whole", world=2, steps=STEPS)
    outcome = lose_all(here, *flags(here))
    assert outcome.code == 0, outcome.output
    assert outcome.finals == whole.finals
    assert [incident.rung for incident in outcome.ledger.incidents] == ["restart"]
    last = outcome.ledger.generations[-1]
    assert 0 < last.step < STEPS
    assert last.step in saves(here, "lost")


def test_all_ranks_lost_without_a_durable_checkpoint_end_the_job_with_a_diagnosis(here: Site) -> None:
    outcome = lose_all(here)
    assert outcome.code == 1
    assert "last copy of the training state" in outcome.output
    assert "--checkpoint-dir" in outcome.output


def test_a_second_job_with_the_folder_of_one_that_runs_is_refused_until_that_has_ended(here: Site) -> None:
    waits = here.script("print('begun', flush=True); __import__('signal').pause()", "waits.py")
    with here.start("run", "--job", "first", *flags(here), waits) as first:
        first.wait_for("begun")
        second = here.regrow("run", "--job", "second", *flags(here), here.script("print('trained')"))
        assert second.returncode == 2
        assert f"another job writes its checkpoints to {here.folder / 'durable'}" in second.stderr
        assert "trained" not in second.stdout
        assert os.listdir(here.home / "jobs") == ["first"]
        first.signal(signal.SIGTERM)
        assert first.wait() == 75
    again = here.regrow("run", "--job", "second", *flags(here), "train.py")
    assert again.returncode == 0, again.stdout + again.stderr


def test_a_fault_that_leaves_a_replica_reads_nothing_from_disk(here: Site) -> None:
    (here.folder / "durable").mkdir()
    with watched(here.folder / "durable") as disk:
        outcome = train(here, "killed", *flags(here), world=2, steps=STEPS, faults=[Fault(1, 12)], extra=PAUSE)
    assert outcome.code == 0, outcome.output
    assert len(outcome.ledger.incidents) == 1
    assert not [path for path in disk.reads if path.endswith(".distcp")]


def test_the_death_of_the_rank_that_takes_snapshots_does_not_keep_the_last_state_from_the_disk(here: Site) -> None:
    whole = train(here, "whole", world=2, steps=STEPS)
    faults = [Fault(0, 8, "update"), Fault(0, 16, "commit")]
    outcome = train(here, "killed", *flags(here), world=2, steps=STEPS, faults=faults, extra=PAUSE)
    assert outcome.code == 0, outcome.output
    assert outcome.finals == whole.finals
    assert saves(here, "killed")[-1] == STEPS


def test_what_cannot_be_written_is_said_once_and_training_goes_on(here: Site) -> None:
    folder = here.folder / "durable"
    script = (str(SCRIPTS / "train_small.py"), "--steps", str(STEPS), *PAUSE)
    with here.start("run", "--job", "full", "--nproc-per-node", "2", *flags(here), *script) as job:
        job.wait_for("records and logs in")
        folder.rmdir()
        folder.write_text("a file, not a folder")
        assert job.wait() == 0, job.output
    assert job.output.count("could not be written to disk") == 1
    assert "Not a directory" in job.output
    assert f"nothing of this training is on disk: {folder} has no complete checkpoint of it" in job.output


def test_a_place_that_cannot_be_used_or_is_another_runs_is_said_before_anything_starts(here: Site) -> None:
    script = here.script("print('trained', flush=True)")
    (here.folder / "file").write_text("")
    for place, why in (("nosuch://bucket/folder", "cannot be used"), (here.folder / "file", "cannot be written to")):
        refused = here.regrow("run", "--checkpoint-dir", str(place), "--checkpoint-every", "1ms", script)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"{place} {why}" in refused.stderr
    nothing = here.regrow("run", *flags(here), "--resume=must", script)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    first = train(here, "first", *flags(here), world=1, steps=3)
    assert f"on disk: state@3, in {here.folder / 'durable' / 'step-3'}" in first.output
    before = {path: path.read_bytes() for path in (here.folder / "durable").rglob("*") if path.is_file()}
    again = here.regrow("run", *flags(here), script)
    assert (again.returncode, again.stdout) == (2, "")
    assert "has checkpoints of another run: step 3 of job first" in again.stderr
    assert "--resume goes on from them" in again.stderr
    assert {path: path.read_bytes() for path in (here.folder / "durable").rglob("*") if path.is_file()} == before


def test_all_ranks_go_on_from_an_older_one_where_one_of_them_cannot_read_its_part_of_the_newest(here: Site) -> None:
    script = (str(SCRIPTS / "train_parallel.py"), "--mode", "fsdp2", "--steps", "20", "--pace", "0.2", "--out")
    common = ("run", "--nproc-per-node", "4")
    first = here.regrow(*common, "--job", "first", *flags(here, keep=9), *script, str(here.folder / "first"))
    assert first.returncode == 0, first.stdout + first.stderr
    newest, older = saves(here, "first")[::-1][:2]
    part = here.folder / "durable" / f"step-{newest}" / "__1_0.distcp"
    part.write_bytes(bytes(part.stat().st_size))
    second = here.regrow(
        *common, "--job", "second", "--resume=must", *flags(here, keep=9), *script, str(here.folder / "second")
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"the checkpoint of step {newest} is not used: rank 1: {part.parent} could not be read" in second.stderr
    assert f"not all ranks could read the checkpoint of step {newest}" in second.stderr
    assert f"training goes on from the checkpoint of step {older}" in second.stderr
    for rank in range(4):
        expected, ended = (json.loads((here.folder / f"{run}.{rank}.json").read_text()) for run in ("first", "second"))
        assert ended["digest"] == expected["digest"]


@pytest.mark.parametrize("mode", ["fsdp2", "pp_dp"])
def test_a_sharded_world_resumes_from_its_parts(here: Site, mode: str) -> None:
    script = (str(SCRIPTS / "train_parallel.py"), "--mode", mode, "--steps", "40", "--out")
    common = ("run", "--nproc-per-node", "4")
    whole = here.regrow(*common, "--job", "whole", *script, str(here.folder / "whole"))
    assert whole.returncode == 0, whole.stdout + whole.stderr
    slowly = (*script, str(here.folder / "first"), "--pace", "0.3")  # so steps are left when it is told to end
    with here.start(*common, "--job", "first", *flags(here), *slowly) as first:
        first.wait_for("beside the training")
        first.signal(signal.SIGTERM)
        assert first.wait() == 75
    second = here.regrow(*common, "--job", "second", "--resume", *flags(here), *script, str(here.folder / "second"))
    assert second.returncode == 0, second.stdout + second.stderr
    left = 40 - saves(here, "first")[-1]
    assert 0 < left < 40
    for rank in range(4):
        expected, ended = (json.loads((here.folder / f"{run}.{rank}.json").read_text()) for run in ("whole", "second"))
        assert ended["digest"] == expected["digest"]
        assert ended["losses"] == expected["losses"][-left:]
