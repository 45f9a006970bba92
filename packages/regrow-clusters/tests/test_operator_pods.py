"""Replicas of several pods: which pods are ended and made when one of them is gone."""

from typing import Any

import msgspec
import pytest
from tests.cluster.jobs import training_job

from regrow_clusters.cluster.actions import DrainReplica, ReleaseReplica
from regrow_clusters.cluster.observed import JobStage, ReplicaStage
from regrow_clusters.operator.objects import ReplicaPlace, pods
from regrow_clusters.operator.observed.observing import JobReading, read
from regrow_clusters.operator.observed.pod_seen import PodSeen, read_pod
from regrow_clusters.operator.planning import PodsStart, job_plan, next_turn, pod_steps
from regrow_clusters.operator.resource import SpecRefused, TrainingJob, TrainingJobStatus, read_job

R = ReplicaStage


def job(*, began: bool = True, **spec: Any) -> TrainingJob:
    """Of two pods a replica; its gang runs, or has not yet."""
    found = training_job(**{"replicaCount": 1, "podsPerReplica": 2, **spec})
    found["metadata"]["uid"] = "u1"
    return msgspec.structs.replace(read_job(found), status=TrainingJobStatus(started_attempt=int(began), serial=9))


def running(given: TrainingJob, *places: int) -> dict[tuple[int, int], PodSeen]:
    """All pods of replicas, by place and number; each has a node of its own."""
    found = {}
    for place in places:
        for index, made in enumerate(pods(given, ReplicaPlace(place, place + 1, begins=True), ())):
            seen = read_pod({**made, "spec": {"nodeName": f"n{place}{index}"}, "status": {"phase": "Running"}})
            assert seen is not None
            found[place, index] = seen
    return found


def changed(seen: dict[tuple[int, int], PodSeen], at: tuple[int, int], **fields: Any) -> list[PodSeen]:
    return [msgspec.structs.replace(pod, **fields) if where == at else pod for where, pod in seen.items()]


def stages(reading: JobReading) -> list[tuple[str, ReplicaStage]]:
    return [(each.name, each.stage) for each in reading.seen.replicas]


def asked(given: TrainingJob, seen: list[PodSeen], now: float = 0.0) -> tuple[list[str], list[str]]:
    """Pods that are made, and pods that are ended."""
    reading = read(given, seen, now)
    steps = pod_steps(given, job_plan(given, reading, now), seen)
    places = [each for step in steps if isinstance(step, PodsStart) for each in step.replicas]
    made = [pod["metadata"]["name"] for place in places for pod in pods(given, place, ())]
    ended = [step.name for step in steps if isinstance(step, DrainReplica | ReleaseReplica)]
    return made, [*ended, *reading.rest]


def test_a_model_with_a_copy_in_each_rank_has_sizes_of_whole_pods() -> None:
    given = job(replicaCount=2, maxReplicaCount=4, replicaIncrementStep=2, ranksPerPod=4, replicaRanks=1)
    words = pods(given, ReplicaPlace(0, 1, begins=True), ())[0]["spec"]["containers"][0]["command"]
    assert {"--nnodes=4:8", "--nproc-per-node=4", "--replica-ranks=1", "--replicas=16:32"} <= set(words)
    assert "--replica-sizes=16,32" in words
    usual = pods(job(ranksPerPod=4), ReplicaPlace(0, 1, begins=True), ())[0]["spec"]["containers"][0]["command"]
    assert {"--replica-ranks=8", "--replicas=1:1"} <= set(usual) and "--replica-sizes" not in str(usual)
    with pytest.raises(SpecRefused, match="spec.replicaRanks is 3, and a replica has 8 ranks"):
        job(ranksPerPod=4, replicaRanks=3)


def test_a_pod_of_replica_0_that_is_gone_is_made_again_alone_and_joins_as_the_node_that_it_was() -> None:
    given = job()
    seen = running(given, 0)
    assert asked(given, list(seen.values())) == ([], [])
    assert asked(given, [seen[0, 0]]) == (["job-1-0-10-1"], [])
    (step,) = pod_steps(given, job_plan(given, read(given, [seen[0, 0]], 0.0), 0.0), [seen[0, 0]])
    assert isinstance(step, PodsStart) and not step.begins
    (made,) = pods(given, step.replicas[0], step.avoid)
    words = made["spec"]["containers"][0]["command"]
    assert words[:2] == ["regrow", "agent"] and "--name=node1" in words
    assert made["metadata"]["labels"]["regrow.dev/replica"] == seen[0, 0].replica


def test_its_place_is_held_until_it_is_gone_or_fenced_and_pod_0_is_left_in_peace() -> None:
    given = job(fenceTimeoutInSeconds=60)
    leaving = changed(running(given, 0), (0, 1), deleted_at=100.0)
    assert asked(given, leaving, 159.0) == ([], [])
    assert next_turn(given, read(given, leaving, 159.0), 159.0) == 160.0
    assert asked(given, leaving, 160.0) == (["job-1-0-10-1"], ["job-1-0-1-1"])
    ended = changed(running(given, 0), (0, 1), phase="Failed", exit_code=137, finished=100.0)
    assert asked(given, ended, 100.0) == (["job-1-0-10-1"], ["job-1-0-1-1"])


def test_a_replica_0_that_waits_for_a_pod_is_no_whole_one_and_nothing_else_is_asked_for() -> None:
    given = job(maxReplicaCount=2)
    seen = running(given, 0, 1)
    reading = read(given, changed(seen, (0, 1), deleted_at=100.0), 0.0)
    assert stages(reading) == [("job-1-0-1", R.QUEUED), ("job-1-1-2", R.RUNNING)]
    assert (reading.running, reading.waiting, reading.seen.stage) == (1, 1, JobStage.TRAINING)
    assert asked(given, [pod for at, pod in seen.items() if at != (0, 1)]) == (["job-1-0-10-1"], [])


def test_a_pod_of_replica_0_that_does_not_come_to_run_is_given_up_alone() -> None:
    given = job(scalingTimeoutInSeconds=300)
    stuck = changed(running(given, 0), (0, 1), phase="Pending", scheduled=0.0)
    assert asked(given, stuck, 299.0) == ([], [])
    assert asked(given, stuck, 300.0) == ([], ["job-1-0-1-1"])


def test_another_replica_leaves_as_a_whole_and_its_place_is_filled_when_all_of_it_has() -> None:
    given = job(maxReplicaCount=2)
    seen = running(given, 0, 1)
    leaving = changed(seen, (1, 0), deleted_at=100.0)
    assert asked(given, leaving, 50.0) == ([], ["job-1-1-2-1"])
    assert asked(given, [pod for at, pod in seen.items() if at != (1, 0)], 50.0) == ([], ["job-1-1-2-1"])
    assert asked(given, [seen[0, 0], seen[0, 1]], 50.0) == (["job-1-1-10-0", "job-1-1-10-1"], [])
    done = changed(seen, (1, 0), phase="Succeeded", exit_code=0, finished=50.0)
    assert asked(given, done, 54.0) == ([], []), "it may be the job that has ended"
    assert next_turn(given, read(given, done, 54.0), 54.0) == 55.0
    assert asked(given, done, 55.0) == ([], ["job-1-1-2-1"])


def test_where_pod_0_is_gone_so_are_all_others() -> None:
    given = job(maxReplicaCount=2)
    seen = running(given, 0, 1)
    _, ended = asked(given, [pod for at, pod in seen.items() if at != (0, 0)])
    assert ended == ["job-1-1-2", "job-1-0-1-1"]


def test_before_the_gang_has_begun_each_of_its_pods_is_a_place_of_its_own() -> None:
    given = job(began=False, replicaCount=2, scalingTimeoutInSeconds=300)
    assert asked(given, []) == (["job-1-0-10-0", "job-1-0-10-1", "job-1-1-12-0", "job-1-1-12-1"], [])
    seen = running(given, 0, 1)
    lost = [pod for at, pod in seen.items() if at != (1, 1)]
    assert asked(given, lost) == (["job-1-1-10-1"], [])
    (step,) = pod_steps(given, job_plan(given, read(given, lost, 0.0), 0.0), lost)
    assert isinstance(step, PodsStart) and step.begins
    half = changed(seen, (1, 1), phase="Pending", node="")
    assert (read(given, half, 0.0).running, read(given, half, 0.0).waiting) == (1, 1)
    assert asked(given, half, 299.0) == ([], [])
    assert sorted(asked(given, half, 300.0)[1]) == sorted(pod.name for pod in half), "nodes are not held for ever"
