"""A gang under Kubernetes' own scheduler (`fake_gang.py` has its rules, each with its source)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.bed import bed
from tests.cluster.fake_gang import GANGS
from tests.cluster.fake_store import Manifest
from tests.cluster.jobs import training_job
from tests.cluster.turned import TurnedJob

from regrow_clusters.operator.api import ApiFailure, ApiKind


def gang_job(**spec: Any) -> TurnedJob:
    return TurnedJob(**({"backend": "gang"} | spec))


def attempts(job: TurnedJob) -> list[str]:
    """Of the PodGroups that there are."""
    return [each["metadata"]["name"].rsplit("-", 1)[1] for each in job.store.all_of(GANGS)]


def delete(job: TurnedJob, pod: Manifest) -> None:
    job.store.delete("pods", "team", pod["metadata"]["name"])


def end(job: TurnedJob, pod: Manifest) -> None:
    job.kubelets.end(pod, 137)


def give_back(job: TurnedJob, pod: Manifest) -> None:
    job.kubelets.end(pod, 0)


def older_server(verb: str, kind: ApiKind, namespace: str, name: str) -> None:
    """Kubernetes before 1.37, or without the feature gate: its own answer, which is no Status."""
    if kind is ApiKind.GANGS:
        raise ApiFailure(404, "", "the API server answered 404")


@pytest.mark.parametrize("pods", [1, 2])
def test_a_gang_is_placed_whole_or_not_at_all(pods: int) -> None:
    job = gang_job(podsPerReplica=pods)
    job.nodes.unfit.update({"n1", "n2", "n3", "n4", "n5"})
    job.until(lambda: len(job.pods("Pending")) == 2 * pods)
    job.turns(20)
    assert all(not pod["spec"].get("nodeName") for pod in job.store.all_of("pods")), "a part of it holds a node"
    job.nodes.unfit.clear()
    job.until(lambda: job.status().get("replicas") == 2)
    (group,) = job.store.all_of(GANGS)
    assert group["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2 * pods}}}


@pytest.mark.parametrize("lose", [delete, end, give_back])
@pytest.mark.parametrize("pods", [1, 2])
def test_a_lost_pod_of_the_gang_comes_back_into_its_group(
    lose: Callable[[TurnedJob, Manifest], None], pods: int
) -> None:
    job = gang_job(podsPerReplica=pods)
    job.until(lambda: job.status().get("replicas") == 2)
    lost = job.store.get("pods", "team", "job-1-1-2" if pods == 1 else "job-1-0-1-1")
    lose(job, lost)
    job.until(lambda: lost["metadata"]["name"] not in job.pods())
    job.until(lambda: job.status()["replicas"] == 2 and len(job.pods("Running")) == len(job.pods()) == 2 * pods)
    assert job.status()["attempt"] == 1, "nobody else has started anew"
    (group,) = job.store.all_of(GANGS)
    assert len(job.nodes.members(group)) == 2 * pods


@pytest.mark.parametrize("lose", [delete, end])
def test_the_loss_of_pod_0_starts_the_gang_anew_in_a_group_of_its_own(
    lose: Callable[[TurnedJob, Manifest], None],
) -> None:
    job = gang_job()
    job.until(lambda: job.trains(1))
    lose(job, job.at(0))
    job.until(lambda: job.trains(2))
    assert attempts(job) == ["2"], "of an attempt that is over nothing is left"


def test_it_grows_and_shrinks_by_pods_that_are_in_no_group() -> None:
    job = gang_job(maxReplicaCount=4, scaleUpSnoozeTimeInSeconds=0, elasticPriorityClassName="elastic")
    job.until(lambda: job.trains(1, 4))
    (group,) = job.store.all_of(GANGS)
    assert {pod["metadata"]["name"] for pod in job.nodes.members(group)} == {"job-1-0-1", "job-1-1-2"}
    job.patch(replicas=2)
    job.until(lambda: job.trains(1))
    job.patch(replicas=3)
    job.until(lambda: job.trains(1, 3))


def test_a_job_that_is_suspended_leaves_no_pod_and_no_group_and_trains_again() -> None:
    job = gang_job()
    job.until(lambda: job.trains(1))
    job.patch(suspend=True)
    job.until(lambda: job.pods() == [] and attempts(job) == [])
    job.patch(suspend=False)
    job.until(lambda: job.trains(2))
    assert attempts(job) == ["2"]


@pytest.mark.parametrize("room", [6, 1])
def test_a_deleted_job_leaves_nothing_whether_its_gang_was_placed_or_not(room: int) -> None:
    job = gang_job()
    job.nodes.unfit.update(f"n{number}" for number in range(room, 6))
    job.until(lambda: len(job.pods("Running" if room == 6 else "Pending")) >= 2)
    job.store.delete("trainingjobs", "team", "job")
    job.until(lambda: job.pods() == [] and attempts(job) == [])


def test_a_priority_class_that_is_not_there_is_named_and_the_groups_priority_is_its_pods() -> None:
    job = gang_job(priorityClassName="training")
    job.until(lambda: job.condition("PodsCreated").get("status") == "False")
    assert "no PriorityClass with name training was found; make that" in job.condition("PodsCreated")["message"]
    job.store.objects["priorityclasses", "", "training"] = {"metadata": {"name": "training", "uid": "c"}, "value": 10}
    job.until(lambda: job.trains(1))
    (group,) = job.store.all_of(GANGS)
    assert group["spec"]["priorityClassName"] == job.at(0)["spec"]["priorityClassName"] == "training"


def test_a_server_without_gangs_is_named_no_pod_is_made_there_and_another_backend_helps() -> None:
    job = gang_job()
    job.operator.api.before = older_server
    job.until(lambda: job.condition("PodsCreated").get("status") == "False")
    told = job.condition("PodsCreated")["message"]
    assert "the cluster has no such API: " in told and "turn GenericWorkload on" in told
    assert job.pods() == [], "they would be placed one by one: the server drops their schedulingGroup"
    job.patch(backend="none")
    job.until(lambda: job.status().get("replicas") == 2)
    assert job.condition("PodsCreated")["status"] == "True"


async def test_over_http_a_server_without_gangs_is_named_and_the_path_is_kubernetes_own(tmp_path: Path) -> None:
    async with bed(tmp_path, {"n0": 2}) as cluster:
        cluster.fake.unserved.add("podgroups")
        cluster.store.create("trainingjobs", "team", training_job(backend="gang", replicaCount=2))
        async with cluster.operator():
            await cluster.until(lambda: cluster.condition("PodsCreated").get("status") == "False", "it is named")
            assert "turn GenericWorkload on" in cluster.condition("PodsCreated")["message"]
            cluster.fake.unserved.clear()
            await cluster.until(cluster.pods, "pods are made")
        (group,) = cluster.store.all_of("podgroups")
        assert group["apiVersion"] == "scheduling.k8s.io/v1beta1"
        asked = ("POST", "/apis/scheduling.k8s.io/v1beta1/namespaces/team/podgroups")
        assert asked in cluster.fake.requests
