"""Bad nodes under the operator: where pods go, what is told of them, and how they are marked."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from tests.cluster.bed import Bed, bed
from tests.cluster.fake_store import Refused
from tests.cluster.jobs import training_job

from regrow_clusters.operator.objects import AVOIDS

SIZES: dict[str, Any] = {"replicaCount": 1, "maxReplicaCount": 2, "scaleUpSnoozeTimeInSeconds": 0}
HYPERPOD = "sagemaker.amazonaws.com/node-health-status"


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Bed]:
    async with bed(tmp_path, {"n1": 1, "n2": 1, "n3": 1}) as made:
        for name in made.scheduler.nodes:
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            made.store.create("nodes", "", {"metadata": {"name": name}, "spec": {}, "status": ready})
        yield made


def taints(cluster: Bed, name: str) -> list[str]:
    return [each["key"] for each in cluster.store.get("nodes", "", name)["spec"].get("taints", [])]


def events(cluster: Bed, reason: str) -> list[str]:
    found = [each for each in cluster.store.all_of("events") if each["reason"] == reason]
    assert all(each["involvedObject"]["uid"] == cluster.job()["metadata"]["uid"] for each in found)
    return [each["message"] for each in found]


async def test_a_replacement_goes_elsewhere_when_the_cluster_knows_something_against_a_node(cluster: Bed) -> None:
    cluster.store.patch("nodes", "", "n1", {"metadata": {"labels": {HYPERPOD: "UnschedulablePendingReboot"}}})
    cluster.store.create("trainingjobs", "team", training_job(**SIZES))
    async with cluster.operator() as operator:
        await cluster.until(lambda: len(cluster.pods("Running")) == 2, "both replicas run")
        await cluster.until(lambda: operator._nodes and operator._nodes.verdicts, "the nodes were looked at")
        for pod in cluster.pods():
            if pod["metadata"]["labels"]["regrow.dev/place"] == "1":
                cluster.store.delete("pods", "team", pod["metadata"]["name"], grace=0)
        await cluster.until(lambda: len(cluster.pods("Running")) == 2, "another one runs")
        newest = max(cluster.pods(), key=lambda each: int(each["metadata"]["name"].rsplit("-", 1)[-1]))
        affinity = newest["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        terms = affinity["nodeSelectorTerms"][0]["matchFields"]
        assert {"key": "metadata.name", "operator": "NotIn", "values": ["n1"]} in terms
        assert newest["spec"]["nodeName"] != "n1"


async def test_a_replica_that_waits_is_asked_for_again_when_the_only_free_node_is_well(cluster: Bed) -> None:
    cluster.scheduler.nodes = {"n1": 1, "n2": 1}
    cluster.store.patch("nodes", "", "n2", {"spec": {"unschedulable": True}})
    cluster.store.create("trainingjobs", "team", training_job(**SIZES, replicas=1))
    async with cluster.operator() as operator:
        await cluster.until(lambda: operator._nodes and operator._nodes.verdicts, "the nodes were looked at")
        await cluster.until(lambda: cluster.status().get("phase") == "Training", "the gang trains")
        cluster.store.patch("trainingjobs", "team", "job", {"spec": {"replicas": 2}})
        await cluster.until(lambda: len(cluster.pods("Pending")) == 1, "a replica waits")
        (waits,) = cluster.pods("Pending")
        assert waits["metadata"]["annotations"][AVOIDS] == "n2"
    async with cluster.operator() as another:  # which has not seen any node yet
        await cluster.until(lambda: another._nodes and another._nodes.verdicts, "the nodes were looked at again")
        assert cluster.pods("Pending")[0]["metadata"]["name"] == waits["metadata"]["name"]
        cluster.store.patch("nodes", "", "n2", {"spec": {"unschedulable": None}})
        await cluster.until(lambda: len(cluster.pods("Running")) == 2, "it has the node")
        assert cluster.status()["serial"] == 3, "it was asked for again, once"


async def test_a_bad_node_under_a_replica_is_told_as_condition_and_event_without_rights_on_nodes(cluster: Bed) -> None:
    cluster.store.create("trainingjobs", "team", training_job(**SIZES))
    async with cluster.operator():
        await cluster.until(lambda: len(cluster.pods("Running")) == 2, "both replicas run")
        where = cluster.store.get("pods", "team", "job-1-0-1")["spec"]["nodeName"]
        cluster.store.patch("nodes", "", where, {"spec": {"unschedulable": True}})
        await cluster.until(lambda: cluster.condition("NodesHealthy").get("status") == "False", "it is said")
        await cluster.until(lambda: events(cluster, "NodesUnhealthy"), "and told")
        assert events(cluster, "NodesUnhealthy") == [f"{where}: leave: cordon unschedulable: true"]
        assert len(cluster.pods("Running")) == 2  # nobody who trains is ended for it
        cluster.store.patch("nodes", "", where, {"spec": {"unschedulable": None}})
        await cluster.until(lambda: cluster.condition("NodesHealthy").get("status") == "True", "it is over")


async def test_a_replica_on_a_bad_node_moves_and_the_one_with_the_coordinator_stays(cluster: Bed) -> None:
    cluster.store.create("trainingjobs", "team", training_job(**SIZES))
    async with cluster.operator():
        await cluster.until(lambda: cluster.status().get("replicas") == 2, "both replicas run")
        where = {each["metadata"]["labels"]["regrow.dev/place"]: each for each in cluster.pods("Running")}
        for pod in where.values():
            label = {HYPERPOD: "UnschedulablePendingReboot"}
            cluster.store.patch("nodes", "", pod["spec"]["nodeName"], {"metadata": {"labels": label}})
        (free,) = set(cluster.scheduler.nodes) - {pod["spec"]["nodeName"] for pod in where.values()}
        await cluster.until(
            lambda: [each for each in cluster.pods("Running") if each["spec"]["nodeName"] == free], "it has moved"
        )
        await cluster.until(lambda: cluster.status().get("replicas") == 2, "both replicas run")
        now = {each["metadata"]["name"]: each["metadata"]["uid"] for each in cluster.pods("Running")}
        assert now["job-1-0-1"] == where["0"]["metadata"]["uid"]
        assert where["1"]["metadata"]["name"] not in now


async def test_who_may_not_list_nodes_or_make_events_runs_jobs_all_the_same(cluster: Bed) -> None:
    cluster.store.refuse = lambda verb, plural, body: (
        Refused(403, "Forbidden", "no rights") if plural in ("events", "nodes") else None
    )
    cluster.store.create("trainingjobs", "team", training_job(**SIZES))
    async with cluster.operator(marks=True):
        await cluster.until(lambda: cluster.status().get("replicas") == 2, "both replicas run")
        quarantine(cluster, "n3", 3600.0)
        for pod in cluster.pods():
            cluster.store.delete("pods", "team", pod["metadata"]["name"], grace=0)
        await cluster.until(lambda: cluster.status().get("attempt") == 2, "it goes on")
        await cluster.until(lambda: len(cluster.pods("Running")) == 2, "both replicas run again")
        assert not taints(cluster, "n3")


def quarantine(cluster: Bed, name: str, seconds: float) -> None:
    """As the operator writes it when pod 0 says so."""
    job = cluster.job()
    found = {
        "name": name,
        "untilTime": cluster.store.stamp(time.time() + seconds),
        "reason": "gpu0: xid 79",
        "quarantined": True,
    }
    kept = [*job["status"].get("badNodes", []), found]
    cluster.store.patch("trainingjobs", "team", "job", {"status": {"badNodes": kept}}, part="status")


async def test_a_quarantined_node_is_marked_where_that_is_allowed_one_of_three_and_freed_in_its_time(
    cluster: Bed,
) -> None:
    cluster.store.create("trainingjobs", "team", training_job(**SIZES))
    async with cluster.operator():
        await cluster.until(lambda: cluster.status().get("replicas") == 2, "both replicas run")
        quarantine(cluster, "n3", 3.0)
        quarantine(cluster, "n2", 3600.0)
        before = len(cluster.fake.requests)
        looked = ("GET", "/api/v1/nodes")
        await cluster.until(lambda: cluster.fake.requests[before:].count(looked) >= 3, "the nodes were looked at")
        assert not taints(cluster, "n2") and not taints(cluster, "n3")  # it may not
    async with cluster.operator(marks=True):
        await cluster.until(lambda: taints(cluster, "n2") or taints(cluster, "n3"), "one is marked")
        first = "n2" if taints(cluster, "n2") else "n3"
        await cluster.until(
            lambda: "gpu0: xid 79" in str(cluster.store.get("nodes", "", first)["status"]["conditions"]), "with why"
        )
        assert not (taints(cluster, "n2") and taints(cluster, "n3"))  # a tenth of three is one
        cluster.store.patch("nodes", "", first, {"metadata": {"annotations": {"regrow.dev/unhealthy-until": "1"}}})
        cluster.store.patch("trainingjobs", "team", "job", {"status": {"badNodes": []}}, part="status")
        await cluster.until(lambda: not taints(cluster, "n2") and not taints(cluster, "n3"), "it is freed")


async def test_a_node_that_looks_like_none_keeps_nobody_from_looking_after_jobs(cluster: Bed) -> None:
    cluster.store.create("nodes", "", {"metadata": {"name": "odd"}, "spec": {}, "status": {"conditions": ["odd"]}})
    cluster.store.create("trainingjobs", "team", training_job(**SIZES))
    async with cluster.operator():
        looked = ("GET", "/api/v1/nodes")
        await cluster.until(lambda: cluster.fake.requests.count(looked) >= 2, "the nodes were looked at, and again")
        await cluster.until(lambda: cluster.status().get("replicas") == 2, "both replicas run")
