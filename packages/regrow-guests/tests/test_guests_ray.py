"""A job on Ray: words of its nodes, and its driver, on a cluster that is only played."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from regrow.core.errors import CoordinatorGone, DeadlineExceeded, UsageError
from regrow.launch.remote import CoordinatorClient
from regrow_guests.ray import driver
from regrow_guests.ray.cluster import ActorLost
from regrow_guests.ray.driver import TrainingFailed, train
from regrow_guests.ray.job import NodeNews, RayJob, check, gang_arguments, joining_arguments

JOB = RayJob(words=("train.py", "--lr=1"), nodes=3, spares=1, ranks_per_node=8, checkpoint_dir="/c", name="gpt")


def test_words_of_nodes_that_begin_come_back_and_join() -> None:
    begins = gang_arguments(JOB, 1, "10.0.0.1:99", "10.0.0.2", again=False)
    assert begins == [
        *("run", "--job=gpt", "--nnodes=3:3", "--node-rank=1", "--nproc-per-node=8", "--replicas=16:16"),
        *("--replica-ranks=1", "--spares=1", "--rdzv-endpoint=10.0.0.1:99", "--bind=10.0.0.2"),
        *("--local-addr=10.0.0.2", "--drain-grace=30s", "--no-elect", "--checkpoint-dir=/c", "train.py", "--lr=1"),
    ]
    anew = gang_arguments(JOB, 1, "10.0.0.1:99", "10.0.0.2", again=True)
    assert [word for word in anew if word not in begins] == ["--resume=auto"]
    joins = joining_arguments(JOB, "gpt-1-1", "10.0.0.1:99", "10.0.0.4")
    assert joins[:3] == ["agent", "--join=10.0.0.1:99", "--wait=90s"] and "--name=gpt-1-1" in joins


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"words": ()}, "no script"),
        ({"nodes": 3, "max_nodes": 2}, "3 to 2 nodes"),
        ({"spares": 2, "nodes": 2}, "2 spares"),
        ({"ranks_per_node": 2, "replica_ranks": 3}, "3 ranks"),
    ],
)
def test_numbers_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"words": ("train.py",), "nodes": 2} | changes
    with pytest.raises(UsageError, match=says):
        check(RayJob(**given))


@dataclass
class Played:
    """An actor: `code` is what its process ends with, `gone` that its machine went."""

    machine: str
    words: list[str] = field(default_factory=list)
    code: int | None = None
    gone: bool = False
    left: bool = False

    @property
    def where(self) -> "Call":
        return Call(self, lambda: (self.machine, "10.0.0.1", 99))

    @property
    def start(self) -> "Call":
        return Call(self, lambda words, *_: self.words.extend(words))

    @property
    def wait(self) -> "Call":
        return Call(self, lambda _: self.code, soon=False)

    @property
    def leave(self) -> "Call":
        return Call(self, lambda: setattr(self, "left", True))


@dataclass
class Call:
    """A remote method. `soon`: it is done at once; else its answer is made when it is asked for."""

    actor: Played
    does: Callable[..., Any]
    soon: bool = True

    def remote(self, *words: Any) -> "Ref":
        if not self.soon:
            return Ref(self.actor, lambda: self.does(*words), soon=False)
        done = self.does(*words)
        return Ref(self.actor, lambda: done)


@dataclass(eq=False)
class Ref:
    """An answer."""

    actor: Played | None
    value: Callable[[], Any]
    soon: bool = True


@dataclass
class Group:
    """Bundles. `there`: Ray has room for them."""

    size: int
    there: bool = True
    released: bool = False

    def ready(self) -> Ref:
        return Ref(None, lambda: self.there)


class PlayedCluster:
    """Has room for all, and does in each turn what the test says. Its turns take no time."""

    def __init__(self, *turns: Callable[["PlayedCluster"], object]) -> None:
        self.actors: list[Played] = []
        self.groups: list[Group] = []
        self.drained: set[str] = set()
        self.ended: list[Played] = []
        self._turns = list(turns)
        self._machines = itertools.count()

    def bundles(self, count: int) -> Group:
        self.groups.append(Group(count))
        return self.groups[-1]

    def release(self, group: Group) -> None:
        group.released = True

    def actor(self, group: Group, bundle: int) -> Played:
        assert not group.released and bundle < group.size
        self.actors.append(Played(f"m{next(self._machines)}"))
        return self.actors[-1]

    def end(self, actor: Played) -> None:
        self.ended.append(actor)

    def ready(self, refs: list[Ref], _: float) -> list[Ref]:
        there = [each for each in refs if each.soon or each.actor is None]
        there += [each for each in refs if each.actor is not None and (each.actor.gone or each.actor.code is not None)]
        if not there and self._turns:
            self._turns.pop(0)(self)
        return there[:1] or refs[:1]

    def value(self, ref: Ref) -> Any:
        if ref.actor is not None and ref.actor.gone:
            raise ActorLost("gone")
        return ref.value()

    def going(self) -> set[str]:
        return self.drained

    def show(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: CoordinatorClient) -> Any:
        raise CoordinatorGone("nobody answers")

    clock = itertools.count(1000.0, 1.0)
    monkeypatch.setattr(driver, "check_ray", lambda: None)
    monkeypatch.setattr(CoordinatorClient, "figures", silent)
    monkeypatch.setattr("regrow_guests.ray.driver.monotonic", lambda: next(clock))


def play(monkeypatch: pytest.MonkeyPatch, job: RayJob, *turns: Callable[[PlayedCluster], object]) -> Any:
    cluster, news = PlayedCluster(*turns), list[NodeNews]()
    monkeypatch.setattr(driver, "RayCluster", lambda *_: cluster)
    try:
        train(job, news.append)
    finally:
        assert all(each.released for each in cluster.groups), "its room is given back"
        assert {id(each) for each in cluster.ended} == {id(each) for each in cluster.actors}
    return cluster, news


def end_all(code: int) -> Callable[[PlayedCluster], None]:
    def end(cluster: PlayedCluster) -> None:
        for each in cluster.actors:
            each.code = code

    return end


def rank_of(actor: Played) -> str:
    return next((word for word in actor.words if word.startswith(("--node-rank=", "--name="))), "")


def test_a_lost_actor_is_replaced_by_itself_with_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(cluster: PlayedCluster) -> None:
        cluster.actors[1].gone = True

    cluster, news = play(monkeypatch, RayJob(words=("t.py",), nodes=2), lose, lambda _: None, end_all(0))
    assert [rank_of(each) for each in cluster.actors] == ["--node-rank=0", "--node-rank=1", "--node-rank=1"]
    assert [(each.what, each.node) for each in news][:4] == [
        *(("starts", "node0"), ("starts", "node1"), ("lost", "node1"), ("starts", "node1")),
    ]


def test_the_loss_of_node_0_starts_all_anew_from_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(cluster: PlayedCluster) -> None:
        cluster.actors[0].gone = True
        cluster.actors[1].code = 75

    job = RayJob(words=("t.py",), nodes=2, checkpoint_dir="/c")
    cluster, _ = play(monkeypatch, job, lose, end_all(0))
    assert ["--resume=auto" in each.words for each in cluster.actors] == [False, False, True, True]


def test_a_script_that_fails_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingFailed) as caught:
        play(monkeypatch, RayJob(words=("t.py",), nodes=2), end_all(1))
    assert caught.value.code == 1


def test_all_start_anew_as_often_as_the_job_says_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingFailed) as caught:
        play(monkeypatch, RayJob(words=("t.py",), nodes=1, restarts=2), *[end_all(75)] * 3)
    assert caught.value.code == 75


def test_it_asks_for_one_machine_more_at_a_time_and_lets_a_drained_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def drain(cluster: PlayedCluster) -> None:
        cluster.drained.add(cluster.actors[1].machine)

    job = RayJob(words=("t.py",), nodes=2, max_nodes=4)
    idle = [lambda _: None] * 6
    cluster, news = play(monkeypatch, job, *idle, drain, *idle, end_all(0))
    assert [group.size for group in cluster.groups][:3] == [2, 1, 1]
    assert [rank_of(each) for each in cluster.actors[:2]] == ["--node-rank=0", "--node-rank=1"]
    assert [rank_of(each) for each in cluster.actors[2:]] == ["--name=ray-1-1", "--name=ray-1-2"]
    assert cluster.actors[1].left and [each.node for each in news if each.what == "leaving"] == ["node1"]


def test_a_job_for_which_there_is_no_room_ends_with_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlayedCluster, "ready", lambda *_: [])
    with pytest.raises(DeadlineExceeded, match="no room for 2 nodes"):
        play(monkeypatch, RayJob(words=("t.py",), nodes=2, patience=30.0))


def test_nobody_is_started_anew_when_others_hear_of_the_end_before_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(number: int) -> Callable[[PlayedCluster], None]:
        return lambda cluster: setattr(cluster.actors[number], "code", 0)

    idle: list[Callable[[PlayedCluster], object]] = [lambda _: None] * 90
    cluster, _ = play(monkeypatch, RayJob(words=("t.py",), nodes=2), end(1), *idle, end(0))
    assert len(cluster.actors) == 2


def test_a_node_that_cannot_be_started_ends_the_job_with_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Played) -> Any:
        return Call(Played(""), lambda *_: None)

    def fail(cluster: PlayedCluster, ref: Ref) -> Any:
        if ref.actor is not None and ref.actor.machine == "":
            raise FileNotFoundError("no such folder")
        return ref.value()

    monkeypatch.setattr(Played, "start", property(broken))
    monkeypatch.setattr(PlayedCluster, "value", fail)
    with pytest.raises(FileNotFoundError):
        play(monkeypatch, RayJob(words=("t.py",), nodes=1, folder="/nowhere"))


def test_metrics_or_machines_that_cannot_be_had_do_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def broken(name: str) -> Any:
        def ask(*_: object) -> Any:
            asked.append(name)
            raise AttributeError("this Ray has no such name")

        return ask

    monkeypatch.setattr(PlayedCluster, "going", broken("going"))
    monkeypatch.setattr(PlayedCluster, "show", broken("show"))
    idle: list[Callable[[PlayedCluster], object]] = [lambda _: None] * 40
    with pytest.warns(RuntimeWarning, match="goes on") as said:
        cluster, _ = play(monkeypatch, RayJob(words=("t.py",), nodes=2), *idle, end_all(0))
    assert len(cluster.actors) == 2 and {"going", "show"} <= set(asked) and len(said) == 1


def test_a_replacement_that_cannot_be_started_is_tried_again_and_does_not_end_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def value(cluster: PlayedCluster, ref: Ref) -> Any:
        if ref.actor is not None and ref.actor.machine == "m2" and ref.actor.words:
            raise FileNotFoundError("no such folder on this machine")
        return ask(cluster, ref)

    def lose(cluster: PlayedCluster) -> None:
        cluster.actors[1].gone = True

    ask = PlayedCluster.value
    monkeypatch.setattr(PlayedCluster, "value", value)
    idle: list[Callable[[PlayedCluster], object]] = [lambda _: None] * 40
    with pytest.warns(RuntimeWarning, match="node1 did not come back"):
        cluster, _ = play(monkeypatch, RayJob(words=("t.py",), nodes=2), lose, *idle, end_all(0))
    assert [rank_of(each) for each in cluster.actors] == ["--node-rank=0", *["--node-rank=1"] * 3]


def test_a_node_whose_end_cannot_be_heard_does_not_undo_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = list[str](), PlayedCluster.value

    def value(cluster: PlayedCluster, ref: Ref) -> Any:
        if ref.actor is cluster.actors[-1] and cluster.actors[0].code == 0:
            asked.append("node1")
            raise OSError("its object is lost")
        return ask(cluster, ref)

    monkeypatch.setattr(PlayedCluster, "value", value)
    end: Callable[[PlayedCluster], object] = lambda cluster: setattr(cluster.actors[0], "code", 0)  # noqa: E731
    play(monkeypatch, RayJob(words=("t.py",), nodes=2), end)
    assert asked
