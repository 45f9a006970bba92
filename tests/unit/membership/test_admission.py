"""Admission of nodes to a job, their names, and the order in which the machine hears of them."""

from collections.abc import Iterator

import pytest

from regrow.core.config import Script
from regrow.core.errors import UsageError
from regrow.core.ids import JobId, NodeId
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import Warmth
from regrow.membership.admission import Admission, JoinOffer, JoinRequest


def spec(nodes: int, most: int = 0) -> JobSpec:
    return JobSpec(JobId("j"), 1, nodes, 0, Warmth.BUILT, 1, 60.0, None, False, most_nodes=most)


def named(*names: str) -> list[NodeId]:
    return [NodeId(name) for name in names]


def admission(nodes: int, most: int = 0) -> Admission:
    return Admission(spec(nodes, most), named(*(f"node{rank}" for rank in range(nodes))))


def offered(asked: Admission, connected: list[NodeId], name: str = "") -> tuple[str, int]:
    template = JoinOffer(spec(1), Script("train.py", []), "/work")
    made = asked.offer(template, JoinRequest(NodeId(name)), connected)
    assert made.script == template.script
    return made.node, made.node_rank


def test_the_machine_hears_of_the_first_nodes_in_their_order_and_of_others_after_them() -> None:
    made = admission(2, 4)
    assert made.introduce(NodeId("spot"), named("spot")) == []
    assert made.introduce(NodeId("node1"), named("spot", "node1")) == []
    assert made.introduce(NodeId("node0"), named("spot", "node1", "node0")) == named("node0", "node1", "spot")
    assert made.introduce(NodeId("node1"), named("spot", "node0", "node1")) == named("node1"), "it is back"
    assert made.introduce(NodeId("late"), named("spot", "node0", "node1", "late")) == named("late")


def test_a_node_that_gave_up_before_the_job_began_holds_nobody_up() -> None:
    made = admission(1, 3)
    assert made.introduce(NodeId("a"), named("a")) == []
    assert made.introduce(NodeId("node0"), named("node0")) == named("node0")
    assert made.introduce(NodeId("b"), named("node0", "b")) == named("b")


def test_each_node_that_asks_is_given_the_next_free_name() -> None:
    made = admission(1, 9)
    here = named("node0")
    assert offered(made, here) == ("node1", 1)
    assert offered(made, here) == ("node2", 2), "the first one may be on its way"
    assert offered(made, [*here, NodeId("node3")]) == ("node4", 4)
    assert offered(made, here, "spot") == ("spot", 5)


def test_names_that_are_taken_or_are_none_are_refused() -> None:
    made = admission(2, 4)
    made.introduce(NodeId("node0"), named("node0"))
    with pytest.raises(UsageError, match="node0 is in the job already"):
        offered(made, named("node0"), "node0")
    with pytest.raises(UsageError, match="one of the nodes that the job starts on"):
        offered(made, named("node0"), "node1")
    with pytest.raises(UsageError, match="cannot name a node"):
        offered(made, named("node0"), "../node")


def test_no_more_nodes_than_were_agreed_upon_are_let_in_at_once() -> None:
    made = admission(1, 2)
    assert made.refusal(NodeId("a"), []) is None
    made.introduce(NodeId("node0"), named("node0"))
    made.introduce(NodeId("a"), named("node0", "a"))
    assert made.refusal(NodeId("b"), named("node0", "a")) == (
        "this job has at most 2 nodes",
        "start it with more in --nnodes MIN:MAX",
    )
    assert made.refusal(NodeId("a"), named("node0", "a")) is None, "its agent may be there again"
    assert made.refusal(NodeId("b"), named("node0")) is None, "a has left"
    with pytest.raises(UsageError, match="at most 2 nodes"):
        offered(made, named("node0", "a"))


def test_the_nodes_that_a_job_starts_on_have_a_place_before_they_come_and_when_they_come_back() -> None:
    made = admission(2)
    assert made.refusal(NodeId("node1"), named("node0")) is None
    refused = made.refusal(NodeId("other"), named("node0"))
    assert refused == ("this job has at most 2 nodes", "start it with --nnodes MIN:MAX")
    made.introduce(NodeId("node0"), named("node0"))
    made.introduce(NodeId("node1"), named("node0", "node1"))
    assert made.refusal(NodeId("node1"), named("node0")) is None


def test_of_thousands_that_register_nobody_is_looked_at_again_for_each() -> None:
    nodes = 3000
    made = admission(nodes, nodes + 2)

    class Here(dict[NodeId, None]):
        looks = 0

        def __iter__(self) -> Iterator[NodeId]:
            self.looks += 1
            return super().__iter__()

    here, told = Here(), []
    for node in [NodeId("spot"), *reversed(named(*(f"node{rank}" for rank in range(nodes)))), NodeId("late")]:
        here[node] = None
        told += made.introduce(node, here)
    assert told == [*named(*(f"node{rank}" for rank in range(nodes))), NodeId("spot"), NodeId("late")]
    assert here.looks == 1, "all that are connected were gone through for each that came"


def test_an_elected_coordinator_gives_nobody_the_name_of_a_node_that_it_has_not_heard_of_yet() -> None:
    made = Admission(spec(3, 3), None, named("node0", "node1", "node4"))
    assert [offered(made, [])[0] for _ in range(2)] == ["node3", "node5"]
    assert offered(made, [], "node4")[0] == "node4", "who was lost and is back may say who it is"
