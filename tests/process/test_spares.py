"""A spare node takes the ranks of a lost one at once; the lost one is the spare when it is back."""

import os
import signal
from collections.abc import Iterator

import pytest
from tests.process.launching import Running, Site, agents_below, site
from tests.process.test_nodes import STEPS, WORLD, agents_of, assert_equal, end, start
from tests.process.training import Outcome, train

from regrow.core.records import GenerationFormed
from regrow.observe.ledger import read_records

SPARED = ("--local-nodes", "3", "--spares", "1", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("spares")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    outcome = train(here, "undisturbed", world=WORLD, steps=STEPS)
    assert outcome.code == 0, outcome.output
    return outcome


def nodes_of(here: Site, name: str, world: int = WORLD) -> list[list[str]]:
    """The nodes of the ranks, of each generation that stood."""
    formed = [line for line in read_records(here.home / "jobs" / name) if isinstance(line, GenerationFormed)]
    return [[line.workers[str(rank)].split(".")[0] for rank in range(world)] for line in formed]


def kill(agents: dict[str, int], *nodes: str) -> None:
    for node in nodes:
        os.kill(agents[node], signal.SIGKILL)


def all_agents(here: Site, name: str, job: Running) -> dict[str, int]:
    """Of the spare too, whose workers hold no rank."""
    agents = agents_of(here, name, job)
    assert set(agents) == {"node0", "node1"}, "the spare holds no rank"
    job.wait_for("step 10\n")
    return agents


@pytest.mark.parametrize(("lost", "ranks"), [("node0", {0, 1}), ("node1", {2, 3})])
def test_a_spare_takes_the_ranks_of_a_lost_node_without_waiting_for_it(
    here: Site, undisturbed: Outcome, lost: str, ranks: set[int]
) -> None:
    name = f"spare-{lost}"
    with start(here, name, *SPARED) as job:
        agents = all_agents(here, name, job)
        kill(agents, lost)
        job.wait_for("goes on after")
        outcome = end(here, name, job)
    assert_equal(outcome, undisturbed, lost=ranks)
    (incident,) = outcome.ledger.incidents
    assert (incident.kind, incident.rung, set(incident.ranks)) == ("node", "node", ranks)
    before, after = nodes_of(here, name)
    assert [new for old, new in zip(before, after, strict=True) if old == lost] == ["node2", "node2"]
    here.assert_nothing_left()


def test_a_spare_that_dies_as_it_is_needed_is_done_without(here: Site, undisturbed: Outcome) -> None:
    with start(here, "both", *SPARED) as job:
        agents = all_agents(here, "both", job)
        (spare,) = set(agents_below(job)) - set(agents.values())
        os.kill(spare, signal.SIGSTOP)  # else it may have taken the ranks before it dies
        kill(agents | {"node2": spare}, "node1", "node2")
        job.wait_for("goes on after")
        outcome = end(here, "both", job)
    assert_equal(outcome, undisturbed, lost={2, 3})
    (incident,) = outcome.ledger.incidents
    assert (incident.rung, set(incident.ranks)) == ("node", {2, 3})


def test_a_lost_node_that_is_back_is_the_spare_of_the_next(here: Site, undisturbed: Outcome) -> None:
    with start(here, "turns", *SPARED) as job:
        agents = all_agents(here, "turns", job)
        kill(agents, "node1")
        job.wait_for("node1 is back")
        job.wait_for("goes on after")
        kill(agents, "node0")
        job.wait_for("goes on after", times=2)
        outcome = end(here, "turns", job)
    assert_equal(outcome, undisturbed, lost={0, 1, 2, 3})
    assert [sorted(set(nodes)) for nodes in nodes_of(here, "turns")] == [
        ["node0", "node1"],
        ["node0", "node2"],
        ["node1", "node2"],
    ]
