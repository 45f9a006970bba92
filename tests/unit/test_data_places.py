"""Who is told where entries of other nodes are, and whose mirror is whose."""

import pytest
from tests.unit.membership_job import Job

from regrow.core.data_messages import DataNoted, PlaceData
from regrow.core.events import Noted
from regrow.core.ids import NodeId
from regrow.core.messages import NodeJoined, NodeLost, SpawnWorker
from regrow.membership.data_places import MOST_PEERS, DataPlaces
from regrow.membership.roster import Roster


def roster(nodes: int, domains: str = "", doors: bool = True) -> Roster:
    made = Roster()
    for at in range(nodes):
        door = f"door{at}" if doors else ""
        domain = domains[at] if domains else ""
        made.add_node(NodeJoined(NodeId(f"n{at}"), "host", 1, "store", domain=domain, data=door))
    return made


def told(places: DataPlaces) -> dict[str, tuple[str, list[str]]]:
    return {order.node: (order.mirror, order.peers) for order in places.news()}


def test_each_node_has_the_next_as_its_mirror_and_all_others_as_peers() -> None:
    assert told(DataPlaces(roster(3))) == {
        "n0": ("door1", ["door1", "door2"]),
        "n1": ("door2", ["door2", "door0"]),
        "n2": ("door0", ["door0", "door1"]),
    }


def test_a_mirror_is_in_another_rack_and_first_among_the_peers() -> None:
    assert told(DataPlaces(roster(4, "aabb"))) == {
        "n0": ("door2", ["door2", "door1", "door3"]),
        "n1": ("door3", ["door3", "door2", "door0"]),
        "n2": ("door0", ["door0", "door3", "door1"]),
        "n3": ("door1", ["door1", "door0", "door2"]),
    }


@pytest.mark.parametrize("nodes", [MOST_PEERS, MOST_PEERS + 1, 40])
def test_no_message_grows_with_the_job(nodes: int) -> None:
    orders = told(DataPlaces(roster(nodes)))
    assert len(orders) == nodes
    for node, (mirror, peers) in orders.items():
        assert len(peers) == len(set(peers)) == min(nodes - 1, MOST_PEERS)
        assert peers[0] == mirror
        assert f"door{node[1:]}" not in peers, "nobody asks itself"


@pytest.mark.parametrize(("nodes", "doors"), [(1, True), (3, False)])
def test_alone_or_without_caches_nobody_is_told_anything(nodes: int, doors: bool) -> None:
    assert told(DataPlaces(roster(nodes, doors=doors))) == {}


def test_a_node_without_a_cache_takes_no_part() -> None:
    made = roster(3)
    made.nodes[NodeId("n1")].data = ""
    assert told(DataPlaces(made)) == {"n0": ("", ["door2"]), "n2": ("door0", ["door0"])}


def test_only_those_are_told_for_whom_something_changes() -> None:
    made = roster(12)
    places = DataPlaces(made)
    assert len(told(places)) == 12
    assert told(places) == {}
    lost = made.nodes[NodeId("n3")]
    lost.away_since = 1.0
    places.lost(lost.node)
    changed = told(places)
    assert changed["n2"][0] == "", "its mirror is waited for"
    assert {mirror for node, (mirror, _) in changed.items() if node != "n2"} == {
        f"door{(int(node[1:]) + 1) % 12}" for node in changed if node != "n2"
    }, "everybody else keeps the mirror"
    assert set(changed) == {f"n{at % 12}" for at in range(3 - MOST_PEERS, 3)}
    lost.away_since, lost.data = None, "door3 again"
    changed = told(places)
    assert changed["n2"][0] == "door3 again"
    assert changed["n3"] == ("door4", [f"door{at}" for at in range(4, 12)])


# --- in the machine -------------------------------------------------------------------------------------------------


def placed(job: Job) -> dict[str, str]:
    orders: dict[str, str] = {order.node: order.mirror for order in job.all(PlaceData)}
    job.said.clear()
    return orders


def test_caches_are_placed_once_before_the_workers_start_whether_or_not_state_is_copied() -> None:
    job = Job(4, nodes=2, doors=["a", "b"])
    kinds = [type(command) for command in job.said]
    assert kinds.count(PlaceData) == 2
    assert kinds.index(PlaceData) < kinds.index(SpawnWorker)
    assert placed(job) == {"n0": "b", "n1": "a"}


def test_agents_without_caches_are_told_nothing() -> None:
    assert placed(Job(4, nodes=2)) == {}


def test_a_lost_node_is_nobodys_mirror_until_it_is_back() -> None:
    job = Job(4, nodes=2, doors=["a", "b"]).trained(4)
    placed(job)
    job.tell(NodeLost(NodeId("n1"), "its connection ended"))
    assert placed(job) == {"n0": ""}
    job.tell(NodeJoined(NodeId("n1"), "host", 2, "store1", data="b2"))
    assert placed(job) == {"n0": "b2", "n1": "a"}


def test_a_node_that_was_given_back_is_nobodys_mirror_any_more() -> None:
    made = roster(3)
    places = DataPlaces(made)
    told(places)
    made.nodes[NodeId("n1")].stopped = True
    assert told(places) == {"n0": ("door2", ["door2"]), "n2": ("door0", ["door0"])}


def test_a_note_about_a_cache_is_for_people() -> None:
    job = Job(2).trained()
    job.tell(DataNoted(NodeId("n0"), "nobody makes batches ahead"))
    assert job.last(Noted).text == "nobody makes batches ahead"
