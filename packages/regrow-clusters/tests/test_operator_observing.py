"""Reading of a job's pods: the node that a deletion blames, and those that a waiting pod is kept away from."""

from typing import Any

import msgspec
from tests.cluster.jobs import training_job

from regrow_clusters.cluster.node_health import HealthTable
from regrow_clusters.cluster.observed import AvoidedNode, ReplicaStage
from regrow_clusters.operator.api import ApiFailure, ApiKind
from regrow_clusters.operator.cache import ClusterCache
from regrow_clusters.operator.objects import AVOIDS, ReplicaPlace, pods
from regrow_clusters.operator.observed.node_watch import NodeWatch
from regrow_clusters.operator.observed.observing import read, start_trouble
from regrow_clusters.operator.observed.pod_seen import PodSeen, read_pod
from regrow_clusters.operator.resource import TrainingJob, TrainingJobStatus, read_job


def job(**spec: Any) -> TrainingJob:
    found = training_job(**spec)
    found["metadata"]["uid"] = "u1"
    return msgspec.structs.replace(read_job(found), status=TrainingJobStatus(started_attempt=1))


def pod(given: TrainingJob, place: int, node: str = "", *avoid: str, **more: Any) -> PodSeen:
    """As the controller makes it, and the cluster has gone on."""
    (made,) = pods(given, ReplicaPlace(place, place + 1, begins=False), avoid)
    status = {"phase": "Running" if node else "Pending"}
    found = read_pod({**made, "spec": {**made["spec"], "nodeName": node}, "status": status})
    assert found is not None
    return msgspec.structs.replace(found, **more)


def test_a_deletion_blames_no_node_unless_the_pod_is_still_there_when_its_fence_is_over() -> None:
    given = job(fenceTimeoutInSeconds=60)
    deleted = [pod(given, 0, "n1"), pod(given, 1, "n2", deleted_at=100.0)]
    for now, blamed in ((90.0, False), (159.0, False), (160.0, True)):
        gone = read(given, deleted, now).seen.replicas[1]
        assert (gone.stage, gone.to_blame) == (ReplicaStage.LEAVING, blamed)


def test_the_end_of_a_pod_that_is_heard_late_does_not_hide_another_one_of_its_name() -> None:
    given, cache = job(), ClusterCache()
    (made,) = pods(given, ReplicaPlace(0, 1, begins=True), ())
    before, after = ({**made, "metadata": {**made["metadata"], "resourceVersion": each}} for each in ("7", "9"))
    end = {**made, "metadata": {**made["metadata"], "resourceVersion": "8"}}
    cache.put(ApiKind.PODS, before)
    cache.put(ApiKind.PODS, after)  # it was made by this operator, which has not heard of the end yet
    cache.drop(ApiKind.PODS, end)
    assert [pod.version for pod in cache.pods(("team", "job"))] == ["9"]
    cache.drop(ApiKind.PODS, {**made, "metadata": {**made["metadata"], "resourceVersion": "10"}})
    assert cache.pods(("team", "job")) == []


def test_a_pod_that_waits_says_what_it_is_kept_away_from_and_one_that_runs_does_not() -> None:
    given = job()
    seen = read(given, [pod(given, 0, "n1", "n7"), pod(given, 1, "", "n7", "n8")], 0.0).seen
    assert [each.avoids for each in seen.replicas] == [(), ("n7", "n8")]
    assert [each.to_blame for each in seen.replicas] == [False, False]


def test_what_a_user_writes_into_the_annotation_is_not_taken_for_what_was_asked() -> None:
    given = job(
        template={
            "metadata": {"annotations": {AVOIDS: "n7", "team": "a"}},
            "spec": {"containers": [{"name": "train", "image": "x"}]},
        }
    )
    (made,) = pods(given, ReplicaPlace(1, 2, begins=False), ())
    assert "team" in made["metadata"]["annotations"] and AVOIDS not in made["metadata"]["annotations"]


def test_before_nodes_have_been_looked_at_nobody_is_asked_for_again() -> None:
    given = job()
    waits = [pod(given, 0, "n1"), pod(given, 1, "", "n7")]
    assert read(given, waits, 0.0, None).seen.replicas[1].avoids == ()
    known = read(given, waits, 0.0, (AvoidedNode("n7", 9.0),)).seen
    assert (known.replicas[1].avoids, known.bad_nodes) == (("n7",), (AvoidedNode("n7", 9.0),))


def test_an_init_container_that_cannot_start_is_found_and_the_usual_course_of_a_start_is_not() -> None:
    given = job()
    (made,) = pods(given, ReplicaPlace(1, 2, begins=False), ())

    def waits(init: str, main: str) -> tuple[str, str] | None:
        status = {
            "phase": "Pending",
            "initContainerStatuses": [{"name": "init", "state": {"waiting": {"reason": init}}}],
            "containerStatuses": [{"name": "train", "state": {"waiting": {"reason": main}}}],
        }
        found = read_pod({**made, "status": status})
        assert found is not None
        return start_trouble([found])

    assert waits("PodInitializing", "PodInitializing") is None
    for init, main in (("ImagePullBackOff", "PodInitializing"), ("PodInitializing", "ImagePullBackOff")):
        trouble = waits(init, main)
        assert trouble is not None and trouble[0].endswith("ImagePullBackOff")


class FailingApi:
    def __init__(self, code: int) -> None:
        self.code = code

    async def list(self, _kind: object) -> tuple[list[dict[str, Any]], str]:
        if self.code:
            raise ApiFailure(self.code, "", "")
        return [], "1"


async def test_what_is_known_of_nodes_is_unknown_until_they_were_listed_or_may_not_be() -> None:
    for code, known in ((500, None), (403, ()), (0, ())):
        watch = NodeWatch(FailingApi(code), HealthTable(()), mark=False)  # type: ignore[arg-type]
        assert watch.bad_nodes() is None
        await watch.turn({}, 0.0)
        assert watch.bad_nodes() == known
