"""Copies of state in the memory of simulated agents: workers leave them before their end, and others read them."""

from collections.abc import Callable
from dataclasses import dataclass

from regrow.core.ids import NodeId, Rank, Seconds
from regrow.core.messages.copies import (
    CopiesHeld,
    CopySource,
    ForgetCopies,
    KeepState,
    KeptCopy,
    ReportCopies,
    StateKept,
)
from regrow.core.messages.unions import AgentFact
from regrow_lab.sim.script import Doing
from regrow_lab.sim.workers import SimWorker

_COPY_S: Seconds = 0.05
MemoryOrder = ReportCopies | ForgetCopies


@dataclass(frozen=True)
class CopyHost:
    """View of the world that agents' memory needs.

    Attributes:
        after: schedules an action, which is dropped if the node has another agent by then.
        jitter: a random time of about this length.
        say: sends a node's fact to the coordinator.
        reachable: true if a worker's agent runs.
    """

    after: Callable[[NodeId, Seconds, Callable[[], None]], None]
    jitter: Callable[[Seconds], Seconds]
    say: Callable[[NodeId, AgentFact], None]
    reachable: Callable[[SimWorker], bool]


class SimCopies:
    """Copies in the memory of the agents.

    Args:
        host: the world.
    """

    def __init__(self, host: CopyHost) -> None:
        self._host = host
        self._held: dict[str, dict[Rank, KeptCopy]] = {}
        self._at: dict[NodeId, str] = {}
        self._full: set[NodeId] = set()

    def open(self, node: NodeId, life: int) -> str:
        """Start a new agent's memory on a node; returns the address at which it serves copies."""
        self._at[node] = f"vault of {node}.{life}"
        self._held.setdefault(self._at[node], {})
        return self._at[node]

    def forget(self, node: NodeId) -> None:
        """Drop all copies that a node's agent held, as the agent is gone."""
        self._held.pop(self._at.pop(node, ""), None)

    def fill_up(self, node: NodeId) -> None:
        """Leave no memory for copies on this node from now on."""
        self._full.add(node)

    def keep(self, worker: SimWorker, order: KeepState) -> None:
        """Have a worker leave its state on its node; one that hangs does not, and sends no refusal either."""
        self._host.after(worker.spawn.node, self._host.jitter(_COPY_S), lambda: self._keep(worker, order))

    def _keep(self, worker: SimWorker, order: KeepState) -> None:
        node = worker.spawn.node
        if worker.doing is not Doing.HALTED or worker.hung or worker.stalled or not self._host.reachable(worker):
            return
        error = "there is no memory left" if node in self._full else ""
        error = error or ("" if worker.state == order.step else f"it stands at step {worker.state}")
        if not error:
            self._held[self._at[node]][worker.rank] = KeptCopy(worker.rank, worker.holding, order.step)
        self._host.say(node, StateKept(order.worker, order.step, error))

    def obey(self, order: MemoryOrder) -> None:
        """Have an agent report its copies, or drop them."""
        held = self._held.get(self._at.get(order.node, ""), {})
        if isinstance(order, ForgetCopies):
            held.clear()
        else:
            self._host.say(order.node, CopiesHeld(order.node, order.generation, list(held.values())))

    def read(self, source: CopySource) -> bool:
        """True if a worker can read this copy now."""
        held = self._held.get(source.endpoint, {}).get(source.rank)
        return held is not None and held.step == source.step
