"""deploy/quota/slurm.conf on a real Slurm: a team borrows what is idle, and gives it back when others need it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.slurm.jobs import SubmittedJob, slurm_job
from tests.slurm.rig import SlurmCluster, slurm_cluster

FILE = Path(__file__).parents[2] / "deploy" / "quota" / "slurm.conf"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    lines = FILE.read_text(encoding="utf-8").splitlines()
    with slurm_cluster(4, partitions="\n".join(each for each in lines if each.startswith("PartitionName="))) as made:
        yield made


@pytest.fixture
def job(cluster: SlurmCluster, tmp_path: Path) -> Iterator[SubmittedJob]:
    with slurm_job(cluster, tmp_path) as made:
        yield made


@pytest.mark.full
def test_who_borrows_gives_back_to_the_other_team_and_to_inference_and_takes_the_night(job: SubmittedJob) -> None:
    job.partitions = {"gang": "team-a", "elastic": "spot"}
    gang = job.submit(steps=1000, maxReplicaCount=4, maxPendingReplicas=2)
    job.until_world(gang, 4)  # two nodes of its own, and two that are idle
    for partition in ("team-b", "inference"):
        words = ["sbatch", "--parsable", "-p", partition, "-N2", "--exclusive", "-o", "/dev/null"]
        other = int(job.cluster.ask(*words, "--wrap", "srun sleep 600"))
        job.cluster.until(lambda other=other: job.state(other) == "RUNNING" or None, f"{partition} runs")  # type: ignore[misc]
        job.until_world(gang, 2)
        on = job.cluster.ask("squeue", "-h", "-j", str(gang), "-o", "%N")
        assert on == "node[0-1]"  # the gang is where it was
        job.cluster.ask("scancel", str(other))
        job.until_world(gang, 4)
    told = job.finish(gang)
    steps = sorted(told.commits)
    assert steps == list(range(len(steps))), "no step is missing"
