"""Connections of simulated agents to the coordinator, and to its successor after a loss."""

from collections.abc import Callable, Collection, Hashable
from functools import partial

from regrow.core.ids import NodeId, Seconds
from regrow.core.messages import facts
from regrow.core.messages.unions import Fact
from regrow.membership.succession.memory import CoordinatorLoss
from regrow_lab.sim.coordinator import SimCoordinator
from regrow_lab.sim.network import Network, Timeline

_ELECTED_S: Seconds = 2.0
"""Approximate time without a coordinator."""
_TURN_S: Seconds = 1.0
"""Approximate time for agents to find the next coordinator."""


class Uplinks:
    """Messages to the coordinator. Messages in flight when it is lost are lost in both directions; later ones wait.

    Args:
        network: carries the messages.
        report: passes a fact to the coordinator.
    """

    def __init__(self, network: Network, report: Callable[[Fact], None]) -> None:
        self._network, self._report = network, report
        self.term = 1
        """Term of the present or next coordinator."""
        self._terms: dict[NodeId, int] = {}
        self._waiting: dict[NodeId, list[tuple[Hashable, Fact, bool, Seconds]]] = {}

    def lose_all(self) -> None:
        """Cut all connections, as the coordinator is lost."""
        self.term += 1

    def term_of(self, node: NodeId) -> int | None:
        """Term in which a node's agent is connected; None: it is not connected to the present coordinator."""
        return self.term if self._terms.get(node) == self.term else None

    def forget(self, node: NodeId) -> None:
        """Drop a node's agent that is gone, with its waiting messages."""
        self._terms.pop(node, None)
        self._waiting.pop(node, None)

    def connect(self, node: NodeId) -> None:
        """Connect an agent that has registered, and send its waiting messages."""
        self._terms[node] = self.term
        for channel, fact, sure, extra in self._waiting.pop(node, []):
            self.send(node, channel, fact, sure=sure, extra=extra)

    def send(self, node: NodeId, channel: Hashable, fact: Fact, *, sure: bool = False, extra: Seconds = 0.0) -> None:
        """Carry a fact to the coordinator. `sure`, `extra`: as in `Network.send`."""
        term = self.term_of(node)
        if term is None and self._terms.get(node) is not None:
            self._waiting.setdefault(node, []).append((channel, fact, sure, extra))
            return

        def deliver() -> None:
            if term is None or term == self.term:
                self._report(fact)

        self._network.send(channel, deliver, sure=sure, extra=extra)


class SimLeaders:
    """Agents registered with the coordinator; when it is lost with its node, another is elected.

    Args:
        coordinator: the present one.
        uplinks: the agents' connections to it.
        timeline: of the simulation.
        jitter: a random time of about this length.
        there: nodes whose agents run.
    """

    def __init__(
        self,
        coordinator: SimCoordinator,
        uplinks: Uplinks,
        timeline: Timeline,
        jitter: Callable[[Seconds], Seconds],
        there: Callable[[], Collection[NodeId]],
    ) -> None:
        self._coordinator, self._uplinks, self._timeline = coordinator, uplinks, timeline
        self._jitter, self._there = jitter, there
        self._joined: dict[NodeId, facts.NodeJoined] = {}

    def register(self, joined: facts.NodeJoined) -> None:
        """Register an agent, for the first time or with another coordinator."""
        self._joined[joined.node] = joined
        self._coordinator.laws.joined(joined)
        self._uplinks.connect(joined.node)
        self._coordinator.report(joined)

    def report_lost(self, fact: facts.NodeLost | facts.NodeStopped) -> None:
        """Report that an agent is gone; only a coordinator with which it had registered learns that."""
        known = self._uplinks.term_of(fact.node) is not None
        self._uplinks.forget(fact.node)
        self._coordinator.laws.lost(fact.node)
        if known:
            self._coordinator.report(fact)

    def lose(self, node: NodeId) -> None:
        """Lose the coordinator together with its node."""
        self._uplinks.lose_all()
        self._coordinator.lose()
        loss = CoordinatorLoss(node, self._timeline.now)
        self._timeline.after(self._jitter(_ELECTED_S), lambda: self._elected(loss))

    def _elected(self, loss: CoordinatorLoss) -> None:
        self._coordinator.succeed(loss)
        for node in sorted(self._there()):
            self._timeline.after(self._jitter(_TURN_S), partial(self._turn, self._joined[node], self._uplinks.term))

    def _turn(self, joined: facts.NodeJoined, term: int) -> None:
        same = self._joined[joined.node] is joined and joined.node in self._there()
        if same and self._uplinks.term == term:
            self.register(joined)
