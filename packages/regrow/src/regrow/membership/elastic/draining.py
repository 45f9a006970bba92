"""Nodes that are to be given back: refusals, the world without them, and the end of their agents."""

from regrow.core.ids import Instant, Seconds
from regrow.core.messages import facts, orders
from regrow.membership import diagnosis as say
from regrow.membership import scaling
from regrow.membership.elastic.resize_boundary import ResizeBoundary, ResizePlan, ResizeWay
from regrow.membership.job import Job, WantedSize
from regrow.membership.orders import AnswerScale
from regrow.membership.recovery.regroup import Regroup
from regrow.membership.roster import NodeRecord
from regrow.membership.states import Closing, Mending, Releasing

_STAND_S: Seconds = 5.0
"""Part of the grace period that is kept for moving ranks or stopping, beside the build time of replacements."""


class Draining:
    """Decides about the nodes that are to be given back.

    Args:
        job: the job of the nodes.
        size: the wanted size of the world.
        regroup: knows which ranks may leave.
        resize_boundary: a change of the world that may be under way.
    """

    def __init__(self, job: Job, size: WantedSize, regroup: Regroup, resize_boundary: ResizeBoundary) -> None:
        self._job, self._size, self._regroup, self._resize_boundary = job, size, regroup, resize_boundary
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self._nodes: list[NodeRecord] = []
        self._reported: set[str] = set()
        """Drains that were reported as impossible."""

    @property
    def leaving(self) -> list[NodeRecord]:
        """The nodes that are to be given back and still have ranks."""
        return [node for node in self._nodes if node.placed]

    def reconsider(self) -> None:
        """Forget that drains were reported as impossible, because there is more room now."""
        self._reported.clear()

    def requested(self, event: facts.DrainRequested, now: Instant) -> None:
        """Accept or refuse a requested drain, and answer at once."""
        refusal = self._refusal(event)
        if not refusal:
            self.begin(event, now)
        self._orders.add_answer(AnswerScale(not refusal, refusal or say.drain_accepted(event.node, event.grace)))

    def _refusal(self, event: facts.DrainRequested) -> str:
        """Reason why a node cannot be given back; empty: it can. An announced (`certain`) drain is never refused."""
        job, there = self._job, {node.node: node for node in self._roster.living_nodes()}
        node = there.get(event.node)
        if node is None:
            return say.no_such_node(event.node, sorted(there))
        if event.certain:
            return ""
        if isinstance(job.state, Closing | Releasing):
            return "the job has run its last step"
        if node.leave_by is not None:
            return say.drains_already(node.node, node.leave_reason)
        room = sum(each.slots for each in self._roster.usable_nodes() if each is not node) // self._spec.unit
        fixed = self._regroup.fixed() if node.placed else ""
        least = job.replicas if fixed else self._size.limits.least
        if node.placed and (room < least or self._size.limits.fit(min(self._size.wanted, room)) is None):
            return say.drain_leaves_too_few(node.node, room, least, fixed)
        return ""

    def begin(self, event: facts.NodeDraining | facts.DrainRequested, now: Instant) -> None:
        """Begin a drain: nothing more is started on the node, and its ranks leave it at the next boundary."""
        node = self._roster.nodes.get(event.node)
        if node is None or node.away or self._job.stopping:
            return
        if node.leave_by is None:
            self._orders.note(say.node_drains(node.node, event.grace, event.reason), now)
        node.leave_by, node.leave_reason = now + event.grace, event.reason
        if node.placed:
            self._resize_boundary.hurry(node.leave_by, now)
        if node not in self._nodes:
            self._nodes.append(node)
        self._reported.clear()

    def let_go(self, now: Instant) -> None:
        """Stop the agents of draining nodes that have no workers left."""
        for node in [node for node in self._nodes if node.leave_by is None or node.away or node.stopped]:
            self._nodes.remove(node)
        between = isinstance(self._job.state, Mending)
        for node in self._nodes:
            if node.placed or node.leave_by is None:
                continue
            if between and now < node.leave_by:
                continue  # Its agent still needs the step at which the others go on.
            for standby in list(node.standbys.values()):
                self._orders.fence(standby, "its node is given back", now)
            if not node.others:
                node.stopped = True
                self._orders.add(orders.StopNode(node.node, node.leave_reason, max(1.0, node.leave_by - now)))

    def plan(self, now: Instant, *, free: int, most: int) -> ResizePlan | None:
        """Plan the world without the nodes that are to be given back; None: no change.

        Chooses the first that is possible: fewer replicas; a move of as many ranks as other nodes have room for, and
        other ranks have the state of; further training until ended workers have freed their slots; a stop in time.

        Args:
            free: number of ranks that other nodes have room for.
            most: largest number of replicas to try.
        """
        job, limits, leaving = self._job, self._size.limits, self.leaving
        moving = sorted(w.rank for node in leaving for w in node.placed.values() if w.rank is not None)
        staying = job.replicas - len({rank // self._spec.unit for rank in moving})
        reason = "; ".join(f"{node.node} is given back: {node.leave_reason}" for node in leaving)
        by = min(node.leave_by for node in leaving if node.leave_by is not None)
        fixed = self._regroup.fixed()
        size = None if fixed else limits.fit(min(self._size.wanted, staying))
        if size is not None:
            return ResizePlan("preempt", size, (), reason, by=by)
        movable = self._regroup.dispensable(moving)[:free]
        if movable:
            return ResizePlan("preempt", job.replicas, tuple(movable), reason, ResizeWay.MOVE, by)
        size = limits.next_above(job.replicas)
        alone = staying == 0 and not fixed
        if alone and size is not None and size <= most and free // self._spec.unit >= size - job.replicas:
            # Grow first, so that other ranks have the state before the ranks of these nodes leave.
            return ResizePlan("preempt", size, scaling.added_ranks(job.replicas, size, self._spec.unit), reason, by=by)
        until = by - (self._roster.first_build or 0.0) - _STAND_S
        if now < until and job.replacements.allowed and self._slots_come():
            job.look_at = until  # Until then the ranks wait for slots of workers that are about to end.
            return None
        if self._regroup.covered(set(moving)) or self._regroup.can_save():
            return ResizePlan("preempt", job.replicas, (), reason, ResizeWay.HOLD, by)
        if reason not in self._reported:
            self._reported.add(reason)
            text = f"{reason}; no other node can hold the state, so training goes on there until it is gone"
            self._orders.note(text, now)
        return None

    def _slots_come(self) -> bool:
        """True if released workers are about to end on nodes where replacements may be started."""
        return any(worker.leaver for node in self._roster.usable_nodes() for worker in node.others.values())
