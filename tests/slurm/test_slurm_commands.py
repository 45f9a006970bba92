"""`regrow slurm` as its user sees it: sizes, nodes given back, ends, time limits, and what is said of mistakes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.slurm.jobs import SubmittedJob, slurm_job
from tests.slurm.rig import SlurmCluster, slurm_cluster

STEPS = 4000


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(4) as made:
        yield made


@pytest.fixture
def job(cluster: SlurmCluster, tmp_path: Path) -> Iterator[SubmittedJob]:
    with slurm_job(cluster, tmp_path) as made:
        yield made


def said(job: SubmittedJob, *words: str) -> str:
    """Output of a command that succeeds."""
    code, text = job.regrow("slurm", *words)
    assert code == 0, text
    return text


def refused(job: SubmittedJob, *words: str) -> str:
    """Output of a command that is refused."""
    code, text = job.regrow("slurm", *words)
    assert code == 2, text
    return text


def test_a_job_is_scaled_drained_looked_at_and_cancelled(job: SubmittedJob) -> None:
    gang = job.submit(steps=STEPS, maxReplicaCount=4, replicas=2)
    job.until_world(gang, 2)
    assert f"Slurm job {gang}" in refused(job, "submit", "job.toml")
    assert "is in the queue already" in refused(job, "submit", "job.toml")
    assert "job job can have 2 to 4" in refused(job, "scale", "job", "--replicas", "5")
    assert "job job is to have 3 replicas" in said(job, "scale", "job", "--replicas", "3")
    job.until_world(gang, 3)
    told = said(job, "status", "job")
    assert f"{gang} gang      running     node0,node1" in told
    assert "place 2   running     node2" in told
    assert "wanted: 3 replicas (from 2 to 4), start 1" in told
    assert "replicas: 3" in told, "the coordinator's own words"
    assert "node0 has the coordinator of job job" in refused(job, "drain", "job", "node0")
    assert "job job has no node node3" in refused(job, "drain", "job", "node3")
    assert "node2 is given back" in said(job, "drain", "job", "node2")
    job.cluster.until(lambda: job.on("node3") or None, "another comes on another node")
    (left,) = job.numbers("job+2")
    job.ended(left)
    assert job.exit_code(left) == 75
    assert job.on("node3") == "job+3", "the place of the one that left was not free yet"
    job.until_world(gang, 3)
    said(job, "drain", "job", "node1")
    job.until_world(gang, 2)
    assert "avoided: node1, node2" in said(job, "status", "job")
    assert "without node3 the job would have room for 1 replica, and replicaCount is 2" in refused(
        job, "drain", "job", "node3"
    )
    job.until_world(gang, 2)
    assert "node3 is given back, within 10 s" in said(job, "drain", "job", "node3", "--force")
    job.cluster.until(lambda: "waiting" in said(job, "status", "job") or None, "it waits for another node")
    assert "job job is ending" in said(job, "cancel", "job")
    job.ended(gang)
    job.nothing_queued()
    assert job.numbers("job") == [gang], "it was not submitted anew"
    job.here.assert_nothing_left()


def test_what_cannot_be_is_said_before_anything_is_submitted(job: SubmittedJob) -> None:
    job.write(10, 0.0, maxReplicaCount=3)
    text = (job.here.folder / "job.toml").read_text()
    for wrong, right, told in (
        ('"spot"', '"spott"', "job.toml [elastic]: sbatch: "),
        ('"train"', '"trian"', "sinfo lists the partitions"),
        ("replicaCount = 2", "replicaCount = 3\nspares = 5", "or it has fewer nodes than the gang with its spares"),
        ('"--exclusive"', '"--gres=gpu:8"', "job.toml [elastic]: sbatch: "),
        ("train_micro.py", "no.py", "no.py, which is not there"),
        ("pollInSeconds", "pollInSecond", "did you mean pollInSeconds?"),
    ):
        (job.here.folder / "job.toml").write_text(text.replace(wrong, right))
        assert told in refused(job, "submit", "job.toml")
    assert "no.toml cannot be read" in refused(job, "submit", "no.toml")
    assert "you have no job jb in Slurm's queue" in refused(job, "status", "jb")
    assert job.cluster.queue() == {}


def test_a_gang_whose_time_is_up_is_submitted_anew_and_goes_on_from_a_checkpoint(
    job: SubmittedJob, tmp_path: Path
) -> None:
    keep = tmp_path / "checkpoints"
    job.limit("6:00")
    flags = ["--data-cache=off", "--checkpoint-every=1h"]  # so what it goes on from was saved at the signal
    ends = {"signalBeforeEndInSeconds": 90, "gracefulShutdownTimeoutInSeconds": 80}
    gang = job.submit(steps=STEPS, checkpointDir=str(keep), maxRestarts=1, runFlags=flags, **ends)
    job.until_world(gang, 2)
    job.time_left(gang, 105)
    again = job.cluster.until(lambda: [each for each in job.numbers("job") if each > gang] or None, "it is anew")
    job.ended(gang)
    assert job.exit_code(gang) == 75
    job.until_world(again[0], 2)
    assert 0 < min(job.ledger(again[0]).commits) <= max(job.ledger(gang).commits) + 1, job.output()
    job.time_left(again[0], 105)
    job.ended(again[0])
    assert job.exit_code(again[0]) == 75
    job.nothing_queued()
    assert job.numbers("job") == [gang, *again], "maxRestarts is used up"


def test_a_plain_scancel_ends_the_job_and_takes_waiting_replicas_along(job: SubmittedJob) -> None:
    gang = job.submit(steps=STEPS, maxReplicaCount=6, maxPendingReplicas=4)
    job.until_world(gang, 4)
    job.cluster.until(lambda: "PENDING" in job.cluster.queue().values() or None, "replicas wait")
    job.cluster.ask("scancel", str(gang))
    job.ended(gang)
    job.nothing_queued()
    assert job.numbers("job") == [gang], "it was not submitted anew"
    job.here.assert_nothing_left()


def test_a_node_on_which_regrow_cannot_be_started_is_named_and_that_is_the_end(job: SubmittedJob) -> None:
    gang = job.submit(steps=1, command=["/no/such/python", "-m", "regrow"], maxReplicaCount=3)
    job.ended(gang)
    assert job.exit_code(gang) == 93
    assert "regrow: /no/such/python -m regrow cannot be started on node0: install regrow there, or set" in job.output()
    job.nothing_queued()
    assert job.numbers("job") == [gang]


def test_a_script_error_is_the_end(job: SubmittedJob) -> None:
    (job.here.folder / "fails.py").write_text("import regrow\nregrow.init()\nraise SystemExit('my own fault')\n")
    gang = job.submit(steps=1, script=["fails.py"], maxReplicaCount=4)
    job.ended(gang)
    assert job.exit_code(gang) == 93
    job.nothing_queued()
    assert "my own fault" in job.output()
    assert job.numbers("job") == [gang]
