"""Four hosts of two ranks each, and a spare: a fault of every kind, each mended on the lowest rung that works.

Every job ends bitwise equal to the one that nobody disturbed, loses no step, and goes on within what docs/protocol.md
states ("How long it takes at most").
"""

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Self

import pytest
from tests.process.launching import PATIENCE, Running, Site, agents_below, site
from tests.process.network import Network, network
from tests.process.test_network import pid_of
from tests.process.test_nodes import assert_equal
from tests.process.test_spares import nodes_of
from tests.process.test_succession import worker_of
from tests.process.training import SCRIPTS, Outcome, outcome_of
from tests.process.warm import NETWORK

from regrow.core.ids import Instant, Rank, Seconds
from regrow.core.records import IncidentOpened, Record
from regrow.observe.ledger import read_records

pytestmark = pytest.mark.full

HOSTS, WORLD, SPARE = 5, 8, 4
STEPS, STRUCK = 40, 8
LEASE_S: Seconds = 10.0
"""Silence after which a node is lost; and time for the agents to find another coordinator."""
HANG_S: Seconds = 6.0
STANDSTILL_S: Seconds = 7.0
"""Agents tell of a standstill after 5 s."""
MENDED_S: Seconds = 20.0 + 2.0 + 2.0
"""From the news of a fault until every rank has committed again: a halt, a standby's answer, a table."""


class Fleet:
    """A job on all hosts, a launcher each. Steps take their time until `hurry`."""

    def __init__(self, here: Site, hosts: Network, name: str, *flags: str) -> None:
        self.here, self.hosts, self.name, self._flags = here, hosts, name, flags
        self.launchers: dict[int, Running] = {}
        self.told = 0
        """Node whose launcher reports the events: the coordinator's."""
        self._stack = ExitStack()
        self._hurry = here.folder / "hurry"

    def __enter__(self) -> Self:
        self._hurry.unlink(missing_ok=True)
        for host in self.hosts.hosts:
            self.start(host)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, host: int) -> None:
        """The launcher of a host."""
        words = ["run", "--job", self.name, "--nnodes", str(HOSTS), "--nproc-per-node", "2", "--spares", "1"]
        words += ["--rdzv-endpoint", f"{self.hosts.address(0)}:29400", "--node-rank", str(host), *self._flags]
        script = [str(SCRIPTS / "train_small.py"), "--steps", str(STEPS), "--pace", "0.2", "--say-steps"]
        around = {"REGROW_TOKEN": "all of them know", NETWORK: self.hosts.name(host)}
        script += ["--out", str(self.here.folder / f"{self.name}.out")]
        started = self.here.start(*words, "--bind", self.hosts.address(host), *script, **around)
        self.launchers[host] = self._stack.enter_context(started)

    def wait_for(self, text: str) -> None:
        """The coordinator says that."""
        self.launchers[self.told].wait_for(text)

    def lose(self, host: int) -> None:
        """All of a host's processes end, and its launcher is none any more."""
        self.hosts.kill(host)
        self.launchers.pop(host).wait()

    def elected(self) -> None:
        """Another launcher hosts the coordinator than before."""
        former, until = self.told, time.monotonic() + 6 * LEASE_S
        while time.monotonic() < until:
            for host, launcher in self.launchers.items():
                launcher.drain()
                if host != former and f"node{host} was elected in its place" in launcher.output:
                    self.told = host
                    return
            time.sleep(0.05)
        raise AssertionError("nobody was elected: " + "\n".join(each.output for each in self.launchers.values()))

    def agent(self, host: int) -> int:
        """The process of a host's agent."""
        (agent,) = agents_below(self.launchers[host])
        return agent

    def until(self, kind: type[Record]) -> None:
        """The coordinator has written a record of this kind."""
        until = time.monotonic() + PATIENCE
        while not any(isinstance(line, kind) for line in read_records(self.here.home / "jobs" / self.name)):
            assert time.monotonic() < until, kind
            time.sleep(0.01)

    def end(self) -> Outcome:
        """Of the job: no step takes its time any more, and every launcher that is left ends with 0."""
        self._hurry.touch()
        codes = {host: launcher.wait() for host, launcher in self.launchers.items()}
        said = "\n".join(f"--- {host}\n{launcher.output}" for host, launcher in self.launchers.items())
        assert set(codes.values()) == {0}, (codes, said)
        return outcome_of(self.here, self.name, WORLD, 0, said)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("four")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(here: Site, hosts: Network) -> Outcome:
    with Fleet(here, hosts, "undisturbed") as fleet:
        outcome = fleet.end()
    assert outcome.ledger.incidents == []
    assert nodes_of(here, "undisturbed", WORLD) == [[f"node{rank // 2}" for rank in range(WORLD)]]
    return outcome


@dataclass(frozen=True)
class Expected:
    """Expectations of the incidents of a case.

    `known`: within which time a fault of this kind is known. `heard`: how long a host may be heard after it.
    `since`: when it struck, or when what was missing came.
    """

    kind: str
    rung: str
    ranks: set[int]
    known: Seconds = 0.0
    heard: Seconds = 0.0
    since: Instant = field(default_factory=time.monotonic)


def node_is_killed(fleet: Fleet) -> Expected:
    expected = Expected("node", "node", {2, 3})
    fleet.lose(1)
    return expected


def _cut_off(fleet: Fleet, ways: list[tuple[int, int]], heard: Seconds = 0.0) -> Expected:
    """Its ranks go to the spare; when its link is back, it is the spare."""
    expected = Expected("node", "node", {2, 3}, LEASE_S, heard)
    if not ways:
        fleet.hosts.cut(1)
    for way in ways:
        fleet.hosts.lose(*way)
    fleet.wait_for("goes on after")
    for way in ways:
        fleet.hosts.find(*way)
    fleet.hosts.join(1)
    fleet.wait_for("node1 is back")
    return expected


def link_is_cut_both_ways(fleet: Fleet) -> Expected:
    return _cut_off(fleet, [])


def link_is_cut_in_what_it_sends(fleet: Fleet) -> Expected:
    return _cut_off(fleet, [(1, other) for other in (0, 2, 3, 4)])


def link_is_cut_in_what_it_is_sent(fleet: Fleet) -> Expected:
    """Cut the packets to one node. It reports the standstill once: no later message is sent on its way."""
    return _cut_off(fleet, [(other, 1) for other in (0, 2, 3, 4)], STANDSTILL_S)


def rank_is_killed_while_all_is_200_ms_away(fleet: Fleet) -> Expected:
    return _killed_far_away(fleet, delay=0.2)


def rank_is_killed_while_5_of_100_frames_are_lost(fleet: Fleet) -> Expected:
    return _killed_far_away(fleet, loss=0.05)


def _killed_far_away(fleet: Fleet, **far: float) -> Expected:
    """The links themselves are no fault: steps take longer, and nobody is given up."""
    victim = pid_of(fleet.here, fleet.name, Rank(3))
    fleet.hosts.weather(**far)
    fleet.wait_for(f"step {STRUCK + 3}\n")
    expected = Expected("exit", "fork", {3})
    os.kill(victim, signal.SIGKILL)
    fleet.wait_for("goes on after")
    fleet.hosts.weather()
    return expected


def rank_is_stopped(fleet: Fleet) -> Expected:
    victim = pid_of(fleet.here, fleet.name, Rank(3))
    expected = Expected("hang", "fork", {3}, 2 * HANG_S)
    os.kill(victim, signal.SIGSTOP)
    return expected


def agent_is_stopped(fleet: Fleet) -> Expected:
    """It is shut out when it goes on, and its node is the spare."""
    agent, expected = fleet.agent(1), Expected("node", "node", {2, 3}, LEASE_S)
    os.kill(agent, signal.SIGSTOP)
    fleet.wait_for("goes on after")
    os.kill(agent, signal.SIGCONT)
    fleet.wait_for("node1 is back")
    return expected


def coordinator_is_stopped(fleet: Fleet) -> Expected:
    """A rank is killed, so it is needed, and another is elected; its node is lost too, and is the spare in the end."""
    victim = pid_of(fleet.here, fleet.name, Rank(3))
    expected = Expected("node", "node", {0, 1, 3}, 3 * LEASE_S)
    fleet.launchers[0].signal(signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    fleet.elected()
    fleet.wait_for("goes on after")
    fleet.launchers[0].signal(signal.SIGCONT)
    fleet.wait_for("node0 is back")
    return expected


def coordinators_link_is_cut(fleet: Fleet) -> Expected:
    """Another is elected, and its node is a spare of that one when the link is back."""
    expected = Expected("node", "node", {0, 1}, 3 * LEASE_S)
    fleet.hosts.cut(0)
    fleet.elected()
    fleet.wait_for("goes on after")
    fleet.hosts.join(0)
    fleet.wait_for("node0 is back")
    return expected


def coordinators_node_is_killed(fleet: Fleet) -> Expected:
    expected = Expected("node", "node", {0, 1}, LEASE_S)
    fleet.lose(0)
    fleet.elected()
    return expected


def spare_is_dead_when_it_is_needed(fleet: Fleet) -> Expected:
    """Without power: nobody knows that it is dead when it is given the ranks. The lost node is waited for then."""
    fleet.hosts.cut(SPARE)
    fleet.lose(SPARE)
    fleet.lose(1)
    fleet.until(IncidentOpened)
    fleet.start(1)
    return Expected("node", "node", {2, 3}, LEASE_S)


def spare_dies_as_it_is_promoted(fleet: Fleet) -> Expected:
    fleet.lose(1)
    fleet.until(IncidentOpened)
    fleet.lose(SPARE)
    fleet.start(1)
    return Expected("node", "node", {2, 3})


FAR = (rank_is_killed_while_all_is_200_ms_away, rank_is_killed_while_5_of_100_frames_are_lost)
CASES = (
    node_is_killed,
    link_is_cut_both_ways,
    link_is_cut_in_what_it_sends,
    link_is_cut_in_what_it_is_sent,
    *FAR,
    rank_is_stopped,
    agent_is_stopped,
    coordinator_is_stopped,
    coordinators_link_is_cut,
    coordinators_node_is_killed,
    spare_is_dead_when_it_is_needed,
    spare_dies_as_it_is_promoted,
)


@pytest.mark.parametrize("happens", CASES, ids=lambda happens: happens.__name__)
def test_a_fault_is_mended(
    here: Site,
    hosts: Network,
    undisturbed: Outcome,
    happens: Callable[[Fleet], Expected],
    record_property: Callable[[str, float], None],
) -> None:
    name = happens.__name__.replace("_", "-")
    flags = ("--hang-timeout", f"{HANG_S:g}") if happens is rank_is_stopped else ()
    with network(HOSTS, far=True) if happens in FAR else nullcontext(hosts) as around:
        try:
            with Fleet(here, around, name, *flags) as fleet:
                fleet.wait_for(f"step {STRUCK}\n")
                expected = happens(fleet)
                fleet.wait_for("goes on after")
                outcome = fleet.end()
        finally:
            for host in around.hosts:
                around.join(host)
    here.assert_no_process_left()
    for left in (*here.runtime.iterdir(), *here.caches()):
        shutil.rmtree(left)  # sockets and memory of hosts that have lost all their processes
    assert_mended(outcome, undisturbed, expected, record_property)


def test_one_that_was_elected_and_is_deposed_follows_the_next(here: Site, hosts: Network, undisturbed: Outcome) -> None:
    with Fleet(here, hosts, "deposed-twice") as fleet:
        fleet.wait_for(f"step {STRUCK}\n")
        fleet.lose(0)
        fleet.elected()
        fleet.wait_for("goes on after")
        second, other = fleet.launchers[fleet.told], 2 if fleet.told == 1 else 1
        for launcher in fleet.launchers.values():
            launcher.wait_for("follows the job's coordinator to")
        second.signal(signal.SIGSTOP)
        os.kill(worker_of(hosts, other), signal.SIGKILL)
        fleet.elected()
        second.signal(signal.SIGCONT)
        fleet.wait_for("goes on after")
        second.wait_for("another coordinator was elected meanwhile")
        outcome = fleet.end()
    here.assert_no_process_left()
    for left in (*here.runtime.iterdir(), *here.caches()):
        shutil.rmtree(left)
    assert outcome.finals == undisturbed.finals
    assert outcome.ledger.steps_lost == 0


def assert_mended(
    outcome: Outcome, undisturbed: Outcome, expected: Expected, note: Callable[[str, float], None]
) -> None:
    assert_equal(outcome, undisturbed, lost=expected.ranks)
    incidents = outcome.ledger.incidents
    assert {(incident.kind, incident.rung) for incident in incidents} == {(expected.kind, expected.rung)}
    assert set(itertools.chain(*(incident.ranks for incident in incidents))) == expected.ranks
    took = incidents[-1].at - expected.since
    note("seconds until every rank had committed again", round(took, 2))
    assert took < expected.known + expected.heard + MENDED_S
    assert sum(each.total for each in incidents) > took - expected.heard - 3.0, "until it was known counts too"
