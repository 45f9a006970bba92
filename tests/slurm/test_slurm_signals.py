"""Slurm's signals where they reach every process of a step at once: launchers, agents and workers, each by itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.slurm.jobs import SubmittedJob, slurm_job
from tests.slurm.rig import SlurmCluster, slurm_cluster

FOREVER = 4000


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(3, proctrack="linuxproc", cold=True) as made:
        yield made


@pytest.fixture
def job(cluster: SlurmCluster, tmp_path: Path) -> Iterator[SubmittedJob]:
    with slurm_job(cluster, tmp_path) as made:
        yield made


@pytest.mark.full
def test_a_replica_whose_every_process_is_told_leaves_at_a_boundary_the_gang_saves_its_state_and_one_can_be_cancelled(
    job: SubmittedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_REQUEUE", "1")  # of a site or a user; it takes the place of what a batch script says
    flags = ["--data-cache=off", "--checkpoint-every=1h"]  # so what it goes on from was saved at the notice
    gang = job.submit(steps=FOREVER, maxReplicaCount=3, checkpointDir=str(tmp_path / "checkpoints"), runFlags=flags)
    job.until_world(gang, 3)
    assert "Requeue=0" in job.cluster.ask("scontrol", "show", "job", str(gang)), "it would run beside the next gang"
    assert job.cluster.run("scontrol", "requeue", str(gang)).returncode != 0
    words = ["sbatch", "--parsable", "-p", "high", "-N1", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"]
    other = job.cluster.ask(*words)
    reached = job.until_world(gang, 2)
    (left,) = job.cluster.until(
        lambda: [each for each in job.ledger(gang).incidents if each.kind != "grow"] or None, "it is over"
    )
    assert (left.kind, left.steps_lost) == ("preempt", 0), job.output()
    replica = job.numbers("job+2")[0]
    job.ended(replica)
    assert job.exit_code(replica) == 75, job.output()
    job.cluster.ask("scancel", "--signal=TERM", str(gang))  # as at its time limit
    again = job.cluster.until(
        lambda: [number for number in job.numbers("job") if number > gang] or None, f"anew; {job.output()}"
    )
    job.ended(gang)
    assert job.exit_code(gang) == 75
    job.cluster.ask("scancel", other)
    job.until_world(again[0], 2)
    assert reached < min(job.ledger(again[0]).commits) <= max(job.ledger(gang).commits) + 1, job.output()
    assert "interrupted twice" not in job.output(), "the notice comes to a launcher and by its parent, and is one"
    job.cluster.ask("scancel", str(again[0]))
    job.ended(again[0])
    job.nothing_queued()
    ran = [each for node in job.cluster.nodes for each in job.cluster.processes(node) if "regrow" in each]
    assert not ran and job.numbers("job") == [gang, *again], (ran, job.output())
    assert "a defect of regrow" not in job.output(), job.output()
