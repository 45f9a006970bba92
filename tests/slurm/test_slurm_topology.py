"""Ranks in the order of a network whose switches have every second node; all starts are cold."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.elastic import assert_same, fixed_run
from tests.slurm.jobs import SubmittedJob, slurm_job
from tests.slurm.rig import SlurmCluster, slurm_cluster

STEPS = 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(4, woven=True, cold=True) as made:
        yield made


@pytest.fixture
def job(cluster: SlurmCluster, tmp_path: Path) -> Iterator[SubmittedJob]:
    with slurm_job(cluster, tmp_path) as made:
        yield made


@pytest.mark.full
def test_ranks_under_one_switch_are_neighbours_and_a_lost_host_is_known_by_its_own_name(
    job: SubmittedJob, tmp_path: Path
) -> None:
    gang = job.submit(steps=STEPS, maxReplicaCount=2, spares=1)
    job.until_world(gang, 2)
    for host, rank, leaf in (("node0", 0, "leaf0"), ("node2", 1, "leaf0"), ("node1", 2, "leaf1")):
        line = next(each for each in job.output().splitlines() if each.startswith(f"regrow: node {host}: regrow run"))
        assert f"--node-rank={rank} " in line and f"--domain={leaf} " in line
    job.cluster.kill("node2")
    (number,) = job.cluster.until(lambda: job.numbers("job+1") or None, f"a replacement is asked for; {job.output()}")
    assert "ExcNodeList=node2" in job.cluster.ask("scontrol", "show", "job", str(number))
    job.until_world(gang, 2)
    told = job.finish(gang)
    job.clear()
    (tmp_path / "alone").mkdir()
    assert_same(job.here, told, fixed_run(tmp_path / "alone", STEPS), 2)
