"""A gang under Kueue as it is: its finalizers, groups, roles and quota. Each case stopped a job for ever before."""

from collections.abc import Callable

import pytest
from tests.cluster.fake_kueue import FINALIZER
from tests.cluster.fake_store import Manifest
from tests.cluster.turned import TurnedJob

from regrow_clusters.operator.backends import GROUP_LABEL


def delete(job: TurnedJob, pod: Manifest) -> None:
    job.store.delete("pods", "team", pod["metadata"]["name"])


def end(job: TurnedJob, pod: Manifest) -> None:
    job.kubelets.end(pod, 137)


def give_back(job: TurnedJob, pod: Manifest) -> None:
    job.kubelets.end(pod, 75)


def succeed(job: TurnedJob, pod: Manifest) -> None:
    """As an older regrow in the image ends when it is given back."""
    job.kubelets.end(pod, 0)


@pytest.mark.parametrize("lose", [delete, end, give_back])
@pytest.mark.parametrize("pods", [1, 2])
def test_a_lost_pod_of_the_gang_is_made_good_in_its_group_where_the_quota_is_the_gang(
    lose: Callable[[TurnedJob, Manifest], None], pods: int
) -> None:
    job = TurnedJob(2 * pods, podsPerReplica=pods)
    job.until(lambda: job.status().get("replicas") == 2)
    group = job.at(1)["metadata"]["labels"][GROUP_LABEL] if pods == 1 else ""
    lost = job.store.get("pods", "team", "job-1-1-2" if pods == 1 else "job-1-0-1-1")
    lose(job, lost)
    for _ in range(3):
        job.turn()
    job.until(lambda: job.status()["replicas"] == 2 and len(job.pods("Running")) == len(job.pods()) == 2 * pods)
    assert lost["metadata"]["name"] not in job.pods()
    assert job.status()["attempt"] == 1, "nobody else has started anew"
    assert job.kueue.used("queue") == 2 * pods
    assert pods > 1 or job.at(1)["metadata"]["labels"][GROUP_LABEL] == group


def test_who_ends_with_0_keeps_its_place_in_the_group_and_is_replaced_beside_it() -> None:
    job = TurnedJob(2)
    job.until(lambda: job.trains(1))
    succeed(job, job.at(1))
    job.until(lambda: "Running" in job.at(1)["status"]["phase"] and job.status()["replicas"] == 2)
    assert job.kueue.used("queue") == 2
    job.store.delete("trainingjobs", "team", "job")
    job.until(lambda: job.pods() == [])


@pytest.mark.parametrize("lose", [delete, end])
def test_the_loss_of_pod_0_starts_the_gang_anew_in_a_group_of_its_own(
    lose: Callable[[TurnedJob, Manifest], None],
) -> None:
    job = TurnedJob(2)
    job.until(lambda: job.trains(1))
    before = job.at(0)
    lose(job, before)
    job.until(lambda: job.trains(2))
    assert job.at(0)["metadata"]["labels"][GROUP_LABEL] != before["metadata"]["labels"][GROUP_LABEL]


def test_a_job_that_is_suspended_gives_all_back_and_trains_again() -> None:
    job = TurnedJob(2)
    job.until(lambda: job.trains(1))
    job.patch(suspend=True)
    job.until(lambda: job.pods() == [] and job.kueue.used("queue") == 0)
    assert job.status()["phase"] == "Suspended"
    job.patch(suspend=False)
    job.until(lambda: job.trains(2))


def test_a_gang_that_is_preempted_comes_again_when_there_is_quota() -> None:
    job = TurnedJob(2)
    job.until(lambda: job.trains(1))
    labels = {"kueue.x-k8s.io/queue-name": "queue", "kueue.x-k8s.io/priority-class": "urgent"}
    body = {"metadata": {"name": "chat", "labels": labels}, "spec": {"containers": [{"name": "c", "image": "c"}]}}
    job.store.create("pods", "team", body)
    job.until(lambda: "chat" in job.pods("Running"))
    job.until(lambda: job.status()["attempt"] == 2 and len(job.pods("Pending")) == 2)
    job.store.delete("pods", "team", "chat")
    job.until(lambda: job.trains(2))


@pytest.mark.parametrize("quota", [2, 1])
def test_a_deleted_job_leaves_no_pod_whether_it_was_let_in_or_not(quota: int) -> None:
    job = TurnedJob(quota, maxReplicaCount=3, scaleUpSnoozeTimeInSeconds=0)
    job.until(lambda: len(job.pods("Running" if quota == 2 else "Pending")) >= 2)
    assert all(FINALIZER in pod["metadata"]["finalizers"] for pod in job.store.all_of("pods"))
    job.store.delete("trainingjobs", "team", "job")
    job.until(lambda: job.pods() == [])
    job.turn()
    assert job.kueue.workloads == {}


def test_pods_of_a_gang_that_waits_are_deleted_all_at_once_and_it_waits_again_in_another_group() -> None:
    job = TurnedJob(1)
    job.until(lambda: len(job.pods("Pending")) == 2)
    for name in job.pods():
        job.store.delete("pods", "team", name)
    job.until(lambda: len(job.pods("Pending")) == 2)
    job.kueue.quota["queue"] = 2
    job.until(lambda: job.status().get("replicas") == 2)


def test_a_job_made_again_under_the_same_name_does_not_wait_for_the_pods_before_it() -> None:
    job = TurnedJob(4)
    job.until(lambda: job.trains(1))
    spec = job.store.get("trainingjobs", "team", "job")
    job.kubelets.cut.update({"n0": job.now, "n1": job.now})  # their nodes hold them
    job.store.delete("trainingjobs", "team", "job")
    job.store.create("trainingjobs", "team", spec)
    job.nodes.unfit.update({"n0", "n1"})
    job.until(lambda: job.status().get("replicas") == 2)


def test_a_node_that_nobody_reaches_holds_no_place_in_the_group_after_its_fence() -> None:
    job = TurnedJob(2, fenceTimeoutInSeconds=30)
    job.until(lambda: job.trains(1))
    lost = job.at(1)
    job.kubelets.cut[lost["spec"]["nodeName"]] = job.now
    job.nodes.unfit.add(lost["spec"]["nodeName"])
    job.until(lambda: lost["metadata"]["name"] not in job.pods() and job.trains(1), within=200)
