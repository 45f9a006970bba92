"""An operator and what others do to its pods and to its view of them: meshes, kubelets, clocks, another operator."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.bed import bed
from tests.cluster.fake_store import Change, Manifest
from tests.cluster.scheduled_operator import KEY, ScheduledOperator, StoreApi
from tests.cluster.turned import TurnedJob
from tests.cluster.virtual_time import VirtualLoop

from regrow.core.exit_codes import UNPROVEN
from regrow_clusters.operator.api import ApiFailure, ApiKind
from regrow_clusters.operator.controller import Controller
from regrow_clusters.operator.objects import JOB_LABEL, PLACE_LABEL
from regrow_clusters.operator.observed.server_clock import ServerClock

NOBODY_STARTS = "team/nothing:1"
"""An image of which the kubelet of these tests starts no container."""


def with_proxy(job: TurnedJob) -> None:
    """Its pods get a container before all others, as Istio's `holdApplicationUntilProxyStarts` has it."""
    admit = job.store.refuse

    def admission(verb: str, plural: str, body: Manifest) -> Any:
        if (verb, plural) == ("create", "pods") and JOB_LABEL in body["metadata"]["labels"]:
            body["spec"]["containers"].insert(0, {"name": "istio-proxy", "image": "istio/proxyv2:1"})
        return admit(verb, plural, body)

    job.store.refuse = admission


@pytest.mark.parametrize(("code", "phase"), [(2, "Failed"), (0, "Succeeded")])
def test_a_proxy_that_is_put_before_the_container_that_trains_says_nothing_of_the_job(code: int, phase: str) -> None:
    job = TurnedJob()
    with_proxy(job)
    job.until(lambda: job.trains(1))
    job.kubelets.end_container(job.at(0), "train", code)
    job.until(lambda: job.status()["phase"] == phase, within=20)
    assert "istio-proxy of job-1-0-1" in job.condition("Complete")["message"]


def test_a_proxy_that_ends_does_not_end_the_job() -> None:
    job = TurnedJob()
    with_proxy(job)
    job.until(lambda: job.trains(1))
    job.kubelets.end_container(job.at(0), "istio-proxy", 0)
    job.turns(20)
    assert job.trains(1), job.status()


def ended_by_its_kubelet(job: TurnedJob, pod: Manifest, reason: str, code: int | None) -> None:
    """Say that a pod is over, with no deletion; `code`: of its container; None: none of it has run."""
    if code is not None:
        job.kubelets.end(pod, code)
    job.kubelets.processes.pop(pod["metadata"]["uid"], None)
    where = ("pods", "team", pod["metadata"]["name"])
    job.store.patch(*where, {"status": {"phase": "Failed", "reason": reason}}, part="status")


@pytest.mark.parametrize("reason", ["Evicted", "Terminated"])
def test_a_script_that_fails_as_its_node_puts_it_out_has_not_failed(reason: str) -> None:
    # A full disk: the script sees ENOSPC, and its kubelet evicts the pod.
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    job.kubelets.end_container(job.at(0), "train", 1)
    ended_by_its_kubelet(job, job.at(0), reason, None)
    job.until(lambda: job.trains(2), within=200)


def test_a_pod_that_the_cluster_disrupts_has_a_condition_and_not_failed_either() -> None:
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    leader = job.at(0)
    target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    where = ("pods", "team", leader["metadata"]["name"])
    said = [*leader["status"]["conditions"], target]
    job.store.patch(*where, {"status": {"conditions": said}}, part="status")
    job.kubelets.end(job.at(0), 1)
    job.until(lambda: job.trains(2), within=200)


@pytest.mark.parametrize("reason", ["OutOfnvidia.com/gpu", "OutOfpods", "TopologyAffinityError"])
def test_a_kubelet_that_refuses_a_pod_for_want_of_anything_is_avoided(reason: str) -> None:
    # Kubelets name the resource in their reason; the scheduler's view of a node may be older than the kubelet's.
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    lost = job.at(1)
    ended_by_its_kubelet(job, lost, reason, None)
    job.until(lambda: len(job.pods("Running")) == 2, within=60)
    assert [each["name"] for each in job.status()["badNodes"]] == [lost["spec"]["nodeName"]]
    assert job.at(1)["spec"]["nodeName"] != lost["spec"]["nodeName"]


@pytest.mark.parametrize("code", [0, 137])
def test_a_node_whose_clock_is_ahead_does_not_hold_up_a_replacement(code: int) -> None:
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    lost = job.at(1)
    job.kubelets.end(lost, code)
    state = {"exitCode": code, "reason": "Error", "finishedAt": job.store.stamp(job.now + 900.0)}
    said = {"status": {"containerStatuses": [{"name": "train", "state": {"terminated": state}}]}}
    job.store.patch("pods", "team", lost["metadata"]["name"], said, part="status")
    job.until(lambda: len(job.pods("Running")) == 2, within=20)


def test_a_pod_that_has_just_ended_in_peace_on_a_node_a_little_ahead_is_not_replaced_at_once() -> None:
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    job.turns(60)
    lost = job.at(1)
    job.kubelets.end(lost, 0)
    state = {"exitCode": 0, "reason": "Completed", "finishedAt": job.store.stamp(job.now + 3.0)}
    said = {"status": {"containerStatuses": [{"name": "train", "state": {"terminated": state}}]}}
    job.store.patch("pods", "team", lost["metadata"]["name"], said, part="status")
    before = set(job.pods())
    job.turns(3)
    assert set(job.pods()) == before, "pod 0 may yet say that the job is over"
    job.until(lambda: len(job.pods("Running")) == 2, within=30)


def test_a_job_whose_result_is_not_proven_is_not_trained_again_as_its_node_is_drained() -> None:
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    job.kubelets.end_container(job.at(0), "train", UNPROVEN)
    ended_by_its_kubelet(job, job.at(0), "Terminated", None)
    job.until(lambda: job.status()["phase"] == "Failed", within=20)


def test_a_container_that_trains_never_begins_again_in_its_pod() -> None:
    # Since Kubernetes 1.34 a container may have a restart policy of its own.
    again = {"restartPolicy": "Never", "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In"}}]}
    container = {"name": "train", "image": "team/train:1", **again}
    job = TurnedJob(template={"spec": {"containers": [container], "restartPolicy": "OnFailure"}})
    job.until(lambda: job.trains(1))
    assert job.at(0)["spec"]["restartPolicy"] == "Never"
    assert not again.keys() & job.at(0)["spec"]["containers"][0].keys()


def test_a_pod_with_labels_that_somebody_has_written_is_nobodys() -> None:
    job = TurnedJob()
    job.until(lambda: job.trains(1))
    like = job.at(1)["metadata"]["labels"] | {"regrow.dev/place": "first"}
    spec = {"containers": [{"name": "x", "image": "x"}]}
    job.store.create("pods", "team", {"metadata": {"name": "theirs", "labels": like}, "spec": spec})
    job.turns(20)
    assert job.status()["phase"] == "Training" and "theirs" in job.pods()


def test_what_another_operator_has_just_started_is_not_started_again() -> None:
    # It was paused beyond its lease. Who leads now hears of the job before its pods: they are watched apart.
    job = TurnedJob(maxReplicaCount=3, maxPendingReplicas=2, scaleUpSnoozeTimeInSeconds=0)
    job.until(lambda: job.trains(1, 3))
    older = ScheduledOperator(job.store)
    older.relist()
    job.store.delete("pods", "team", job.at(2)["metadata"]["name"], grace=0)
    job.operator.hear()
    older.hear()
    asyncio.run(older.look())
    made = job.pods()
    assert len(made) == 3
    cache = job.operator.controller.cache
    cache.put(ApiKind.JOBS, job.store.get("trainingjobs", "team", "job"))
    asyncio.run(job.operator.look())
    assert job.pods() == made
    job.until(lambda: job.trains(1, 3))
    assert job.pods() == made


def held_at(job: TurnedJob, place: int, status: Manifest) -> None:
    """No pod at a place comes to run: its kubelet says this of it."""
    admit = job.store.refuse

    def say(change: Change) -> None:
        pod = change.new
        here = change.plural == "pods" and pod["metadata"]["labels"].get(PLACE_LABEL) == str(place)
        bound = here and change.what == "MODIFIED" and pod["spec"].get("nodeName")
        if bound and pod["status"]["phase"] == "Pending" and "containerStatuses" not in pod["status"]:
            job.store.patch("pods", "team", pod["metadata"]["name"], {"status": status}, part="status")

    def admission(verb: str, plural: str, body: Manifest) -> Any:
        if (verb, plural) == ("create", "pods") and body["metadata"]["labels"][PLACE_LABEL] == str(place):
            body["spec"]["containers"][0]["image"] = NOBODY_STARTS
        return admit(verb, plural, body)

    job.kubelets.not_pulled.add(NOBODY_STARTS)
    job.store.listeners.append(say)
    job.store.refuse = admission


@pytest.mark.parametrize("waiting", ["ImagePullBackOff", "CreateContainerConfigError"])
def test_an_image_that_nobody_can_start_does_not_make_all_nodes_bad(waiting: str) -> None:
    job = TurnedJob(maxReplicaCount=3, scalingTimeoutInSeconds=60)
    held_at(job, 2, {"containerStatuses": [{"name": "train", "state": {"waiting": {"reason": waiting}}}]})
    job.until(lambda: int(job.status().get("serial", 0)) >= 7, within=900)
    assert len(job.status()["badNodes"]) == 1 and job.status()["replicas"] == 2


class TooOld(StoreApi):
    """An API server whose lists are too old before their last page is read, or as soon as they are watched."""

    lists = 0
    within = True
    refused = ()

    async def list(self, kind: ApiKind) -> tuple[list[Manifest], str]:
        self.lists += 1
        if self.lists > 500:
            raise AssertionError("a hot loop: no time passes between lists")
        if self.within:
            raise ApiFailure(410, "Expired", "The provided continue parameter is too old")
        return await super().list(kind)

    async def watch(self, kind: ApiKind, version: str) -> AsyncIterator[tuple[str, Manifest]]:
        for _ in self.refused:
            yield "", {}
        raise ApiFailure(410, "Expired", "too old resource version")


@pytest.mark.parametrize("within", [True, False])
def test_lists_that_are_always_too_old_are_not_asked_for_without_a_pause(within: bool) -> None:
    job = TurnedJob()
    api = TooOld(job.store)
    api.within = within

    async def follow() -> None:
        running = asyncio.create_task(Controller(api, KEY, wall=job.store.wall).run())
        await asyncio.sleep(60.0)
        running.cancel()
        await asyncio.wait({running})

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(follow())
    assert 100 <= api.lists <= 122


@pytest.mark.parametrize(
    ("server", "took", "ahead"),
    [(0.0, 0.0, 0.0), (2.0, 0.0, 0.0), (-9.0, 10.0, 0.0), (400.0, 0.0, 400.0), (-400.0, 0.0, -399.0)],
)
def test_the_servers_clock_counts_where_it_is_another_and_a_slow_answer_is_no_other_clock(
    server: float, took: float, ahead: float
) -> None:
    # RFC 9110, 6.6.1: `Date` is when the answer was made, in whole seconds.
    now = 1_800_000_000.0
    clock = ServerClock(lambda: now)
    clock.set("no date", now)
    clock.set(format_datetime(datetime.fromtimestamp(now + server, UTC), usegmt=True), now - took)
    assert clock.ahead == ahead and clock() == now + ahead


@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_a_slow_answer_does_not_turn_the_clock_back(ahead: float) -> None:
    now = 1_800_000_000.0
    clock = ServerClock(lambda: now)

    def say(ahead: float, asked_at: float) -> None:
        clock.set(format_datetime(datetime.fromtimestamp(now + ahead, UTC), usegmt=True), asked_at)

    say(ahead, now)
    known = clock.ahead
    assert abs(known - ahead) <= 1.0
    say(ahead - 59.0, now - 60.0)  # made 59 s ago, and a second after it was asked for
    assert clock.ahead == known
    say(0.0, now)
    assert clock.ahead == 0.0


@pytest.mark.parametrize("ahead", [400, -400])
async def test_an_operator_goes_by_the_clock_of_its_api_server(tmp_path: Path, ahead: int) -> None:
    async with bed(tmp_path, {"n1": 1}) as cluster, cluster.client() as api:
        cluster.fake.clock_ahead = ahead
        await api.list(ApiKind.PODS)
        assert api.clock.ahead == pytest.approx(ahead, abs=30.0)
        cluster.fake.clock_ahead = 0
        with pytest.raises(ApiFailure):
            await api.get(ApiKind.PODS, "team", "nobody")
        assert api.clock.ahead == 0.0
