"""A gang under Volcano as it is (`fake_volcano.py` has its rules, each with its source)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.bed import bed
from tests.cluster.fake_store import Manifest, Refused
from tests.cluster.fake_volcano import GROUP_NAME, FakeVolcano
from tests.cluster.jobs import training_job
from tests.cluster.turned import TurnedJob

from regrow_clusters.operator.api import ApiFailure, ApiKind


def volcano_job(**spec: Any) -> TurnedJob:
    return TurnedJob(**({"backend": "volcano"} | spec))


def groups(job: TurnedJob) -> dict[str, Manifest]:
    """By the last part of their names: the attempt, and `more`."""
    found = job.store.all_of("podgroups")
    return {each["metadata"]["name"].removeprefix("job-").partition("-")[2]: each for each in found}


def group_of(pod: Manifest) -> str:
    return str(pod["metadata"]["annotations"][GROUP_NAME])


def unserved(verb: str, kind: ApiKind, namespace: str, name: str) -> None:
    """A cluster without Volcano's CRDs: the API server's own answer, which is no Status."""
    if kind in (ApiKind.POD_GROUPS, ApiKind.QUEUES):
        raise ApiFailure(404, "", "the API server answered 404")


def delete(job: TurnedJob, pod: Manifest) -> None:
    job.store.delete("pods", "team", pod["metadata"]["name"])


def end(job: TurnedJob, pod: Manifest) -> None:
    job.kubelets.end(pod, 137)


def give_back(job: TurnedJob, pod: Manifest) -> None:
    job.kubelets.end(pod, 0)


@pytest.mark.parametrize("pods", [1, 2])
def test_a_gang_is_placed_whole_or_not_at_all(pods: int) -> None:
    job = volcano_job(podsPerReplica=pods)
    job.nodes.unfit.update({"n1", "n2", "n3", "n4", "n5"})
    job.until(lambda: len(job.pods("Pending")) == 2 * pods)
    job.turns(20)
    assert all(not pod["spec"].get("nodeName") for pod in job.store.all_of("pods")), "a part of it holds a node"
    assert groups(job)["1"]["status"] == {"phase": "Inqueue"}
    job.nodes.unfit.clear()
    job.until(lambda: job.status().get("replicas") == 2)
    assert groups(job)["1"]["status"] == {"phase": "Running"}
    assert [groups(job)["1"]["spec"][key] for key in ("minMember", "queue")] == [2 * pods, "default"]


@pytest.mark.parametrize("lose", [delete, end, give_back])
@pytest.mark.parametrize("pods", [1, 2])
def test_a_lost_pod_of_the_gang_comes_back_into_its_group_where_the_queue_has_room_for_the_gang_alone(
    lose: Callable[[TurnedJob, Manifest], None], pods: int
) -> None:
    job = volcano_job(podsPerReplica=pods, volcano={"queueName": "team"})
    job.nodes.add_queue("team", capability=2 * pods)
    job.until(lambda: job.status().get("replicas") == 2)
    lost = job.store.get("pods", "team", "job-1-1-2" if pods == 1 else "job-1-0-1-1")
    lose(job, lost)
    job.until(lambda: lost["metadata"]["name"] not in job.pods())
    job.until(lambda: job.status()["replicas"] == 2 and len(job.pods("Running")) == len(job.pods()) == 2 * pods)
    assert job.status()["attempt"] == 1, "nobody else has started anew"
    assert {group_of(pod) for pod in job.store.all_of("pods")} == {groups(job)["1"]["metadata"]["name"]}
    assert job.nodes.allocated("team") == 2 * pods


def test_a_group_that_says_its_resources_would_wait_for_ever_for_a_lost_pods_place() -> None:
    job = volcano_job(volcano={"queueName": "team"})
    job.nodes.add_queue("team", capability=2)
    job.until(lambda: job.trains(1))
    assert "minResources" not in groups(job)["1"]["spec"]
    name = groups(job)["1"]["metadata"]["name"]
    job.store.patch("podgroups", "team", name, {"spec": {"minResources": {"pods": 2}}})
    end(job, job.at(1))
    job.nodes.unfit.update(job.nodes.nodes)
    job.turns(5)
    job.nodes.unfit.clear()
    job.turns(60)
    assert job.status()["replicas"] == 1, "Volcano asks for the gang once more, beside the pod that runs"
    job.store.patch("podgroups", "team", name, {"spec": {"minResources": None}})
    job.until(lambda: job.trains(1))


@pytest.mark.parametrize("lose", [delete, end])
def test_the_loss_of_pod_0_starts_the_gang_anew_in_a_group_of_its_own(
    lose: Callable[[TurnedJob, Manifest], None],
) -> None:
    job = volcano_job()
    job.until(lambda: job.trains(1))
    lose(job, job.at(0))
    job.until(lambda: job.trains(2))
    assert list(groups(job)) == ["2"], "of an attempt that is over nothing is left"


def test_it_grows_and_shrinks_beside_its_gang_pod_by_pod() -> None:
    job = volcano_job(
        maxReplicaCount=4,
        maxPendingReplicas=2,
        scaleUpSnoozeTimeInSeconds=0,
        priorityClassName="training",
        elasticPriorityClassName="elastic",
    )
    job.nodes.unfit.update({"n3", "n4", "n5"})
    job.until(lambda: job.status().get("replicas") == 3)
    job.turns(20)
    assert len(job.pods("Running")) == 3, "the one that has room trains, the other waits"
    assert {key: each["spec"]["minMember"] for key, each in groups(job).items()} == {"1": 2, "1-more": 1}
    assert {key: each["spec"]["priorityClassName"] for key, each in groups(job).items()} == {
        "1": "training",
        "1-more": "elastic",
    }
    members = {key: len(job.nodes.pods_of(each)) for key, each in groups(job).items()}
    assert members == {"1": 2, "1-more": 2}
    job.patch(replicas=2)
    job.until(lambda: job.trains(1))
    job.patch(replicas=3)
    job.until(lambda: job.trains(1, 3))
    lost = job.at(2)
    end(job, lost)
    job.until(lambda: lost["metadata"]["name"] not in job.pods() and job.trains(1, 3))


def test_a_job_that_is_suspended_leaves_no_pod_and_no_group_and_trains_again() -> None:
    job = volcano_job(maxReplicaCount=3, scaleUpSnoozeTimeInSeconds=0)
    job.until(lambda: job.trains(1, 3))
    job.patch(suspend=True)
    job.until(lambda: job.pods() == [] and groups(job) == {})
    assert job.status()["phase"] == "Suspended"
    job.turns(3)
    calls = job.operator.api.calls
    job.turns(60)
    assert job.operator.api.calls == calls, "it is not asked again and again"
    job.patch(suspend=False)
    job.until(lambda: job.trains(2, 3))
    assert set(groups(job)) == {"2", "2-more"}


def test_a_job_that_is_suspended_before_its_gang_ran_has_its_group_again_afterwards() -> None:
    job = volcano_job()
    job.nodes.unfit.update(job.nodes.nodes)
    job.until(lambda: len(job.pods("Pending")) == 2)
    job.patch(suspend=True)
    job.until(lambda: job.pods() == [] and groups(job) == {})
    job.patch(suspend=False)
    job.nodes.unfit.clear()
    job.until(lambda: job.status().get("replicas") == 2)


@pytest.mark.parametrize("room", [6, 1])
def test_a_deleted_job_leaves_nothing_whether_its_gang_was_placed_or_not(room: int) -> None:
    job = volcano_job(maxReplicaCount=3, scaleUpSnoozeTimeInSeconds=0)
    job.nodes.unfit.update(f"n{number}" for number in range(room, 6))
    job.until(lambda: len(job.pods("Running" if room == 6 else "Pending")) >= 2)
    job.store.delete("trainingjobs", "team", "job")
    job.until(lambda: job.pods() == [] and groups(job) == {})
    job.turns(3)
    assert groups(job) == {}


def test_a_group_that_somebody_deletes_is_made_again() -> None:
    job = volcano_job()
    job.until(lambda: job.trains(1))
    job.store.delete("podgroups", "team", groups(job)["1"]["metadata"]["name"])
    lost = job.at(1)
    end(job, lost)
    job.until(lambda: lost["metadata"]["name"] not in job.pods() and job.trains(1))
    assert list(groups(job)) == ["1"]


def test_a_missing_queue_is_named_and_the_gang_runs_when_it_is_there() -> None:
    job = volcano_job(volcano={"queueName": "team"})
    job.until(lambda: job.condition("QueueFound").get("status") == "False")
    told = job.condition("QueueFound")
    assert told["reason"] == "NoSuchQueue" and "spec.volcano.queueName is 'team'" in told["message"]
    assert 'queue.scheduling.volcano.sh "team" not found' in job.condition("PodsCreated")["message"]
    assert job.pods() == [] and groups(job) == {}
    job.nodes.add_queue("team")
    job.until(lambda: job.trains(1))
    assert job.condition("PodsCreated")["status"] == "True"


def test_a_missing_queue_is_named_also_where_no_webhook_refuses_the_group() -> None:
    job = volcano_job(volcano={"queueName": "team"})
    job.store.refuse = lambda verb, plural, body: None
    job.until(lambda: len(job.pods("Pending")) == 2)
    job.until(lambda: job.condition("QueueFound").get("reason") == "NoSuchQueue")
    job.nodes.add_queue("team")
    job.until(lambda: job.trains(1))
    assert job.condition("QueueFound")["status"] == "True"


def test_a_closed_queue_is_named() -> None:
    job = volcano_job(volcano={"queueName": "team"})
    job.nodes.add_queue("team", state="Closed")
    job.until(lambda: job.condition("QueueFound").get("reason") == "QueueClosed")
    assert "spec.volcano.queueName is 'team', which is Closed" in job.condition("QueueFound")["message"]
    job.nodes.add_queue("team")
    job.until(lambda: job.trains(1))


def test_a_queue_that_is_closed_while_it_trains_changes_nothing_until_a_pod_is_lost() -> None:
    """The webhook is asked before the API server looks for the name: a group that is there is refused, no conflict."""
    job = volcano_job(volcano={"queueName": "team"})
    job.nodes.add_queue("team")
    job.until(lambda: job.trains(1))
    job.nodes.add_queue("team", state="Closed")
    calls = job.operator.api.calls
    job.turns(330)
    assert job.condition("PodsCreated")["status"] == "True" and job.trains(1)
    assert job.operator.api.calls - calls <= 6 * 330 / 60
    lost = job.at(1)
    end(job, lost)
    job.turns(20)
    assert job.status()["replicas"] == 1 and len(job.pods("Pending")) == 1, "it waits for the queue"
    job.nodes.add_queue("team")
    job.until(lambda: lost["metadata"]["name"] not in job.pods() and job.trains(1))


def test_who_may_not_end_a_group_starts_the_gang_anew_all_the_same() -> None:
    job = volcano_job()
    job.until(lambda: job.trains(1))

    def forbidden(verb: str, kind: ApiKind, namespace: str, name: str) -> None:
        if (verb, kind) == ("delete", ApiKind.POD_GROUPS):
            raise ApiFailure(403, "Forbidden", "podgroups is forbidden")

    job.operator.api.before = forbidden
    end(job, job.at(0))
    job.until(lambda: job.trains(2))


def test_a_cluster_without_volcano_is_named_and_another_backend_helps() -> None:
    job = volcano_job()
    job.operator.api.before = unserved
    job.until(lambda: job.condition("QueueFound").get("status") == "False")
    told = job.condition("QueueFound")
    assert told["reason"] == "NoVolcano" and "install Volcano, or set another backend" in told["message"]
    assert job.pods() == [], "nobody would ever place them"
    job.patch(backend="none")
    job.until(lambda: job.status().get("replicas") == 2)


def test_volcano_is_installed_later_and_the_gang_runs() -> None:
    job = volcano_job()
    job.operator.api.before = unserved
    job.until(lambda: job.condition("QueueFound").get("status") == "False")
    job.operator.api.before = lambda verb, kind, namespace, name: None
    job.until(lambda: job.trains(1))
    assert job.condition("QueueFound")["status"] == "True"


def test_where_volcano_has_another_name_the_template_says_it() -> None:
    spec = {"schedulerName": "volcano-gpu", "containers": [{"name": "train", "image": "team/train:1"}]}
    job = volcano_job(template={"spec": spec})
    job.until(lambda: len(job.pods("Pending")) == 2)
    assert {pod["spec"]["schedulerName"] for pod in job.store.all_of("pods")} == {"volcano-gpu"}


def test_a_pod_without_a_group_gets_one_that_holds_quota_as_it_is_for_nobody() -> None:
    """Rule of Volcano's for which pods beyond the gang have a group of ours (pkg/controllers/podgroup)."""
    job = TurnedJob()
    job.nodes.add_queue("default", capability=1)
    body = {
        "metadata": {"name": "chat"},
        "spec": {"schedulerName": "volcano", "containers": [{"name": "c", "image": "c"}]},
    }
    job.store.create("pods", "team", body)
    job.turns(3)
    (group,) = [each for each in job.store.all_of("podgroups") if each["spec"].get("minResources")]
    assert group["metadata"]["name"].startswith("podgroup-") and group["spec"]["minMember"] == 1


@pytest.mark.parametrize("state", ["", "Closed"])
def test_the_webhook_refuses_a_group_of_a_queue_that_is_not_open(state: str) -> None:
    """Rule of pkg/webhooks/admission/podgroups/validate."""
    job = TurnedJob()
    if state:
        job.nodes.add_queue("team", state=state)
    with pytest.raises(Refused) as refused:
        job.store.create("podgroups", "team", {"metadata": {"name": "g"}, "spec": {"queue": "team", "minMember": 1}})
    assert refused.value.code == 400


async def test_over_http_a_cluster_without_volcano_is_named_and_a_gang_runs_and_ends_when_it_has_one(
    tmp_path: Path,
) -> None:
    api = "/apis/scheduling.volcano.sh/v1beta1"
    async with bed(tmp_path, {"n0": 2}) as cluster:
        volcano = FakeVolcano(cluster.store, cluster.scheduler.nodes)
        cluster.scheduler, cluster.store.refuse = volcano, volcano.admit
        cluster.fake.unserved |= {"podgroups", "queues"}
        cluster.store.create("trainingjobs", "team", training_job(backend="volcano", replicaCount=2))
        async with cluster.operator():
            await cluster.until(lambda: cluster.condition("QueueFound").get("reason") == "NoVolcano", "it is named")
            cluster.fake.unserved.clear()
            await cluster.until(lambda: cluster.status().get("phase") == "Training", "the gang runs")
            (group,) = cluster.store.all_of("podgroups")
            assert ("GET", f"{api}/queues/default") in cluster.fake.requests
            assert ("POST", f"{api}/namespaces/team/podgroups") in cluster.fake.requests
            cluster.store.patch("trainingjobs", "team", "job", {"spec": {"suspend": True}})
            await cluster.until(lambda: not cluster.store.all_of("podgroups"), "a suspended job leaves no group")
            ended = ("DELETE", f"{api}/namespaces/team/podgroups/{group['metadata']['name']}")
            assert ended in cluster.fake.requests
