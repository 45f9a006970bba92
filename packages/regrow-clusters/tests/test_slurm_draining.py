"""A job on Slurm from which a node is asked back that it cannot do without: refused before anything is asked of it."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from regrow.core.errors import UsageError
from regrow.core.ids import Generation, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.membership.orders import AnswerScale
from regrow.membership.server.requests import DrainRequest
from regrow.membership.view import JobView, NodeView, WorkerView
from regrow_clusters.slurm.client import SlurmClient
from regrow_clusters.slurm.commands import drain, undo_drain
from regrow_clusters.slurm.following import FollowedCoordinator
from regrow_clusters.slurm.job_file import SlurmJobSpec
from regrow_clusters.slurm.keeper import Keeper
from regrow_clusters.slurm.node_arguments import GangNode
from regrow_clusters.slurm.reading import JobNote, JobRequests, NodeState, SlurmJob
from regrow_clusters.slurm.room import too_few_without
from regrow_clusters.slurm.scripts import JobPart, script_of

SPEC = SlurmJobSpec("gpt", ["train.py"], replica_count=2, max_replica_count=3)


def view(*nodes: str, away: tuple[str, ...] = (), idle: tuple[str, ...] = ()) -> JobView:
    """A job of two replicas at least, of one rank each."""
    seen = [NodeView(NodeId(name), f"at-{name}", "", away=name in away, slots=1) for name in nodes]
    ranks = [
        WorkerView(WorkerId(name), NodeId(name), Rank(rank), 1, "member", StepNo(7))
        for rank, name in enumerate(name for name in nodes if name not in (*away, *idle))
    ]
    return JobView("gpt-5", "training", Generation(1), StepNo(7), 0, 0, ranks, [], seen, min_replicas=2)


@pytest.mark.parametrize(
    ("nodes", "away", "idle", "leaving", "room"),
    [
        (("node0", "node1"), (), (), ("node1",), 1),
        (("node0", "node1", "r2-6"), (), (), ("node1",), None),
        (("node0", "node1", "r2-6"), ("node1",), (), ("r2-6",), 1),
        (("node0", "node1", "r2-6"), (), (), ("node1", "r2-6"), 1),
        (("node0", "node1", "node2"), (), ("node2",), ("node1",), None),
        (("node0", "node1", "node2"), ("node1",), ("node2",), ("node2",), None),
    ],
    ids=["no other", "one beyond the gang", "the one that stands in", "both", "a spare takes over", "no rank is there"],
)
def test_what_is_left_is_counted_where_ranks_leave(
    nodes: tuple[str, ...], away: tuple[str, ...], idle: tuple[str, ...], leaving: tuple[str, ...], room: int | None
) -> None:
    few = too_few_without(view(*nodes, away=away, idle=idle), [NodeId(each) for each in leaving])
    assert (few and few.room) == room
    assert few is None or str(few).startswith("the job would have room for 1 replica, and replicaCount is 2: it would")


class Cluster(SlurmClient):
    """A gang on host0 and host1, and one replica on host2; what is done to them."""

    def __init__(self, seen: JobView, refusal: str = "") -> None:
        super().__init__({})
        self._seen, self._refusal = seen, refusal
        self.requests = JobRequests()
        self.done: list[tuple[str, ...]] = []
        self.drained: tuple[str, ...] = ()

    def queue(self, name: str) -> list[SlurmJob]:
        gang = SlurmJob(5, name, None, "RUNNING", nodes=("host0", "host1"))
        return [gang, SlurmJob(6, f"{name}+2", 2, "RUNNING", nodes=("host2",))]

    def batch_script(self, job_id: int) -> str:
        return script_of(JobPart(SPEC), ["regrow"])

    def note(self, spec_dir: str, name: str, job: SlurmJob | None) -> JobNote:
        return JobNote("host0:1", "/home")

    def address(self, host: str) -> str:
        return host.replace("host", "at-node")

    def write_note(self, spec: SlurmJobSpec, job_id: int, note: JobNote) -> None:
        self.done.append(("note",))

    def nodes(self, hosts: Sequence[str]) -> list[NodeState]:
        return [NodeState(host, "draining" if host in self.drained else "allocated", "") for host in hosts]

    def submit(self, script: str) -> int:
        return 7

    def leave(self, job_id: int) -> None:
        self.done.append(("leave", str(job_id)))

    def on_host(self, job_id: int, host: str, words: Sequence[str], *, within: Seconds = 30.0) -> str:
        given = tuple(words[3:])
        if given[:2] == ("slurm", "wish"):
            if "--set" in given:
                self.requests = msgspec.json.decode(given[-1], type=JobRequests)
            return msgspec.json.encode(self.requests).decode()
        if given[0] == "status":
            return msgspec.json.encode(self._seen).decode()
        self.done.append(given)
        if self._refusal:
            raise UsageError(self._refusal)
        return ""


def asked(cluster: Cluster, host: str, **how: Any) -> str:
    try:
        return drain("gpt", host, cluster, ["regrow"], **how)
    except UsageError as refusal:
        return f"refused: {refusal}"


@pytest.mark.parametrize("host", ["host1", "host2"])
def test_a_node_that_the_job_needs_is_refused_and_nothing_is_asked_of_it(host: str) -> None:
    lost = ("node1",) if host == "host2" else ("r2-6",)
    cluster = Cluster(view("node0", "node1", "r2-6", away=lost))
    said = asked(cluster, host)
    assert f"refused: without {host} the job would have room for 1 replica, and replicaCount is 2" in said
    assert "regrow slurm status gpt shows a replica more; or give --force" in said
    assert (cluster.done, cluster.requests) == ([], JobRequests())


def test_who_insists_is_told_what_follows_and_gets_it() -> None:
    cluster = Cluster(view("node0", "node1", "r2-6", away=("r2-6",)))
    assert "it would wait until another node comes" in asked(cluster, "host1", force=True)
    assert cluster.done == [("drain", "gpt-5", "node1", "--grace=30s", "--force")]
    assert list(cluster.requests.avoid) == ["host1"]


def test_a_node_that_the_job_can_do_without_is_given_back() -> None:
    cluster = Cluster(view("node0", "node1", "r2-6"))
    now = time.time()
    for host in ("host1", "host2"):
        assert asked(cluster, host) == f"{host} is given back, within 30 s; job gpt keeps away from it for 3600 s"
    assert cluster.done == [("drain", "gpt-5", "node1", "--grace=30s"), ("leave", "6")]
    assert list(cluster.requests.avoid) == ["host1", "host2"]
    assert all(3600 <= until - now < 3700 for until in cluster.requests.avoid.values()), "as any bad node"


def test_a_node_that_was_given_back_can_be_had_again() -> None:
    cluster = Cluster(view("node0", "node1", "r2-6"))
    asked(cluster, "host2")
    with pytest.raises(UsageError, match="was not asked to keep away from host1"):
        undo_drain("gpt", "host1", cluster, ["regrow"])
    assert undo_drain("gpt", "host2", cluster, ["regrow"]) == "job gpt may have host2 again"
    assert cluster.requests == JobRequests()


def test_a_node_that_the_job_refuses_to_give_back_is_not_kept_away_from() -> None:
    cluster = Cluster(view("node0", "node1", "r2-6"), refusal="the job has run its last step")
    assert asked(cluster, "host1") == "refused: the job has run its last step"
    assert cluster.requests == JobRequests()


class Coordinator(FollowedCoordinator):
    """Of the job that is seen."""

    def __init__(self, seen: JobView) -> None:
        super().__init__("host0:1", "")
        self.seen = seen
        self.drained: list[str] = []

    def status(self) -> JobView:
        return self.seen

    def drain(self, scaling: DrainRequest) -> AnswerScale:
        self.drained.append(scaling.node)
        return AnswerScale(True, f"{scaling.node} is given back")


def test_nodes_that_slurm_drains_are_left_when_the_job_can_do_without_them_and_no_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, said = [100.0], list[str]()
    monkeypatch.setattr(
        "regrow_clusters.slurm.keeper.time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0)
    )
    slurm, job = Cluster(view()), Coordinator(view("node0", "node1", "r2-6"))
    slurm.drained = ("host1", "host2")
    gang_node = GangNode(5, 0, "host0", "host[0-1]")
    keeper = Keeper(JobPart(SPEC), gang_node, slurm, job, tmp_path, ["regrow"], said.append)

    def look() -> tuple[list[str], list[tuple[str, ...]]]:
        now[0] += 40.0
        keeper.turn()
        return job.drained, [each for each in slurm.done if each[0] == "leave"]

    assert look() == (["node1"], []), "one of them, for there are two replicas at least"
    job.seen = view("node0", "node1", "r2-6", away=("node1",))
    assert look() == (["node1"], [])
    told = [each for each in said if each.startswith("host2 is not left yet (Slurm: ")]
    assert len(told) == 1 and "room for 1 replica, and replicaCount is 2" in told[0], said
    job.seen = view("node0", "node1", "r2-6", "r1-7", away=("node1",))
    assert look() == (["node1"], [("leave", "6")])
