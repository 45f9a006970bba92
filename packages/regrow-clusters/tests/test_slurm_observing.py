"""Plan for a job on Slurm: the replicas to request, give back and replace, and the nodes to avoid."""

import itertools
from typing import Any

import msgspec
import pytest

from regrow.core.ids import Generation, NodeId, StepNo
from regrow.membership.view import JobView, NodeView
from regrow_clusters.cluster.actions import DrainReplica, PlannedAction, ReleaseReplica, StartReplica
from regrow_clusters.slurm.job_file import SlurmJobSpec
from regrow_clusters.slurm.observing import Overview
from regrow_clusters.slurm.reading import JobRequests, SlurmJob

HOSTS = ("host0", "host1")


def spec(**more: Any) -> SlurmJobSpec:
    given = {"replica_count": 2, "max_replica_count": 4, "scale_up_snooze_time_in_seconds": 10.0} | more
    return SlurmJobSpec("gpt", ["train.py"], **given)


def view(*nodes: str, away: tuple[str, ...] = (), left: tuple[str, ...] = ()) -> JobView:
    seen = [NodeView(NodeId(name), name, "", away=name in away + left, left=name in left) for name in nodes]
    return JobView("gpt-1", "training", Generation(1), StepNo(7), 0, 0, [], [], seen)


def replica(number: int, place: int, state: str = "RUNNING", nodes: tuple[str, ...] = ("host9",)) -> SlurmJob:
    return SlurmJob(number, f"gpt+{place}", place, state, nodes=() if state == "PENDING" else nodes)


def overview(given: SlurmJobSpec, hosts: tuple[str, ...] = HOSTS) -> Overview:
    return Overview(given, hosts, (), 0.0)


def started(actions: list[PlannedAction]) -> list[tuple[int, bool, tuple[str, ...]]]:
    return [(each.place, each.replacement, each.avoid) for each in actions if isinstance(each, StartReplica)]


def test_a_whole_gang_asks_for_one_replica_more_and_then_for_nothing() -> None:
    seen = overview(spec())
    assert started(seen.look(view("node0", "node1"), [], JobRequests(), 0.0)) == [(2, False, ())]
    assert seen.look(view("node0", "node1"), [replica(5, 2, "PENDING")], JobRequests(), 1.0) == []


def test_a_job_at_its_size_is_left_alone() -> None:
    seen = overview(spec(max_replica_count=None))
    assert seen.look(view("node0", "node1"), [], JobRequests(), 0.0) == []


def test_growth_waits_after_a_change_and_then_goes_on() -> None:
    seen = overview(spec())
    seen.look(view("node0", "node1"), [], JobRequests(), 0.0)
    both = view("node0", "node1", "r2-5")
    assert seen.look(both, [replica(5, 2)], JobRequests(), 1.0) == []
    assert started(seen.look(both, [replica(5, 2)], JobRequests(), 12.0)) == [(3, False, ())]


def test_a_lost_node_of_the_gang_is_replaced_at_once_and_its_host_avoided() -> None:
    seen = overview(spec())
    seen.look(view("node0", "node1"), [replica(5, 2), replica(6, 3)], JobRequests(), 0.0)
    lost = view("node0", "node1", away=("node1",))
    assert started(seen.look(lost, [], JobRequests(), 1.0))[0] == (1, True, ("host1",))


def test_spares_that_make_up_for_a_loss_are_replaced_too() -> None:
    given = spec(max_replica_count=None, spares=1)
    seen = overview(given, ("host0", "host1", "host2"))
    nodes = ("node0", "node1", "node2")
    assert seen.look(view(*nodes), [], JobRequests(), 0.0) == []
    assert started(seen.look(view(*nodes, away=("node0",)), [], JobRequests(), 1.0)) == [(0, True, ("host0",))]


def test_in_replicas_of_several_nodes_a_spare_makes_up_for_the_first_loss() -> None:
    given = spec(max_replica_count=None, spares=1, nodes_per_replica=2)
    hosts = tuple(f"host{index}" for index in range(5))
    nodes = tuple(f"node{index}" for index in range(5))
    seen = overview(given, hosts)
    assert seen.look(view(*nodes, away=("node3",)), [], JobRequests(), 0.0) == []
    both = view(*nodes, away=("node1", "node3"))
    assert started(seen.look(both, [], JobRequests(), 1.0)) == [(1, True, ("host1", "host3"))]


def test_the_one_that_stands_in_under_a_lost_nodes_name_is_not_taken_for_two() -> None:
    seen = overview(spec(max_replica_count=None))
    lost = view("node0", "node1", away=("node1",))
    assert started(seen.look(lost, [], JobRequests(), 0.0)) == [(1, True, ("host1",))]
    assert seen.look(lost, [replica(5, 1, "PENDING")], JobRequests(), 1.0) == []
    assert seen.look(view("node0", "node1"), [replica(5, 1)], JobRequests(), 2.0) == []


def test_a_gang_node_that_is_back_gets_its_place_and_the_replacement_is_taken_out_of_the_queue() -> None:
    seen = overview(spec())
    full = [replica(5, 2), replica(6, 3)]
    names = ("node0", "node1", "r2-5", "r3-6")
    seen.look(view(*names), full, JobRequests(), 0.0)
    seen.look(view(*names, away=("node1",)), full, JobRequests(), 1.0)
    actions = seen.look(view(*names), [*full, replica(7, 1, "PENDING")], JobRequests(), 2.0)
    assert [each.name for each in actions if isinstance(each, DrainReplica)] == ["7"]


def test_a_replica_that_was_lost_is_given_back_and_replaced_elsewhere_at_once() -> None:
    seen = overview(spec(max_replica_count=3))
    names = ("node0", "node1", "r2-5")
    seen.look(view(*names), [replica(5, 2)], JobRequests(), 0.0)
    actions = seen.look(view(*names, away=("r2-5",)), [replica(5, 2)], JobRequests(), 1.0)
    assert actions == [
        ReleaseReplica("5", "lost", ("host9",)),
        StartReplica(2, replacement=True, avoid=("host9",)),
    ]
    seen.given_back(5)
    still = [replica(5, 2, "COMPLETING"), replica(6, 2, "PENDING")]
    assert seen.look(view(*names, away=("r2-5",)), still, JobRequests(), 2.0) == []


def test_a_replica_that_left_for_somebody_else_is_wished_for_again_and_nobody_is_blamed() -> None:
    seen = overview(spec(max_replica_count=3))
    names = ("node0", "node1", "r2-5")
    seen.look(view(*names), [replica(5, 2)], JobRequests(), 0.0)
    leaving = view(*names, left=("r2-5",))
    assert seen.look(leaving, [replica(5, 2)], JobRequests(), 1.0) == [], "Slurm has not taken it back yet"
    assert started(seen.look(leaving, [replica(5, 2, "FAILED")], JobRequests(), 2.0)) == [(2, True, ())]
    assert started(seen.look(leaving, [], JobRequests(), 3.0)) == [(2, True, ())]


def test_fewer_are_wanted_so_the_highest_place_is_asked_to_leave_once() -> None:
    seen = overview(spec())
    names = ("node0", "node1", "r2-5", "r3-6")
    both = [replica(5, 2), replica(6, 3)]
    seen.look(view(*names), both, JobRequests(), 0.0)
    (order,) = seen.look(view(*names), both, JobRequests(replicas=3), 1.0)
    assert isinstance(order, DrainReplica) and (order.name, order.within) == ("6", 30.0)
    seen.asked(6, 30.0, 1.0)
    assert seen.look(view(*names), both, JobRequests(replicas=3), 2.0) == []
    assert seen.look(view(*names), both, JobRequests(replicas=3), 100.0) == [
        ReleaseReplica("6", "it has not left in its time")
    ]


def test_a_wish_beyond_the_limits_is_the_nearest_that_may_be() -> None:
    seen = overview(spec())
    names = ("node0", "node1", "r2-5")
    orders = seen.look(view(*names), [replica(5, 2)], JobRequests(replicas=1), 0.0)
    assert [each.name for each in orders if isinstance(each, DrainReplica)] == ["5"]


def test_who_waits_without_a_node_that_is_not_bad_any_more_is_asked_for_again() -> None:
    seen = overview(spec(bad_node_time_in_seconds=100.0, max_replica_count=3))
    names = ("node0", "node1", "r2-5")
    seen.look(view(*names), [replica(5, 2)], JobRequests(), 0.0)
    seen.look(view(*names, away=("r2-5",)), [replica(5, 2)], JobRequests(), 1.0)
    seen.given_back(5)
    gang, waits = view("node0", "node1"), msgspec.structs.replace(replica(6, 2, "PENDING"), excluded=("host9",))
    assert seen.look(gang, [waits], JobRequests(), 100.0) == []
    assert drained(seen.look(gang, [waits], JobRequests(), 101.0)) == ["6"]
    assert started(seen.look(gang, [replica(6, 2, "CANCELLED")], JobRequests(), 102.0)) == [(2, True, ())]


def test_what_a_users_script_excludes_is_asked_for_again_no_more_often_than_a_bad_node_is() -> None:
    seen = overview(spec(bad_node_time_in_seconds=100.0, max_replica_count=3))
    gang = view("node0", "node1")
    waits = [msgspec.structs.replace(replica(n, 2, "PENDING"), excluded=("host9",)) for n in (5, 6)]
    assert seen.look(gang, waits[:1], JobRequests(), 0.0) == [], "who looked after the job before may have had a reason"
    assert seen.look(gang, waits[:1], JobRequests(), 99.0) == []
    assert drained(seen.look(gang, waits[:1], JobRequests(), 100.0)) == ["5"]
    assert seen.look(gang, waits[1:], JobRequests(), 199.0) == []
    assert drained(seen.look(gang, waits[1:], JobRequests(), 200.0)) == ["6"]


def drained(actions: list[PlannedAction]) -> list[str]:
    return [each.name for each in actions if isinstance(each, DrainReplica)]


def test_nodes_that_are_to_be_avoided_are() -> None:
    seen = overview(spec())
    gang, scaling = view("node0", "node1"), JobRequests(avoid={"host7": 100.0})
    assert started(seen.look(gang, [], scaling, 0.0)) == [(2, False, ("host7",))]
    assert seen.bad_nodes(99.0) == ("host7",)
    seen.look(gang, [], scaling, 150.0)
    assert seen.bad_nodes(150.0) == (), "not for ever, however long the wish is remembered"


def test_a_node_that_a_user_takes_back_is_not_avoided_any_more_unless_it_was_lost_too() -> None:
    seen = overview(spec(max_replica_count=3))
    names = ("node0", "node1", "r2-5")
    scaling = JobRequests(avoid={"host7": 100.0, "host9": 100.0})
    seen.look(view(*names), [replica(5, 2)], scaling, 0.0)
    seen.look(view(*names, away=("r2-5",)), [replica(5, 2)], JobRequests(avoid={"host7": 100.0}), 1.0)
    assert seen.bad_nodes(1.0) == ("host7", "host9"), "host9 was lost"
    seen.look(view("node0", "node1"), [], JobRequests(), 2.0)
    assert seen.bad_nodes(2.0) == ("host9",)


def test_replicas_that_end_before_they_have_joined_are_asked_for_less_and_less_often() -> None:
    seen = overview(spec(scale_up_snooze_time_in_seconds=0.0))
    whole = view("node0", "node1")
    asked: list[float] = []
    there: list[SlurmJob] = []
    number, now = 5, 0.0
    while now < 200.0:
        if started(seen.look(whole, there, JobRequests(), now)):
            asked.append(now)
            seen.look(whole, [replica(number, 2)], JobRequests(), now + 0.5)
            there = [replica(number, 2, "FAILED")]
            number += 1
        now += 1.0
    gaps = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert gaps == sorted(gaps) and gaps[-1] > 30.0 and len(asked) < 10


@pytest.mark.parametrize("state", ["NODE_FAIL", "BOOT_FAIL"])
def test_a_node_that_slurm_has_lost_is_avoided(state: str) -> None:
    seen = overview(spec(max_replica_count=3))
    names = ("node0", "node1", "r2-5")
    seen.look(view(*names), [replica(5, 2)], JobRequests(), 0.0)
    gone = seen.look(view(*names, away=("r2-5",)), [replica(5, 2, state)], JobRequests(), 1.0)
    assert started(gone) == [(2, True, ("host9",))]


def test_a_node_that_failed_the_jobs_examinations_twice_is_excluded_though_its_ranks_stay() -> None:
    seen = overview(spec())
    bad = msgspec.structs.replace(view("node0", "node1", "r2-5"), nodes=[])
    nodes = [
        NodeView(NodeId("node1"), "", "", False, quarantined="gpu0: xid 79"),
        NodeView(NodeId("node0"), "", "", False),
    ]
    nodes.append(NodeView(NodeId("r2-5"), "", "", False, quarantined="disk: slow"))
    bad = msgspec.structs.replace(bad, nodes=nodes)
    actions = seen.look(bad, [replica(5, 2)], JobRequests(), 0.0)
    assert started(actions) == [(3, False, ("host1", "host9"))]
    assert seen.bad_nodes_by_reason(1.0) == [("host1", "gpu0: xid 79"), ("host9", "disk: slow")]
    assert seen.bad_nodes_by_reason(3601.0) == []
