"""Nodes, leaders and quota are lost under real trainings: no bit changes, and each loss is made good once."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.cluster.bed import Bed, bed
from tests.cluster.operators import operators
from tests.cluster.trained import TrainedJob, micro_job

from regrow.core.exit_codes import RUN_AGAIN
from regrow.membership.view import JobView
from regrow_clusters.operator.objects import NODE_RANK

pytestmark = pytest.mark.full


async def test_a_node_without_power_and_one_that_is_cut_off_are_fenced_and_made_good_once(tmp_path: Path) -> None:
    async with bed(tmp_path, {f"n{number}": 1 for number in range(1, 6)}, real=True) as cluster:
        job = TrainedJob(cluster, tmp_path)
        cluster.store.create("trainingjobs", "team", micro_job(replicaCount=2, maxReplicaCount=3))
        async with cluster.operator():
            await job.until_world(3)
            await lose(cluster, job, 1, cluster.kubelet.power_off)
            cut = await lose(cluster, job, 2, cluster.kubelet.cut)
            with_the_lost = len(cluster.kubelet.running())
            cluster.kubelet.join(cut)
            await cluster.until(lambda: len(cluster.kubelet.running()) < with_the_lost, "it ends what it ran")
            assert [place for place, _ in job.made] == [0, 1, 2, 1, 2], "exactly one for each that was lost"
            await job.until_world(3)
            job.let_go()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
            kinds = job.assert_undisturbed(3)
            await job.assert_no_orphan()
    assert kinds.count("grow") == 3, kinds


async def lose(cluster: Bed, job: TrainedJob, place: int, how: Callable[[str], None]) -> str:
    """The node of the pod at a place; the others train on, and it is replaced when it is fenced, and not before."""
    pod, made = job.at(place), len(job.made)
    node = str(pod["spec"]["nodeName"])
    cluster.scheduler.unfit.add(node)
    how(node)
    await job.until_world(2)
    cluster.clock.ahead += 30  # as long as its tolerations say
    await cluster.until(lambda: "deletionTimestamp" in job.at(place)["metadata"], "its pod is to end")
    steps = job.step(2)
    await cluster.until(lambda: job.step(2) > steps + 2, "they train on")
    assert len(job.made) == made, "its place is held"
    cluster.clock.ahead += 20 + 15 + 60  # the pod's grace, and the lease that fences it
    await cluster.until(lambda: len(job.made) > made, "another is made")
    await job.until_world(3)
    assert job.at(place)["metadata"]["name"] != pod["metadata"]["name"]
    assert job.at(place)["spec"]["nodeName"] != node
    return node


async def test_a_pod_that_trains_on_without_a_kubelet_is_dropped_by_its_job_when_its_place_is_filled(
    tmp_path: Path,
) -> None:
    async with bed(tmp_path, {f"n{number}": 1 for number in range(1, 5)}, real=True) as cluster:
        job = TrainedJob(cluster, tmp_path)
        cluster.store.create("trainingjobs", "team", micro_job(replicaCount=2, maxReplicaCount=3))
        async with cluster.operator():
            await job.until_world(3)
            pod, made = job.at(1), len(job.made)
            name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
            cluster.scheduler.unfit.add(node)
            cluster.kubelet.fall_silent(node)
            cluster.clock.ahead += 30  # as long as its tolerations say
            await cluster.until(lambda: "deletionTimestamp" in job.at(1)["metadata"], "its pod is to end")
            step = job.step(3)
            await cluster.until(lambda: job.step(3) > step, "it trains on all the same")
            cluster.clock.ahead += 20 + 15 + 60  # the pod's grace, and the time that fences it
            await cluster.until(lambda: cluster.kubelet.processes[name].poll() is not None, "it has left")
            await job.until_world(3)
            assert [place for place, _ in job.made[made:]] == [1], "the one that is made is taken in"
            job.let_go()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
            job.assert_undisturbed(3)
            await job.assert_no_orphan()


async def test_a_gangs_ranks_follow_the_racks_of_its_nodes_and_a_replica_that_joins_knows_its_own(
    tmp_path: Path,
) -> None:
    rack = "example.com/rack"
    async with bed(tmp_path, {f"n{number}": 1 for number in range(1, 5)}, real=True) as cluster:
        for name, where in (("n1", "a"), ("n2", "b"), ("n3", "a"), ("n4", "b")):
            labels = {rack: where}
            cluster.store.create("nodes", "", {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {}})
        job = TrainedJob(cluster, tmp_path)
        body = micro_job(replicaCount=3, maxReplicaCount=4, topologyLabels=[rack])
        cluster.store.create("trainingjobs", "team", body)
        async with cluster.operator():
            await job.until_world(4)
            home = tmp_path / f"{job.at(0)['metadata']['name']}.home"
            told = msgspec.json.decode(said(home, "status", "job", "--json"), type=JobView).nodes
            assert [(each.node, each.domain) for each in told] == [
                ("node0", "a"),
                ("node1", "a"),
                ("node2", "b"),
                (job.at(3)["metadata"]["name"], "b"),
            ]
            assert [job.at(place)["metadata"]["annotations"].get(NODE_RANK) for place in range(4)] == [
                "0",
                "2",
                "1",
                None,
            ]
            job.let_go()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
            job.assert_undisturbed(4)
            await job.assert_no_orphan()


def said(home: Path, *words: str) -> bytes:
    """Output of a regrow command in a pod."""
    env = {**os.environ, "REGROW_HOME": str(home)}
    return subprocess.run([sys.executable, "-m", "regrow", *words], env=env, capture_output=True, check=True).stdout


async def test_a_pod_is_deleted_and_the_job_is_scaled_up_where_there_is_room_only_where_it_was(tmp_path: Path) -> None:
    async with bed(tmp_path, {"n1": 1, "n2": 2}, real=True) as cluster:
        job = TrainedJob(cluster, tmp_path)
        cluster.store.create("trainingjobs", "team", micro_job(replicaCount=1, maxReplicaCount=3, replicas=2))
        async with cluster.operator():
            await job.until_world(2)
            cluster.store.delete("pods", "team", job.at(1)["metadata"]["name"])
            cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicas": 3}})
            await cluster.until(lambda: 2 in [place for place, _ in job.made], "another place is filled at once")
            await job.until_world(3)
            assert sorted(str(each["spec"]["nodeName"]) for each in cluster.pods("Running")) == ["n1", "n2", "n2"]
            assert cluster.status()["badNodes"] == []
            assert sorted(place for place, _ in job.made) == [0, 1, 1, 2], "nobody was asked for twice"
            job.let_go()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
            job.assert_undisturbed(3)
            await job.assert_no_orphan()


async def test_the_leading_operator_is_paused_and_another_killed_while_a_replacement_is_due(tmp_path: Path) -> None:
    async with bed(tmp_path, {"n1": 2}, real=True) as cluster, operators(cluster, tmp_path, 2) as candidates:
        job = TrainedJob(cluster, tmp_path)
        cluster.store.create("trainingjobs", "team", micro_job(replicaCount=1, maxReplicaCount=2))
        await job.until_world(2)
        for stop in (signal.SIGSTOP, signal.SIGKILL):
            leader, made = await candidates.leader(), len(job.made)
            leader.send_signal(stop)
            cluster.kubelet.processes[job.at(1)["metadata"]["name"]].kill()
            await job.until_world(1)
            assert len(job.made) == made or candidates.holder() is not leader, "nobody leads"
            await cluster.until(lambda made=made: len(job.made) > made, "the other one makes it good")  # type: ignore[misc]
            assert await candidates.leader() is not leader
            if stop is signal.SIGSTOP:  # it wakes up, still believing that it leads
                leader.send_signal(signal.SIGCONT)
                await cluster.until(lambda leader=leader: leader.poll() is not None, "it ends")  # type: ignore[misc]
                assert leader.returncode == RUN_AGAIN
                candidates.start()  # as its Deployment does
            await job.until_world(2)
        assert [place for place, _ in job.made] == [0, 1, 1, 1], "exactly one for each that was lost"
        job.let_go()
        await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
        kinds = job.assert_undisturbed(2)
        await job.assert_no_orphan()
    assert kinds.count("grow") == 3, kinds


async def test_kueue_takes_a_replicas_quota_for_others_and_gives_it_back(tmp_path: Path) -> None:
    queue = {"queueName": "queue", "priorityClass": "train", "elasticPriorityClass": "rest"}
    async with bed(tmp_path, {"n1": 3}, real=True) as cluster:
        cluster.use_kueue({"queue": 2}, {"train": 10, "rest": 1, "serve": 100})
        job = TrainedJob(cluster, tmp_path)
        cluster.store.create(
            "trainingjobs", "team", micro_job(replicaCount=1, maxReplicaCount=2, backend="kueue", kueue=queue)
        )
        async with cluster.operator():
            await job.until_world(2)
            serve = {"name": "chat", "image": "chat", "command": ["http.server", "0", "--bind=127.0.0.1"]}
            labels = {"kueue.x-k8s.io/queue-name": "queue", "kueue.x-k8s.io/priority-class": "serve"}
            body = {"metadata": {"name": "chat", "labels": labels}, "spec": {"containers": [serve]}}
            cluster.store.create("pods", "team", body)
            await cluster.until(
                lambda: cluster.store.get("pods", "team", "chat")["status"]["phase"] == "Running", "it has the quota"
            )
            await job.until_world(1)
            await cluster.until(lambda: cluster.status().get("pendingReplicas") == 1, "a replica waits")
            assert job.at(1)["spec"]["schedulingGates"], "at Kueue's gate"
            cluster.store.delete("pods", "team", "chat")
            await job.until_world(2)
            assert [place for place, _ in job.made] == [0, 1, 1], "exactly one for the one that was preempted"
            job.let_go()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
            kinds = job.assert_undisturbed(2)
            await job.assert_no_orphan()
    assert kinds == ["grow", "preempt", "grow"]
