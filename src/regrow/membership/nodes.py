"""Nodes that register, are lost and come back.

A lost node takes its workers with it: its agent's connection has ended, and an agent without a coordinator ends its
workers. Its ranks wait for it to come back, on this machine or another, and the survivors keep their state meanwhile.
"""

from regrow.core import events as record
from regrow.core.copies import CopiesHeld
from regrow.core.ids import Generation, Instant
from regrow.core.messages import NodeJoined, NodeLost
from regrow.membership import deadlines
from regrow.membership import diagnosis as say
from regrow.membership.data_places import DataPlaces
from regrow.membership.ladder import RUN_AGAIN, Ladder
from regrow.membership.placement import Place, buddies
from regrow.membership.roster import NodeRecord, Stage, WorkerRecord
from regrow.membership.states import Building, Ended, Forming, Gathering, Mending, Releasing, Training

_LOST_CODE = -9
"""What is written down as the exit code of workers whose node was lost: nobody saw their end."""


class Nodes:
    """Decides about nodes; what follows for workers is the ladder's.

    Args:
        ladder: the job's state.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._roster, self._facts, self._orders = ladder.roster, ladder.facts, ladder.orders
        self._data = DataPlaces(ladder.roster)

    def joined(self, event: NodeJoined, now: Instant) -> None:
        """An agent registered: a new node of a job that gathers, or a lost one that is back."""
        node, gathering = self._roster.nodes.get(event.node), isinstance(self._ladder.state, Gathering)
        if node is None and gathering:
            self._roster.add_node(
                event.node, event.host, event.store, vault=event.vault, domain=event.domain, data=event.data
            )
        elif node is not None and node.away:
            self._back(node, event, now)
        else:
            return
        complete = len(self._roster.living_nodes()) == self._facts.nodes
        if complete:
            self._place_copies()
        if complete or not gathering:
            self._place_data()
        if complete and gathering:
            self._ladder.build(Generation(1), now)

    def lost(self, event: NodeLost, now: Instant) -> None:
        """An agent's connection has ended: all its workers are gone, or will be before they can do anything."""
        node = self._roster.nodes.get(event.node)
        if node is None or node.away:
            return
        node.away_since = now
        self._ladder.copies.forget(node.node)
        self._data.lost(node.node)
        if isinstance(self._ladder.state, Gathering):
            return
        self._place_data()
        seated = self._bury(node, now)
        cause = say.node_lost(node.node, event.reason)
        if seated:
            ranks = sorted(worker.rank for worker in seated if worker.rank is not None)
            self._orders.note(say.node_waited_for(node.node, ranks, self._facts.node_deadline), now)
        self._give_up(seated, cause, now)

    def overdue(self, now: Instant) -> None:
        """A lost node that is waited for has not come back in time: the job cannot go on."""
        late = deadlines.overdue(self._ladder.state, self._roster, self._facts, now)
        if late:
            self._ladder.end(
                RUN_AGAIN, say.nodes_stay_away([node.node for node in late], self._facts.node_deadline), now
            )

    def _give_up(self, seated: list[WorkerRecord], cause: str, now: Instant) -> None:
        match self._ladder.state:
            case Building() if seated:
                self._ladder.restart(cause, now)
            case Forming() | Training() | Mending():
                self._ladder.mend("node", seated, cause, now, now)
                if not self._roster.living_nodes() and not isinstance(self._ladder.state, Ended):
                    self._ladder.restart(cause, now)
            case Releasing() if seated:
                self._ladder.end(RUN_AGAIN, say.lost_after_loop(cause), now)
            case _:
                pass

    def _bury(self, node: NodeRecord, now: Instant) -> list[WorkerRecord]:
        """Enter the end of all workers of a node; returns those that held a rank."""
        workers = [w for w in self._roster.workers.values() if w.node == node.node and w.stage is not Stage.GONE]
        for worker in workers:
            self._roster.move(worker, Stage.GONE, now)
            self._orders.write(
                record.WorkerGone(
                    at=now, worker=worker.worker, rank=worker.rank, code=_LOST_CODE, reason=record.NODE_LOST
                )
            )
        for forgotten in self._roster.forget_dead():
            self._ladder.errors.forget(forgotten)
        return [worker for worker in workers if worker.seated]

    def _back(self, node: NodeRecord, event: NodeJoined, now: Instant) -> None:
        node.host, node.store, node.vault, node.domain = event.host, event.store, event.vault, event.domain
        node.data = event.data
        node.away_since, node.failed_standbys = None, 0
        self._roster.short.add(node.node)
        self._ladder.copies.tell(CopiesHeld(node.node, self._ladder.generation, []))
        self._ladder.incidents.climb("node")
        self._orders.note(f"{node.node} is back, on {event.host}", now)

    def _place_copies(self) -> None:
        if self._facts.buddy_every == 0:
            return
        nodes = self._roster.living_nodes()
        for node, buddy in buddies([Place(each.node, each.domain) for each in nodes]).items():
            self._orders.place_copies(node, buddy)

    def _place_data(self) -> None:
        for order in self._data.news():
            self._orders.add(order)
