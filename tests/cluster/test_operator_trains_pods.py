"""A pod beside pod 0 is lost under real trainings of replicas of several pods: it alone is replaced, no bit changes."""

from pathlib import Path
from typing import Any

import pytest
from tests.cluster.bed import Bed, bed
from tests.cluster.trained import MICRO, STEPS, TrainedJob, micro_job
from tests.process.elastic import losses, small
from tests.process.launching import site

from regrow.observe.ledger import Ledger, read_records

pytestmark = pytest.mark.full
SHARDED = ("--invariant", "--mode", "hsdp", "--shard", "2")
SOON = {"gracefulShutdownTimeoutInSeconds": 10}
"""Less, and on a slow machine the pod is gone before all stand still for it."""


def pods(cluster: Bed, place: int, *, deleted: bool = False) -> dict[str, str]:
    """Uids of the pods at a place, by their number in their replica; or of those that are to end."""
    here = [each["metadata"] for each in cluster.pods()]
    return {
        each["name"].rsplit("-", 1)[-1]: each["uid"]
        for each in here
        if each["labels"].get("regrow.dev/place") == str(place) and (not deleted or "deletionTimestamp" in each)
    }


async def test_the_other_pod_of_replica_0_is_deleted_and_pod_0_waits_for_the_next_with_its_state(
    tmp_path: Path,
) -> None:
    async with bed(tmp_path, {"n1": 2}, real=True) as cluster:
        job = TrainedJob(cluster, tmp_path)
        cluster.store.create("trainingjobs", "team", micro_job(replicaCount=1, podsPerReplica=2, **SOON))
        async with cluster.operator():
            await job.until_world(2)
            before = pods(cluster, 0)
            cluster.store.delete("pods", "team", job.made[1][1])
            await cluster.until(lambda: len(job.made) == 3, "another is made")
            await job.until_world(2)
            after = pods(cluster, 0)
            assert after["0"] == before["0"] and after["1"] != before["1"]
            job.let_go()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
            assert (cluster.status()["attempt"], len(job.made)) == (1, 3)
            kinds = job.assert_undisturbed(2)
            await job.assert_no_orphan()
    assert kinds == ["preempt"], "given back, and all stand still for it"


async def test_a_node_with_the_other_shard_of_replica_0_loses_its_power_and_the_other_replica_trains_on(
    tmp_path: Path,
) -> None:
    async with bed(tmp_path, {f"n{number}": 1 for number in range(1, 6)}, real=True) as cluster:
        job = TrainedJob(cluster, tmp_path)
        # A rank that is released gathers nothing at its end, for the other half of its model is gone.
        script = [*MICRO, "--steps", str(STEPS), "--pace", "0.6", *SHARDED]
        body = micro_job(script=script, replicaCount=1, maxReplicaCount=2, podsPerReplica=2)
        cluster.store.create("trainingjobs", "team", body)
        async with cluster.operator():
            await job.until_world(4)
            before = pods(cluster, 0), pods(cluster, 1)
            (lost,) = [each for each in cluster.pods() if each["metadata"]["uid"] == before[0]["1"]]
            cluster.scheduler.unfit.add(lost["spec"]["nodeName"])
            cluster.kubelet.power_off(lost["spec"]["nodeName"])
            await job.until_world(2)
            cluster.clock.ahead += 30  # as long as its tolerations say
            await cluster.until(lambda: pods(cluster, 0, deleted=True), "its pod is to end")
            cluster.clock.ahead += 20 + 15 + 60  # its grace, and the lease that fences it
            await job.until_world(4)
            after = pods(cluster, 0), pods(cluster, 1)
            assert after[0]["0"] == before[0]["0"] and after[0]["1"] != before[0]["1"]
            assert after[1] == before[1], "nobody else was touched"
            job.let_go()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
            assert (cluster.status()["attempt"], len(job.made)) == (1, 5)
            await job.assert_no_orphan()
    kinds = job.assert_losses(fixed_losses(tmp_path / "fixed"))
    assert kinds[0] == kinds[-1] == "grow" and len(kinds) == 3, kinds


async def test_a_model_with_a_copy_in_each_rank_grows_and_shrinks_by_whole_pods(tmp_path: Path) -> None:
    async with bed(tmp_path, {"n1": 2}, real=True) as cluster:
        job = TrainedJob(cluster, tmp_path)
        body = micro_job(replicaCount=1, maxReplicaCount=2, ranksPerPod=2, replicaRanks=1)
        cluster.store.create("trainingjobs", "team", body)
        async with cluster.operator():
            await job.until_world(4)
            cluster.store.delete("pods", "team", job.at(1)["metadata"]["name"])
            await job.until_world(2)
            await job.until_world(4)
            job.let_go()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
            assert [place for place, _ in job.made] == [0, 1, 1]
            job.assert_undisturbed(4)
            await job.assert_no_orphan()


def fixed_losses(folder: Path) -> dict[int, Any]:
    """Of one replica that nothing happens to."""
    folder.mkdir()
    with site(folder) as made:
        done = made.regrow(*small("fixed", "--nproc-per-node", "2", steps=STEPS, extra=SHARDED))
        assert done.returncode == 0, done.stdout + done.stderr
        return losses(Ledger(read_records(made.home / "jobs" / "fixed")))
