"""Places of a gang's pods: the nodes of the job they become, their annotations, and their beginning."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cluster.jobs import training_job

from regrow.core.exit_codes import RUN_AGAIN
from regrow_clusters.cluster.node_health import HealthTable
from regrow_clusters.operator.api import ApiFailure
from regrow_clusters.operator.commands import chosen_pod
from regrow_clusters.operator.objects import NODE_RANK, PLACED_FOLDER, TOPOLOGY, ReplicaPlace, pods
from regrow_clusters.operator.observed.node_watch import NodeWatch
from regrow_clusters.operator.observed.observing import node_of
from regrow_clusters.operator.observed.pod_seen import PodSeen, read_pod
from regrow_clusters.operator.placing.annotating import PodPlacer
from regrow_clusters.operator.placing.node_ranks import domain_in, gang_pods, node_ranks, path_of, path_text
from regrow_clusters.operator.placing.waiting import NotPlaced, placed_arguments
from regrow_clusters.operator.resource import SpecRefused, TrainingJob, TrainingJobStatus, read_job

LABELS = ["topology.kubernetes.io/zone", "example.com/rack"]


def job(status: TrainingJobStatus | None = None, **spec: Any) -> TrainingJob:
    given: dict[str, Any] = {"replicaCount": 4, "topologyLabels": LABELS} | spec
    found = training_job(**given)
    found["metadata"]["uid"] = "u1"
    return msgspec.structs.replace(read_job(found), status=status or TrainingJobStatus())


def gang(given: TrainingJob, *nodes: str) -> list[PodSeen]:
    """Its pods, as the controller makes them, on nodes in the order of their places; on an empty one: nowhere yet."""
    each, found = given.spec.pods_per_replica, []
    for place in range(given.spec.replica_count):
        made = pods(given, ReplicaPlace(place, place + 1, begins=True), ())
        for pod, node in zip(made, nodes[place * each :], strict=False):
            found.append(read_pod({**pod, "spec": {**pod["spec"], "nodeName": node}}))
    return [pod for pod in found if pod is not None]


PATHS = {
    "n0": ("north", "a"),
    "n1": ("south", "a"),
    "n2": ("north", "b"),
    "n3": ("north", "a"),
    "n4": ("south", "a"),
    "n5": ("north", "b"),
}


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        (["n0", "n1", "n2", "n3"], [0, 3, 2, 1]),  # n0 n3 (north a), n2 (north b), n1 (south a)
        (["n1", "n0", "n4", "n2"], [0, 2, 1, 3]),  # pod 0 stays the first, and its zone with it
        (["n0", "n3", "n2", "n5"], [0, 1, 2, 3]),
        (["x", "n0", "y", "n3"], [0, 1, 3, 2]),  # of x and y nothing is known: each stands alone
        (["x", "y", "x", "y"], [0, 2, 1, 3]),  # but for those on one node
    ],
)
def test_ranks_that_are_near_become_neighbours_at_every_level(nodes: list[str], wanted: list[int]) -> None:
    found = gang_pods(job(), gang(job(), *nodes))
    assert found is not None and node_ranks(job(), found, PATHS) == wanted


def test_pods_of_a_replica_stay_together_and_replicas_are_near_by_what_all_their_pods_share() -> None:
    given = job(replicaCount=3, podsPerReplica=2)
    found = gang_pods(given, gang(given, "n0", "n2", "n1", "n4", "n3", "n5"))
    assert found is not None
    # Replicas 0 and 2 are in the north, of two racks each; replica 1 is in the south.
    assert node_ranks(given, found, PATHS) == [0, 1, 4, 5, 2, 3]


def test_a_gang_without_all_its_nodes_has_no_order_yet() -> None:
    given = job()
    assert gang_pods(given, gang(given, "n0", "n1", "n2", "")) is None
    old = [msgspec.structs.replace(pod, attempt=7) for pod in gang(given, "n0", "n1", "n2", "n3")]
    assert gang_pods(given, old) is None


def test_a_path_ends_where_nothing_more_is_known_and_names_what_fails_together() -> None:
    zone, rack = LABELS
    assert path_of({rack: "r1", zone: "z1", "other": "x"}, LABELS) == ("z1", "r1")
    assert path_of({zone: "z1"}, LABELS) == ("z1",)
    assert path_of({rack: "r1"}, LABELS) == ("", "r1")
    assert path_of({}, LABELS) == ()
    texts = [path_text(path) for path in (("z1", "r1"), ("", "r1"), ())]
    assert texts == ["/z1/r1", "//r1", "/"]
    assert [domain_in(text) for text in texts] == ["z1.r1", "r1", ""]
    long = [domain_in(path_text(("z" * 63, rack))) for rack in ("r1", "r2")]
    assert len(set(long)) == 2 and all(len(each) == 64 for each in long)


def test_a_pod_of_the_gang_waits_for_its_number_and_one_that_joins_for_what_fails_with_it() -> None:
    given = job(maxReplicaCount=5)
    (begins,) = pods(given, ReplicaPlace(1, 2, begins=True), ())
    (joins,) = pods(given, ReplicaPlace(4, 5, begins=False), ())
    words = begins["spec"]["containers"][0]["command"]
    assert words[:8] == ["regrow", "k8s", "placed", PLACED_FOLDER, "--ranked", "--domain", "--within=360s", "--"]
    assert words[8] == "run" and not any(word.startswith("--node-rank") for word in words)
    assert begins["metadata"]["annotations"][NODE_RANK] == ""
    (mount,) = begins["spec"]["containers"][0]["volumeMounts"]
    (volume,) = begins["spec"]["volumes"]
    assert mount["mountPath"] == PLACED_FOLDER and mount["name"] == volume["name"]
    assert (
        "--ranked" not in joins["spec"]["containers"][0]["command"]
        and NODE_RANK not in joins["metadata"]["annotations"]
    )
    by_label = job(maxReplicaCount=5, domainLabel="team/rack")
    (joins,) = pods(by_label, ReplicaPlace(4, 5, begins=False), ())
    assert joins["spec"]["containers"][0]["command"][:2] == ["regrow", "agent"], "it has nothing to wait for"


def test_everybody_knows_the_pods_by_their_numbers() -> None:
    given = job(TrainingJobStatus(node_ranks=[0, 3, 2, 1]))
    bodies = [pods(given, ReplicaPlace(place, place + 1, begins=True), ())[0] for place in range(4)]
    here = gang(given, "n0", "n1", "n2", "n3")
    assert [node_of(given, here, f"node{number}") for number in range(4)] == ["n0", "n3", "n2", "n1"]
    assert chosen_pod(bodies, given, replica=None, node=3) == "job-1-1-2"
    (again,) = pods(given, ReplicaPlace(1, 9, begins=False), ())
    assert "--name=node3" in again["spec"]["containers"][0]["command"], "in a job of one size it comes back as it was"


class Cluster:
    """Lists nodes, and keeps what pods are told."""

    def __init__(self, labels: dict[str, dict[str, str]], *, refused: bool = False) -> None:
        self.labels, self.refused = labels, refused
        self.told: dict[str, dict[str, str]] = {}

    async def list(self, _kind: object) -> tuple[list[dict[str, Any]], str]:
        return [{"metadata": {"name": name, "labels": labels}} for name, labels in self.labels.items()], "1"

    async def annotate(
        self, _kind: object, _namespace: str, name: str, notes: dict[str, str], *, uid: str
    ) -> dict[str, Any]:
        if self.refused:
            raise ApiFailure(403, "Forbidden", "pods is forbidden")
        self.told[name] = notes
        return {"metadata": {"name": name}}


async def test_pods_are_told_when_all_have_nodes_and_these_are_known_and_never_again_otherwise() -> None:
    zone = LABELS[0]
    cluster = Cluster({name: {zone: path[0], "other": "x"} for name, path in PATHS.items()})
    nodes = NodeWatch(cluster, HealthTable([]), mark=False)  # type: ignore[arg-type]
    placer, given = PodPlacer(cluster, nodes), job()  # type: ignore[arg-type]
    here = gang(given, "n0", "n1", "n2", "gone")
    assert placer.node_ranks(given, here[:3]) is None and not nodes.look_soon.is_set(), "one has no node"
    assert placer.node_ranks(given, here) is None and nodes.look_soon.is_set(), "nothing is known of their nodes"
    assert await placer.annotate(given, here) == [] and cluster.told == {}
    assert await nodes.turn({}, 0.0)
    order = placer.node_ranks(given, here)
    assert order == [0, 2, 1, 3]
    assert await placer.annotate(given, here) == [], "before it is in the status nobody is told"
    seated = msgspec.structs.replace(given, status=TrainingJobStatus(node_ranks=order))
    cluster.labels["n1"][zone] = "north"
    await nodes.turn({}, 0.0)
    assert placer.node_ranks(seated, here) is None, "it stays as it was said, whatever is known now"
    assert len(await placer.annotate(seated, here)) == 3, "one node is looked for once more"
    await nodes.turn({}, 0.0)
    await placer.annotate(seated, here)
    assert [cluster.told[pod.name][NODE_RANK] for pod in here] == ["0", "2", "1", "3"]
    assert [cluster.told[pod.name][TOPOLOGY] for pod in here] == ["/north", "/north", "/north", "/"]
    told = [msgspec.structs.replace(pod, topology="/", ranked=True) for pod in here]
    assert await placer.annotate(seated, told) == []
    assert [each.holds for each in placer.findings(seated, told)] == [True]


async def test_an_operator_without_the_right_to_tell_pods_says_so() -> None:
    cluster = Cluster({}, refused=True)
    placer = PodPlacer(cluster, None)  # type: ignore[arg-type]
    given = job(TrainingJobStatus(node_ranks=[0, 1, 2, 3]))
    here = gang(given, "n0", "n1", "n2", "n3")
    assert await placer.annotate(given, here) == []
    (finding,) = placer.findings(given, here)
    assert not finding.holds and "apply the operator's manifests again" in finding.message


async def test_pods_that_began_without_waiting_keep_their_numbers_when_labels_are_named_later() -> None:
    without = job(topologyLabels=[])
    here = gang(without, "n0", "n1", "n2", "n3")
    assert PodPlacer(Cluster({}), None).node_ranks(job(), here) is None  # type: ignore[arg-type]


async def test_pods_that_wait_are_told_although_the_labels_were_taken_out_of_the_spec() -> None:
    cluster = Cluster({})
    placer, here = PodPlacer(cluster, None), gang(job(), "n0", "n1", "n2", "n3")  # type: ignore[arg-type]
    order = placer.node_ranks(job(topologyLabels=[]), here)
    assert order == [0, 1, 2, 3]
    await placer.annotate(job(TrainingJobStatus(node_ranks=order), topologyLabels=[]), here)
    assert len(cluster.told) == 4


def test_a_pod_begins_as_the_node_that_it_is_told_to_be(tmp_path: Path) -> None:
    (tmp_path / "topology").write_text("")
    threading.Timer(0.2, lambda: (tmp_path / "topology").write_text("/z1/r1")).start()
    threading.Timer(0.4, lambda: (tmp_path / "node-rank").write_text("3\n")).start()
    words = placed_arguments(tmp_path, ["run", "--job=j", "train.py"], ranked=True, domain=True, within=60.0)
    assert words == ["run", "--node-rank=3", "--domain=z1.r1", "--job=j", "train.py"]
    assert placed_arguments(tmp_path, ["agent"], ranked=False, domain=False, within=60.0) == ["agent"]


def test_a_pod_that_is_not_told_does_not_begin_in_a_gang_and_joins_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(NotPlaced, match="got no node number in the job"):
        placed_arguments(tmp_path, ["run"], ranked=True, domain=True, within=0.2)
    assert placed_arguments(tmp_path, ["agent"], ranked=False, domain=True, within=0.2) == ["agent"]


def test_a_pod_that_waits_leaves_when_it_is_asked_to(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "regrow", "k8s", "placed", str(tmp_path), "--ranked", "--", "run", "train.py"]
    deadline = time.monotonic() + 120
    with subprocess.Popen(words) as process:
        status = Path(f"/proc/{process.pid}/status")
        while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & 1 << 14:
            assert process.poll() is None and time.monotonic() < deadline, "it does not listen to SIGTERM"
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == RUN_AGAIN


@pytest.mark.parametrize("labels", [["no label at all"], ["a/b/c"], [LABELS[0], LABELS[0]]])
def test_labels_that_cannot_be_are_named(labels: list[str]) -> None:
    with pytest.raises(SpecRefused, match=r"spec\.topologyLabels has "):
        job(topologyLabels=labels)
