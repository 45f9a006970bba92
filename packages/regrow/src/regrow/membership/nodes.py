"""Nodes that register, are lost and come back.

The loss of a node ends its workers: its agent's connection has ended, and an agent without a coordinator ends its
workers. If no other node has room for its ranks, the job waits for the node to come back, on this machine or another,
while survivors keep their state; unless the job may go on with fewer replicas (`recovery/regroup.py`).
"""

from collections.abc import Sequence

from regrow.core import records as record
from regrow.core.exit_codes import NODE_LOST, RUN_AGAIN
from regrow.core.ids import Generation, Instant, NodeId
from regrow.core.messages import facts
from regrow.core.messages.copies import CopiesHeld
from regrow.membership import diagnosis as say
from regrow.membership.elastic.resize import Resizing
from regrow.membership.job import Job
from regrow.membership.recovery import said_at_end as say_end
from regrow.membership.recovery.formation import Generations
from regrow.membership.recovery.held_copies import HeldCopies
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.recovery.placement import NodeDomain, buddies
from regrow.membership.roster import NodeRecord, Stage, WorkerRecord
from regrow.membership.states import RUNNING, Building, Ended, Gathering, Releasing


class Nodes:
    """Decides about nodes; the ladder decides the consequences for workers.

    Args:
        job: the job of the nodes.
        ladder: repairs the loss of a node.
        generations: begins the first generation.
        copies: the copies of state on each node.
        resizing: may grow the world onto a new node.
    """

    def __init__(
        self, job: Job, ladder: Ladder, generations: Generations, copies: HeldCopies, resizing: Resizing
    ) -> None:
        self._job, self._ladder, self._generations = job, ladder, generations
        self._copies, self._resizing = copies, resizing
        self._placed: list[tuple[NodeId, str]] = []
        """Nodes that exchange copies of the state, with the endpoint at which each receives them."""
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders

    def joined(self, event: facts.NodeJoined, now: Instant) -> None:
        """Enter a node whose agent registered: of a gathering job, a lost one that is back, or an additional one."""
        node, gathering = self._roster.nodes.get(event.node), isinstance(self._job.state, Gathering)
        known = node is not None
        self._placed = []
        if node is None:
            node = self._roster.add_node(event)
        elif node.away:
            self._back(node, event, now)
        else:
            return
        complete = len(self._roster.living_nodes()) >= self._spec.nodes
        if complete and gathering:
            self._place_copies(self._roster.living_nodes())
            self._generations.build(Generation(1), now)
        elif not gathering:
            if not any(each.away and each.placed for each in self._roster.nodes.values()):
                self._place_copies(self._roster.member_nodes())
            self._resizing.node_came(node, event, now, new=not known)

    def lost(self, event: facts.NodeLost, now: Instant) -> None:
        """Give up the ranks of a node whose agent's connection ended; its workers end before they can act again."""
        node = self._roster.nodes.get(event.node)
        if node is None or node.away:
            return
        placed = self._away(node, now)
        if not isinstance(self._job.state, Gathering):
            self._give_up(placed, say.node_lost(node.node, event.reason), now, now - event.silent)

    def stopped(self, event: facts.NodeStopped, now: Instant) -> None:
        """Remove a node whose agent has ended, either on an order, once no worker was left there, or as announced."""
        node = self._roster.nodes.get(event.node)
        if node is not None and not node.away:
            node.stopped = True
            placed = self._away(node, now)
            self._give_up(placed, say.node_lost(node.node, "its agent has ended"), now, now)

    def formed(self) -> None:
        """Let the nodes that have ranks in the new generation exchange copies."""
        self._place_copies(self._roster.member_nodes())

    def _away(self, node: NodeRecord, now: Instant) -> list[WorkerRecord]:
        node.away_since = now
        self._copies.forget(node.node)
        self._resizing.changed()
        return self._bury(node, now)

    def _give_up(self, placed: list[WorkerRecord], cause: str, now: Instant, fault_at: Instant) -> None:
        match self._job.state:
            case Building() if placed:
                self._ladder.restart(cause, now)
            case state if isinstance(state, RUNNING) and placed:
                self._ladder.mend("node", placed, cause, now, fault_at)
                if not self._roster.living_nodes() and not isinstance(self._job.state, Ended):
                    self._ladder.restart(cause, now)
            case Releasing() if placed:
                self._job.end(RUN_AGAIN, say_end.lost_after_loop(cause, self._job.step), now)
            case _:
                pass

    def _bury(self, node: NodeRecord, now: Instant) -> list[WorkerRecord]:
        """Record the end of all workers of a node; returns those that held a rank and were not leaving it."""
        workers = [w for w in self._roster.workers.values() if w.node == node.node and w.stage is not Stage.GONE]
        for worker in workers:
            self._roster.move(worker, Stage.GONE, now)
            self._orders.write(record.WorkerGone(now, worker.worker, worker.rank, NODE_LOST, record.NODE_LOST))
        for forgotten in self._roster.forget_dead():
            self._job.errors.forget(forgotten)
        return [worker for worker in workers if worker.placed and not worker.leaver]

    def _back(self, node: NodeRecord, event: facts.NodeJoined, now: Instant) -> None:
        node.host, node.store = event.host, event.store
        node.copy_endpoint, node.domain = event.copy_endpoint, event.domain
        node.slots, node.away_since, node.failed_standbys, node.failed_candidates = event.slots, None, 0, 0
        node.leave_by, node.stopped, node.unpaid, node.table = None, False, False, 0
        self._roster.short[node.node] = None
        self._copies.apply(CopiesHeld(node.node, self._job.generation, []))
        if node.placed:
            self._job.incidents.climb("node")
        self._orders.note(f"{node.node} is back, on {event.host}", now)

    def _place_copies(self, nodes: Sequence[NodeRecord]) -> None:
        places = [(node.node, node.copy_endpoint) for node in nodes]
        if self._spec.buddy_every == 0 or places == self._placed:
            return
        self._placed = places
        for node, buddy in buddies([NodeDomain(each.node, each.domain) for each in nodes]).items():
            self._orders.place_copies(node, buddy)
