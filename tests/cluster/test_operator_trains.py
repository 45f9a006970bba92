"""A real training under the operator: real processes, pods deleted, sizes changed, the operator away."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
from tests.cluster.bed import Bed, bed
from tests.cluster.jobs import training_job
from tests.ports import held_port
from tests.process.test_elastic_launch import PACED

from regrow.membership.view import JobView
from regrow.observe.ledger import Ledger, read_records

# Two minutes and more until the test lets it go, as others may use the machine while its pods start; and every step is
# told, as a pod may also start fast.
SLOW = PACED.replace("0.02 if step.number < 500 else 0.3", "0.2").replace(" and step.number % 5 == 0", "")


def _world(cluster: Bed) -> int:
    """Of the last step that pod 0 has told."""
    told = re.findall(r"at \d+ of (\d+)$", cluster.kubelet.output("job-1-0-1"), re.MULTILINE)
    return int(told[-1]) if told else 0


async def test_a_training_grows_loses_a_pod_shrinks_and_ends_without_losing_a_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    job = training_job(
        replicaCount=1,
        maxReplicaCount=3,
        replicas=2,
        scaleUpSnoozeTimeInSeconds=0,
        gracefulShutdownTimeoutInSeconds=20,
        port=held_port(),
    )
    async with bed(tmp_path, {"n1": 4}, real=True) as cluster:
        cluster.store.create("trainingjobs", "team", job)
        async with cluster.operator():
            await cluster.until(lambda: _world(cluster) == 2, "two replicas train")
            cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicas": 3}})
            await cluster.until(lambda: _world(cluster) == 3, "three replicas train")
            lost = next(
                each for each in cluster.pods("Running") if each["metadata"]["labels"]["regrow.dev/place"] == "2"
            )
            cluster.store.delete("pods", "team", lost["metadata"]["name"])
            await cluster.until(lambda: _world(cluster) == 2, "the others go on without it")
            await cluster.until(lambda: _world(cluster) == 3, "and with another in its place")
            again = int(re.findall(r"at (\d+) of 3$", cluster.kubelet.output("job-1-0-1"), re.MULTILINE)[-1])
            await cluster.until(lambda: cluster.status().get("step", 0) >= again, "the operator was told of it")
            figures = cluster.status()
            assert figures["incidents"] == 0, "a pod that leaves in its grace is no fault"
            assert 0 < figures["goodput"] <= 1, figures
        # No operator: training goes on.
        before = cluster.kubelet.output("job-1-0-1")
        await cluster.until(lambda: len(cluster.kubelet.output("job-1-0-1")) > len(before) + 40, "steps go on")
        async with cluster.operator():
            cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicas": 1}})
            await cluster.until(lambda: _world(cluster) == 1, "one replica trains")
            (tmp_path / "hurry").touch()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
        told = cluster.kubelet.output("job-1-0-1")
        assert "trained by 1" in told
        steps = [int(line.split()[-3]) for line in told.splitlines() if line.split()[-2:-1] == ["of"]]
        assert steps == sorted(set(steps)) and steps[-1] >= 690, told


def _domains(home: Path) -> list[str]:
    """Failure domain of each node of the job, as `regrow status` shows it there."""
    words = [sys.executable, "-m", "regrow", "status", "job", "--json"]
    said = subprocess.run(words, env={**os.environ, "REGROW_HOME": str(home)}, capture_output=True, check=True).stdout
    return [each.domain for each in msgspec.json.decode(said, type=JobView).nodes]


async def test_the_loss_of_pod_0_starts_the_gang_anew_from_a_checkpoint_and_nothing_of_the_old_one_stays(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    keep = tmp_path / "checkpoints"
    job = training_job(
        replicaCount=2,
        gracefulShutdownTimeoutInSeconds=20,
        port=held_port(),
        domainLabel="topology.kubernetes.io/zone",
        checkpointDir=str(keep),
        runFlags=["--checkpoint-every=1s"],
    )
    async with bed(tmp_path, {"n1": 1, "n2": 1, "n3": 2}, real=True) as cluster:
        for name, zone in (("n1", "north"), ("n2", "south")):
            labels = {"topology.kubernetes.io/zone": zone}
            cluster.store.create("nodes", "", {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {}})
        cluster.store.create("trainingjobs", "team", job)
        async with cluster.operator():
            await cluster.until(lambda: _world(cluster) == 2, "two replicas train")
            assert _domains(tmp_path / "job-1-0-1.home") == ["north", "south"]
            await cluster.until(lambda: "state@" in cluster.kubelet.output("job-1-0-1"), "there is a checkpoint")
            first = {each["metadata"]["name"] for each in cluster.pods()}
            cluster.kubelet.processes["job-1-0-1"].kill()
            await cluster.until(lambda: cluster.status().get("attempt") == 2, "it starts anew")
            await cluster.until(lambda: len(cluster.pods("Running")) == 2, "the gang runs again")
            again = {each["metadata"]["name"] for each in cluster.pods()}
            assert not first & again, "nobody of the old gang is left"
            (leader,) = (name for name in again if name.startswith("job-2-0-"))
            await cluster.until(lambda: " of 2\n" in cluster.kubelet.output(leader), "it trains again")
            (tmp_path / "hurry").touch()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
        steps = [int(each) for each in re.findall(r"^.*at (\d+) of 2$", cluster.kubelet.output(leader), re.MULTILINE)]
        assert steps[0] > 0, cluster.kubelet.output(leader)


async def test_work_of_higher_priority_takes_a_replicas_place_and_gives_it_back_and_no_step_is_lost(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    job = training_job(
        replicaCount=1,
        maxReplicaCount=2,
        scaleUpSnoozeTimeInSeconds=0,
        gracefulShutdownTimeoutInSeconds=60,
        port=held_port(),
        priorityClassName="gang",
        elasticPriorityClassName="elastic",
    )
    async with bed(tmp_path, {"n1": 2}, real=True) as cluster:
        for name, value in (("gang", 1000), ("elastic", -100), ("inference", 100)):
            cluster.store.objects[("priorityclasses", "", name)] = {
                "metadata": {"name": name, "uid": name},
                "value": value,
            }
        cluster.store.create("trainingjobs", "team", job)
        async with cluster.operator():
            await cluster.until(lambda: _world(cluster) == 2, "two replicas train")
            serve = {"name": "chat", "image": "chat", "command": ["http.server", "0", "--bind=127.0.0.1"]}
            spec = {"priorityClassName": "inference", "containers": [serve]}
            cluster.store.create("pods", "team", {"metadata": {"name": "chat", "labels": {}}, "spec": spec})
            await cluster.until(lambda: _phase(cluster, "chat") == "Running", "it has the place")
            await cluster.until(lambda: _world(cluster) == 1, "the gang trains on")
            await cluster.until(lambda: cluster.status().get("pendingReplicas") == 1, "a replica waits")
            cluster.store.delete("pods", "team", "chat")
            await cluster.until(lambda: _world(cluster) == 2, "two replicas train again")
            (tmp_path / "hurry").touch()
            await cluster.until(lambda: cluster.status().get("phase") == "Succeeded", "the job is done")
    told = Ledger(read_records(tmp_path / "job-1-0-1.home" / "jobs" / "job"))
    assert [each.kind for each in told.incidents] == ["grow", "preempt", "grow"]
    assert [each.steps_lost for each in told.incidents] == [0, 0, 0]
    assert sorted(told.commits) == list(range(700))


def _phase(cluster: Bed, name: str) -> str:
    return str(cluster.store.get("pods", "team", name)["status"]["phase"])
