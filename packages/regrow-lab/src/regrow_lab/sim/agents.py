"""Tables of generations in simulated agents: production code over a simulated network."""

from collections.abc import Callable
from dataclasses import dataclass

from regrow.agent.held_tables import Feasible, HeldTables
from regrow.agent.history import NodeHistory
from regrow.core.ids import NodeId, Seconds
from regrow.core.messages import facts
from regrow.core.messages.succession import NodeReport, ReportNode
from regrow.core.messages.tables import FetchTable, GenerationTable, TableMissed
from regrow.core.messages.unions import AgentFact, AgentOrder
from regrow_lab.sim.network import Network

_AGAIN_S: Seconds = 2.0


@dataclass(frozen=True)
class AgentHost:
    """View of the world that agents need.

    Attributes:
        network: carries messages between agents.
        after: schedules an action.
        say: sends a fact to the coordinator.
        carry_out: carries out a node's order once it is feasible.
    """

    network: Network
    after: Callable[[Seconds, Callable[[], None]], None]
    say: Callable[[NodeId, TableMissed | NodeReport], None]
    carry_out: Callable[[NodeId, Feasible], None]


class SimAgents:
    """All agents, by the address of their store: a new agent of the same node has a new address."""

    def __init__(self, host: AgentHost) -> None:
        self.host = host
        self._there: dict[str, SimAgent] = {}
        self._of: dict[NodeId, SimAgent] = {}

    def begin(self, joined: facts.NodeJoined) -> None:
        """Create an agent that is about to register; it may register twice."""
        if joined.store in self._there:
            return
        self._there[joined.store] = self._of[joined.node] = SimAgent(joined.node, joined.store, self)

    def end(self, node: NodeId) -> None:
        """Stop a node's agent."""
        self._there.pop(self._of[node].store, None)

    def obey(self, node: NodeId, order: AgentOrder) -> None:
        """Deliver an order to a node's agent."""
        self._of[node].obey(order)

    def reported(self, node: NodeId, fact: AgentFact) -> None:
        """Record a fact that a node's agent sends to the coordinator."""
        if node in self._of:
            self._of[node].history.sent(fact)

    def at(self, store: str) -> "SimAgent | None":
        """The agent at this address; None: it has stopped."""
        return self._there.get(store)

    def send(self, sender: str, receiver: str, what: Callable[["SimAgent"], None]) -> None:
        """Send a message from one agent to another."""

        def deliver() -> None:
            if (agent := self.at(receiver)) is not None:
                what(agent)

        self.host.network.send((sender, receiver), deliver)


class SimAgent:
    """One agent's tables.

    Args:
        node: its node.
        store: its address.
        agents: all agents.
    """

    def __init__(self, node: NodeId, store: str, agents: SimAgents) -> None:
        self.node, self.store = node, store
        self._agents = agents
        self.history = NodeHistory(node)
        self._held = HeldTables()
        self._pursued = 0
        self._askers: list[tuple[str, int]] = []

    def obey(self, order: AgentOrder) -> None:
        """Carry out an order now, or when the table that it needs has arrived."""
        self._do(self._held.take(order))
        missing = self._held.missing
        if missing <= self._pursued:
            return
        self._pursued = missing
        if isinstance(order, FetchTable) and order.table == missing:
            self._agents.send(self.store, order.source, lambda peer: peer.asked(self.store, missing))
            self._agents.host.after(order.within, lambda: self._miss(missing))
        else:
            self._miss(missing)

    def _miss(self, number: int) -> None:
        if self._held.missing == number and self._agents.at(self.store) is self:
            self._agents.host.say(self.node, TableMissed(self.node, number))
            self._agents.host.after(_AGAIN_S, lambda: self._miss(number))

    def asked(self, asker: str, number: int) -> None:
        """Handle another agent's request for a table; it is answered once the table is here."""
        self._askers.append((asker, number))
        self._answer()

    def came(self, table: GenerationTable) -> None:
        """Handle another agent's answer."""
        self._do(self._held.keep(table))

    def _do(self, feasible: list[Feasible]) -> None:
        for each in feasible:
            self.history.ordered(each)
            if isinstance(each, ReportNode):
                self._agents.host.say(self.node, self.history.report(each))
            else:
                self._agents.host.carry_out(self.node, each)
        self._answer()

    def _answer(self) -> None:
        askers, self._askers = self._askers, []
        for asker, number in askers:
            if (table := self._held.get(number)) is not None:
                self._give(asker, table)
            elif not self._held.is_over(number):
                self._askers.append((asker, number))

    def _give(self, asker: str, table: GenerationTable) -> None:
        self._agents.send(self.store, asker, lambda peer: peer.came(table))
