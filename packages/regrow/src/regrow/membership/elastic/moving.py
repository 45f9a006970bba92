"""Requested moves of ranks to other nodes: refusals, and the change that follows. Pure.

Replacements are built on the other node while all ranks train; at an agreed step they take the ranks. A fault is
repaired first, and the move then goes on with the ranks that are still on the node. One move is under way at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from regrow.core.ids import Instant, NodeId, Rank, Seconds
from regrow.core.messages import facts
from regrow.membership import diagnosis, scaling
from regrow.membership.elastic import said_of_moves as say
from regrow.membership.elastic.resize_boundary import ResizePlan, ResizeWay
from regrow.membership.job import Job
from regrow.membership.orders import AnswerScale
from regrow.membership.recovery import said_at_end
from regrow.membership.recovery.newcomers import ATTEMPTS
from regrow.membership.recovery.regroup import Regroup
from regrow.membership.roster import NodeRecord, WorkerRecord
from regrow.membership.states import Building, Closing, Releasing

_END_S: Seconds = 60.0
"""Time for the kernel to end a fenced worker; after it, its slot does not count as one that becomes free."""


@dataclass(frozen=True)
class RankMove:
    """An accepted move. `rank`: only this rank of the node; `world`: size of the world at that time, in ranks."""

    source: NodeId
    rank: Rank | None
    to: NodeId | None
    reason: str
    world: int


class Moving:
    """Decides about the ranks that are to move.

    Args:
        job: the job of the ranks.
        regroup: knows which ranks may leave without loss of state.
    """

    def __init__(self, job: Job, regroup: Regroup) -> None:
        self._job, self._regroup = job, regroup
        self._roster = job.roster
        self.move: RankMove | None = None
        """The accepted move that is not carried out yet; None: there is none."""
        self.unfit: dict[NodeId, str] = {}
        """Nodes that came into quarantine, with the reasons, until their ranks have moved."""
        self.waits: tuple[Sequence[Rank], Sequence[NodeId]] = (), ()
        """Ranks of a move that waits for slots, and the nodes where replacements are kept for them."""
        self._await_proof = False

    def let_go(self, now: Instant) -> None:
        """Give up the move, with a note, if the job has run its last step."""
        if self.move is not None and isinstance(self._job.state, Closing | Releasing):
            self._job.orders.note(say.given_up(self.move.source, "the job has run its last step"), now)
            self.move = None

    def requested(self, event: facts.MoveRequested, now: Instant) -> None:
        """Answer a request for a move at once. A named target node is tried even if newcomers have failed there."""
        if event.to in self._roster.nodes:
            self._roster.nodes[event.to].failed_candidates = 0
        answer = self._answer(event, now)
        if answer.accepted and self.move is None and (source := self._source(event)) is not None:
            self.move = RankMove(source, event.rank, event.to, event.reason, self._roster.world)
        self._job.orders.add_answer(answer)

    def _source(self, event: facts.MoveRequested) -> NodeId | None:
        if event.rank is None:
            return event.node
        name = self._roster.places.get(event.rank)
        return None if name is None else self._roster.workers[name].node

    def _answer(self, event: facts.MoveRequested, now: Instant) -> AnswerScale:
        job, there = self._job, {node.node: node for node in self._roster.living_nodes()}
        source = self._source(event)
        if isinstance(job.state, Closing | Releasing):
            return AnswerScale(False, "the job has run its last step")
        if job.stopping:
            return AnswerScale(False, f"the job is being stopped: {job.stopping}")
        if job.world == 0 or not self._roster.places or isinstance(job.state, Building):
            return AnswerScale(False, say.NOT_YET)
        if source is None:
            return AnswerScale(False, f"there is no rank {event.rank}: this job has ranks 0 to {job.world - 1}")
        for node in (source, *(() if event.to is None else (event.to,))):
            if node not in there:
                return AnswerScale(False, diagnosis.no_such_node(node, sorted(there)))
        if there[source].leave_by is not None:
            return AnswerScale(False, diagnosis.drains_already(source, there[source].leave_reason))
        if self.move is not None:
            again = (self.move.source, self.move.rank, self.move.to) == (source, event.rank, event.to)
            return AnswerScale(again, say.under_way(source) if again else say.another_first(self.move.source))
        ranks = self._ranks(source, event.rank)
        if not ranks:
            return AnswerScale(False, say.has_no_ranks(source))
        refusal = self._obstacle(ranks, source, event.to, now)
        return AnswerScale(not refusal, refusal or say.accepted(ranks, source))

    def _ranks(self, source: NodeId, rank: Rank | None) -> list[Rank]:
        """The ranks of a node that are to move: all of them, or only `rank`."""
        there = sorted(each.rank for each in self._roster.nodes[source].placed.values() if each.rank is not None)
        return there if rank is None else [each for each in there if each == rank]

    def _obstacle(self, ranks: Sequence[Rank], source: NodeId, to: NodeId | None, now: Instant) -> str:
        """Reason why these ranks cannot move now; empty: they can."""
        job = self._job
        if not job.replacements.allowed:
            return said_at_end.no_newcomers(job.replacements.refuted)
        room = sum(_room(self._roster.nodes[node], now) for node in self._homes(source, to))
        if to == source:
            return say.there_already(ranks, to)
        if room < len(ranks):
            others = [each for each in self._roster.living_nodes() if each.node != source and to in (None, each.node)]
            closed = {each.node: why for each in others if (why := _closed(each, now))}
            return say.no_room(ranks, room, to, closed)
        if len(self._regroup.dispensable(ranks)) < len(ranks):
            return say.held_nowhere_else(ranks)
        return ""

    def _homes(self, source: NodeId, to: NodeId | None) -> list[NodeId]:
        """Nodes on which the replacements may be placed."""
        free = [node for node in scaling.free_slots(self._roster, ATTEMPTS) if node != source]
        return free if to is None else [node for node in free if node == to]

    def _follow(self, now: Instant) -> None:
        """Move the rest of a replica after a rank that has moved, as the network within a node may be faster."""
        if self._job.apart is None or self.move is not None:
            return
        (rank, source), self._job.apart = self._job.apart, None
        name = self._roster.places.get(rank)
        ranks = scaling.left_behind(self._roster, rank, source, self._job.spec.unit)
        if name is None or not ranks or (to := self._roster.workers[name].node) == source:
            return
        why = self._obstacle(ranks, source, to, now)
        said = say.stays_apart(rank, to, source, why) if why else say.follows(rank, ranks, source, to)
        self._job.orders.note(said, now)
        if not why:
            self.move = RankMove(source, None, to, f"they follow rank {rank} of their replica", self._roster.world)

    def take_proof(self) -> bool:
        """Return True, only once, if the proof of a newcomer has arrived for which moves off unfit nodes waited."""
        proven = self._await_proof and bool(self._job.replacements.proven)
        self._await_proof = self._await_proof and not proven
        return proven

    def _leave_unfit(self, now: Instant) -> None:
        """Move ranks off a node in quarantine to a free one, once a newcomer was proven to compute the same as a rank.

        If the health check was wrong, the move costs only its pause. Ranks with values of their own are not
        moved, because large values are not sent along.
        """
        self._await_proof = bool(self.unfit) and not self._job.replacements.proven
        if self.move is not None or self._await_proof or any(self._job.replacements.own.values()):
            return
        for source, why in list(self.unfit.items()):
            node = self._roster.nodes.get(source)
            ranks = [] if node is None or node.away or node.leave_by is not None else self._ranks(source, None)
            if not ranks:
                del self.unfit[source]
            elif not self._obstacle(ranks, source, None, now):
                self._job.orders.note(say.leave_unfit(ranks, source, why), now)
                self.move = RankMove(source, None, None, f"{source} is in quarantine: {why}", self._roster.world)
                return

    def plan(self, now: Instant) -> ResizePlan | None:
        """Plan the accepted move; None: there is none, it was given up, or it has to wait."""
        self._follow(now)
        self._leave_unfit(now)
        move, job = self.move, self._job
        if move is None:
            return None
        node = self._roster.nodes.get(move.source)
        ranks = [] if node is None or node.away else self._ranks(move.source, move.rank)
        resized = move.rank is not None and move.world != self._roster.world
        if not ranks or resized:
            self.move = None  # They have moved, or a fault has moved them.
            if resized:
                job.orders.note(say.given_up(move.source, "the world has another size now"), now)
            return None
        homes = self._homes(move.source, move.to)
        building = {rank for rank, each in self._roster.candidates.items() if each.node in homes}
        missing = [rank for rank in ranks if rank not in building]
        why = self._obstacle(missing, move.source, move.to, now) if missing else ""
        if not why and len(self._regroup.dispensable(ranks)) < len(ranks):
            why = say.held_nowhere_else(ranks)
        if why:
            self.move = None
            job.orders.note(say.given_up(move.source, why), now)
            return None
        if sum(len(self._roster.nodes[home].free()) for home in homes) < len(missing):
            ends = [each.since + _END_S for home in homes for each in self._roster.nodes[home].others.values()]
            job.look_at = min((at for at in ends if at > now), default=now + _END_S)  # Slots are about to be free.
            self.waits = ranks, homes
            return None
        targets = sorted({each.node for rank, each in self._roster.candidates.items() if rank in ranks})
        reason = say.moves(ranks, move.source, targets, move.reason)
        return ResizePlan("move", job.replicas, tuple(ranks), reason, ResizeWay.MOVE, homes=tuple(homes))


def _room(node: NodeRecord, now: Instant) -> int:
    """Slots of a node that are free, or will be once its leavers and fenced workers have ended."""
    stay = sum(each.living and not each.leaver for each in node.others.values()) + len(_stuck(node, now))
    return node.slots - len(node.placed) - stay


def _stuck(node: NodeRecord, now: Instant) -> list[WorkerRecord]:
    """Fenced workers that the kernel does not end, as in a driver's call that nothing interrupts."""
    return [each for each in node.others.values() if not each.living and now >= each.since + _END_S]


def _closed(node: NodeRecord, now: Instant) -> str:
    """Reason, for people, why no rank may move to a node; empty if ranks may."""
    if node.leave_by is not None or node.quarantined:
        return "is in quarantine" if node.leave_by is None else "is being given back"
    failed = f"had newcomers that failed one after the other; --to {node.node} tries it again"
    stuck = next((f"has worker {each.worker}, which was killed and does not end" for each in _stuck(node, now)), "")
    return failed if node.failed_candidates >= ATTEMPTS else stuck or "will not be there for long enough" * node.unpaid
