"""An operator at a real control plane: objects that stay, several containers, edits, what others delete, refusals."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.fake_store import Manifest, Refused
from tests.cluster.turned import TurnedJob

from regrow_clusters.operator.api import ApiFailure
from regrow_clusters.operator.making.refusals import cure_of
from regrow_clusters.operator.objects import PLACE_LABEL
from regrow_clusters.operator.resource import read_status

AT_REST = 6
"""Calls of the API server a minute for a job at which nothing happens."""


def assert_at_rest(job: TurnedJob, minutes: int = 10) -> None:
    """Few calls, each look included: a look every second is more than any operator has."""
    job.turns(40)
    version, before = job.store.version, job.operator.api.calls
    job.turns(60 * minutes)
    assert job.operator.api.calls - before <= AT_REST * minutes
    assert job.store.version == version, "it writes though nothing has happened"


def kept(job: TurnedJob, pod: Manifest) -> None:
    """Somebody's finalizer is on it."""
    job.store.patch("pods", "team", pod["metadata"]["name"], {"metadata": {"finalizers": ["example.com/x"]}})


@pytest.mark.parametrize("quota", [None, 4])
def test_a_job_that_trains_asks_for_little(quota: int | None) -> None:
    job = TurnedJob(quota, maxReplicaCount=3)
    job.until(lambda: job.trains(1, 3))
    assert_at_rest(job)


def test_a_pod_that_has_ended_and_that_a_finalizer_keeps_is_made_good_at_once_and_blames_nobody() -> None:
    job = TurnedJob(fenceTimeoutInSeconds=60)
    job.until(lambda: job.trains(1))
    lost = job.at(1)
    kept(job, lost)
    job.store.delete("pods", "team", lost["metadata"]["name"])
    job.until(lambda: len(job.pods("Running")) == 2, within=8)
    assert lost["metadata"]["name"] in job.pods(), "the object is still there"
    assert_at_rest(job)
    assert job.status()["badNodes"] == [] and job.status()["failures"] == 0


def test_a_pod_whose_node_is_silent_and_that_a_finalizer_keeps_is_released_once() -> None:
    job = TurnedJob(fenceTimeoutInSeconds=30, badNodeTimeInSeconds=3600)
    job.until(lambda: job.trains(1))
    lost = job.at(1)
    kept(job, lost)
    node = lost["spec"]["nodeName"]
    job.kubelets.cut[node] = job.now
    job.nodes.unfit.add(node)
    job.until(lambda: lost["metadata"]["name"] in job.operator.api.forced, within=200)
    job.until(lambda: len(job.pods("Running")) == 2 and lost["metadata"]["name"] in job.pods())
    assert [each["name"] for each in job.status()["badNodes"]] == [node]
    until = job.status()["badNodes"][0]["untilTime"]
    assert_at_rest(job)
    assert job.status()["badNodes"][0]["untilTime"] == until


def two_containers(other: str) -> Manifest:
    return {"spec": {"containers": [{"name": name, "image": "team/train:1"} for name in ("train", other)]}}


@pytest.mark.parametrize(
    ("other", "train", "beside", "phase"),
    [
        ("a-log", 2, 0, "Failed"),
        ("a-log", 0, 3, "Succeeded"),
        ("z-log", 2, 0, "Failed"),
        ("z-log", 0, 3, "Succeeded"),
        ("a-log", 75, 0, "Restarting"),
    ],
)
def test_the_container_that_trains_says_how_the_job_ended(other: str, train: int, beside: int, phase: str) -> None:
    job = TurnedJob(template=two_containers(other))
    job.until(lambda: job.trains(1))
    leader = job.at(0)
    job.kubelets.end_container(leader, "train", train)
    job.kubelets.end_container(job.at(0), other, beside)
    job.until(lambda: job.status()["phase"] == phase or job.status()["attempt"] == 2, within=20)
    assert (job.status()["phase"] == phase) != (job.status()["attempt"] == 2)
    assert (job.condition("Complete")["status"] == "True") == (phase == "Succeeded")


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (1, "Failed")])
def test_a_container_that_goes_on_does_not_hide_that_the_training_is_over_and_is_told(code: int, phase: str) -> None:
    job = TurnedJob(template=two_containers("a-proxy"))
    job.until(lambda: job.trains(1))
    job.kubelets.end_container(job.at(0), "train", code)
    job.until(lambda: job.status()["phase"] == phase, within=20)
    assert "a-proxy of job-1-0-1" in job.condition("Complete")["message"]
    assert_at_rest(job)


def test_a_replica_whose_training_has_ended_leaves_its_other_containers_their_grace() -> None:
    job = TurnedJob(template=two_containers("a-proxy"))
    job.until(lambda: job.trains(1))
    lost = job.at(1)
    job.kubelets.end_container(lost, "train", 137)
    job.until(lambda: len(job.pods("Running")) == 2 and lost["metadata"]["name"] not in job.pods(), within=30)
    assert lost["metadata"]["name"] not in job.operator.api.forced, "its proxy was not asked to end"


def test_a_job_that_is_over_lets_no_pod_train_on_beside_one_of_its_replica_that_has_ended() -> None:
    job = TurnedJob(replicaCount=1, maxReplicaCount=2, podsPerReplica=2, template=two_containers("a-proxy"))
    job.until(lambda: len(job.pods("Running")) == 4)
    first, other = [pod for pod in job.store.all_of("pods") if pod["metadata"]["labels"][PLACE_LABEL] == "1"]
    job.kubelets.end_container(first, "train", 0)
    job.kubelets.end_container(job.at(0), "train", 0)
    job.until(lambda: job.status()["phase"] == "Succeeded", within=4)
    job.until(lambda: other["metadata"]["name"] not in job.pods("Running"), within=20)
    assert_at_rest(job)


def command(job: TurnedJob, place: int) -> list[str]:
    return list(job.at(place)["spec"]["containers"][0]["command"])


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ({"maxReplicaCount": 4}, "spec.maxReplicaCount counts when the gang starts anew"),
        ({"replicaCount": 1}, "spec.replicaCount counts when the gang starts anew"),
        ({"port": 29500}, "spec.port counts"),
        ({"ranksPerPod": 2}, "spec.ranksPerPod counts"),
        ({"podsPerReplica": 2}, "spec.podsPerReplica counts"),
        ({"script": ["other.py"]}, 'goes on with what it was started with (script: ["train.py"])'),
        ({"runFlags": ["--quiet"]}, "(runFlags: its default)"),
    ],
)
def test_what_a_running_gang_cannot_follow_waits_for_its_next_start_and_a_condition_says_so(
    edit: dict[str, Any], told: str
) -> None:
    job = TurnedJob(maxReplicaCount=3, scaleUpSnoozeTimeInSeconds=0)
    job.until(lambda: job.trains(1, 3))
    before = {name: command(job, place) for place, name in enumerate(job.pods())}
    job.patch(**edit)
    job.until(lambda: job.condition("SpecApplied")["status"] == "False")
    assert told in job.condition("SpecApplied")["message"]
    job.turns(60)
    assert job.trains(1, 3) and {name: command(job, place) for place, name in enumerate(job.pods())} == before
    job.store.delete("pods", "team", job.at(2)["metadata"]["name"])
    job.until(lambda: job.trains(1, 3) and job.pods() != list(before))
    assert command(job, 2)[2] == before["job-1-2-3"][2], "it joins where the coordinator listens"
    job.patch(suspend=True)
    job.until(lambda: job.pods() == [])
    job.patch(suspend=False)
    job.until(lambda: job.status()["phase"] == "Training" and job.condition("SpecApplied")["status"] == "True")
    assert command(job, 0) != before["job-1-0-1"], "it has begun by the new specification"


def test_sizes_that_the_gang_can_follow_are_followed_at_once() -> None:
    job = TurnedJob(maxReplicaCount=4, scaleUpSnoozeTimeInSeconds=0)
    job.until(lambda: job.trains(1, 4))
    job.patch(replicaDiscreteValues=[2, 3], maxReplicaCount=3)
    job.until(lambda: job.trains(1, 3))
    assert job.condition("SpecApplied")["status"] == "True"
    job.patch(replicaDiscreteValues=[], maxReplicaCount=2)
    job.until(lambda: job.trains(1, 2))
    job.store.delete("pods", "team", "job-1-1-2")
    job.until(lambda: "job-1-1-2" not in job.pods() and job.trains(1, 2))
    joiner = job.at(1)
    assert f"--name={joiner['metadata']['name']}" in command(job, 1), "the coordinator has room for new names"
    job.patch(maxReplicaCount=4)
    job.until(lambda: job.trains(1, 4))


def test_a_gang_that_has_not_begun_begins_by_what_its_specification_says_now() -> None:
    job = TurnedJob(1)
    job.until(lambda: len(job.pods("Pending")) == 2)
    job.patch(replicaCount=1)
    job.until(lambda: job.trains(2, 1))
    assert "--nnodes=1:1" in command(job, 0) and job.status()["failures"] == 0


def test_a_job_that_trains_under_an_operator_before_this_one_goes_on() -> None:
    job = TurnedJob(maxReplicaCount=3)
    job.until(lambda: job.trains(1, 3))
    body = job.store.get("trainingjobs", "team", "job")
    del body["status"]["terms"]
    job.store.replace("trainingjobs", "team", "job", body, part="status")
    before = job.pods()
    job.turns(5)
    assert job.pods() == before and job.status()["terms"]["maxReplicaCount"] == 3


def test_times_in_a_status_are_as_kubernetes_writes_them() -> None:
    job = TurnedJob(scalingTimeoutInSeconds=30)
    job.until(lambda: job.trains(1))
    job.kubelets.cut[job.at(1)["spec"]["nodeName"]] = job.now
    job.nodes.unfit.add(job.at(1)["spec"]["nodeName"])
    job.until(lambda: job.status()["badNodes"] != [] and len(job.pods("Running")) == 2, within=300)
    job.kubelets.end(job.at(1), 137)
    job.until(lambda: job.status()["failures"] == 1)
    status = job.status()
    times = [status["lastChangeTime"], status["lastFailureTime"], status["badNodes"][0]["untilTime"]]
    assert all(isinstance(each, str) and each.endswith("Z") for each in times)
    assert all(abs(datetime.fromisoformat(each).timestamp() - job.now) < 7200 for each in times)
    assert not [name for name, value in status.items() if isinstance(value, float) and value > 1e6]


def test_times_that_an_older_operator_has_written_still_count() -> None:
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    began, known = job.pods(), job.status()
    kept = [{"name": "n5", "until": job.now + 500.0, "reason": "lost", "quarantined": True}]
    older = {"changedAt": job.now - 1.5, "failures": 3, "failedAt": job.now - 2.5, "avoidedNodes": kept}
    newer = {"lastChangeTime": None, "lastFailureTime": None, "badNodes": None}
    job.store.patch("trainingjobs", "team", "job", {"status": older | newer}, part="status")
    read = read_status(job.store.get("trainingjobs", "team", "job"))
    assert (read.changed_at, read.failed_at) == pytest.approx((job.now - 1.5, job.now - 2.5))
    job.turns(30)
    assert job.pods() == began and job.status()["attempt"] == known["attempt"]
    job.kubelets.end(job.at(1), 137)
    job.until(lambda: job.status()["failures"] == 4)
    status = job.status()
    assert [each["name"] for each in status["badNodes"]] == ["n5"]
    assert not {"changedAt", "failedAt", "avoidedNodes"} & status.keys()


def test_a_job_with_all_its_objects_as_an_older_operator_has_left_them_goes_on() -> None:
    """`older_job.json`: all objects, as the operator before times were text had them after two losses."""
    left = json.loads((Path(__file__).parent / "older_job.json").read_text())
    job = TurnedJob(maxReplicaCount=3)
    job.now = left["now"]
    job.store.take_over({tuple(key): body for key, body in left["objects"]}, left["version"])
    job.kubelets.processes = {pod["metadata"]["uid"]: pod for pod in job.store.all_of("pods")}
    job.operator.relist()
    began = job.pods()
    job.turns(60)
    assert (job.pods(), job.status()["attempt"], job.status()["failures"]) == (began, 1, 1)
    job.kubelets.end(job.at(1), 137)
    job.until(lambda: job.status()["failures"] == 2)
    job.until(lambda: job.trains(1, 3))
    assert set(began) - set(job.pods()) == {"job-1-1-5"}, "the others stay"
    assert [each["name"] for each in job.status()["badNodes"]] == ["n2"], "what is known of nodes stays"


def test_what_somebody_deletes_of_a_jobs_objects_is_made_again() -> None:
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    job.turns(40)
    owned = ("services", "secrets", "poddisruptionbudgets")
    names = {kind: job.store.all_of(kind)[0]["metadata"]["name"] for kind in owned}
    for kind, name in names.items():
        job.store.delete(kind, "team", name)
    job.until(lambda: all(job.store.all_of(kind) for kind in owned), within=320)
    for kind in ("services", "secrets"):
        job.store.delete(kind, "team", names[kind])
    job.store.delete("pods", "team", job.at(1)["metadata"]["name"])
    job.until(lambda: len(job.pods("Running")) == 2)
    assert all(job.store.all_of(kind) for kind in owned), "who joins finds them"


def test_what_becomes_of_the_gang_is_told_as_events() -> None:
    job = TurnedJob(maxReplicaCount=3, scaleUpSnoozeTimeInSeconds=0)
    job.until(lambda: job.trains(1, 3))
    job.kubelets.end(job.at(2), 137)
    job.until(lambda: job.trains(1, 3) and "job-1-2-3" not in job.pods())
    job.kubelets.end(job.at(0), 137)
    job.until(lambda: job.trains(2, 3))
    job.kubelets.end(job.at(0), 1)
    job.until(lambda: job.status()["phase"] == "Failed")
    told = {each["reason"]: each["type"] for each in job.store.all_of("events")}
    usual = dict.fromkeys(("GangAsked", "GangRuns", "ReplicaAsked", "ReplicaLeaves", "ReplicaGone"), "Normal")
    assert told == usual | {"GangRestarts": "Warning", "JobFailed": "Warning"}


def test_in_a_namespace_that_ends_nothing_is_started() -> None:
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    asked: list[str] = []

    def ends(verb: str, plural: str, body: Manifest) -> Refused | None:
        if verb != "create" or plural == "events":
            return None
        asked.append(plural)
        text = (
            f'{plural} "x" is forbidden: unable to create new content in namespace team because it is being terminated'
        )
        return Refused(403, "Forbidden", text)

    job.store.refuse = ends
    job.kubelets.end(job.at(0), 137)
    job.turns(55)
    assert len(asked) <= 2, asked
    assert "the namespace is being deleted" in job.condition("PodsCreated")["message"]


def test_a_job_that_waits_is_not_at_its_wanted_size() -> None:
    job = TurnedJob(1)
    job.until(lambda: job.status().get("phase") == "Pending")
    assert job.condition("AtWantedSize")["status"] == "False"


REFUSALS: dict[str, str] = {
    'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2': "ask for quota",
    'pods "x" is forbidden: failed quota: q: must specify limits.cpu for: train': "write these resources",
    'pods "x" is forbidden: maximum cpu usage per Container is 1, but limit is 2': "LimitRange",
    'pods "x" is forbidden: no PriorityClass with name gang was found': "make that PriorityClass",
    'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true': "securityContext",
    'pods is forbidden: User "u" cannot create resource "pods" in API group "" in the namespace "t"': "manifests again",
    "unable to create new content in namespace team because it is being terminated": "is being deleted",
}


@pytest.mark.parametrize("message", REFUSALS)
def test_each_refusal_has_its_own_cure(message: str) -> None:
    assert REFUSALS[message] in cure_of("pod", ApiFailure(403, "Forbidden", message))


def test_a_gang_that_stands_still_as_it_is_short_is_not_said_to_train() -> None:
    job = TurnedJob(scaleUpSnoozeTimeInSeconds=0)
    job.until(lambda: job.trains(1))
    job.nodes.unfit.update(job.nodes.nodes)
    job.store.delete("pods", "team", job.at(1)["metadata"]["name"])
    job.until(lambda: job.status()["replicas"] == 1)
    assert (job.status()["phase"], job.condition("Training")["status"]) == ("Waiting", "False")
    job.nodes.unfit.clear()
    job.until(lambda: job.trains(1))
    assert job.condition("Training")["status"] == "True"
