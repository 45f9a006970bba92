"""Ranks that move to other nodes because somebody asks for it: what is refused, and the change that follows. Pure.

Replacements are built on the other node while all train; at an agreed step the ranks change places. A fault meanwhile
is mended first, and the move goes on afterwards with the ranks that are still there. One is under way at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from regrow.core.ids import Instant, NodeId, Rank
from regrow.core.messages import facts
from regrow.membership import diagnosis, scaling
from regrow.membership.elastic import said_of_moves as say
from regrow.membership.elastic.resize_boundary import ResizePlan, ResizeWay
from regrow.membership.job import Job
from regrow.membership.orders import AnswerScale
from regrow.membership.recovery import said_at_end
from regrow.membership.recovery.newcomers import ATTEMPTS
from regrow.membership.recovery.regroup import Regroup
from regrow.membership.roster import NodeRecord
from regrow.membership.states import Building, Closing, Releasing


@dataclass(frozen=True)
class RankMove:
    """A move that was accepted. `rank`: only this one of the node's; `world`: ranks of the world at that time."""

    source: NodeId
    rank: Rank | None
    to: NodeId | None
    reason: str
    world: int


class Moving:
    """Decides about the ranks that are to move.

    Args:
        job: whose they are.
        regroup: knows which ranks the others can do without.
    """

    def __init__(self, job: Job, regroup: Regroup) -> None:
        self._job, self._regroup = job, regroup
        self._roster = job.roster
        self.move: RankMove | None = None
        """The one that was accepted and has not happened yet."""
        self.unfit: dict[NodeId, str] = {}
        """Nodes that came into quarantine, with the reason, until their ranks move."""
        self._await_proof = False

    def let_go(self, now: Instant) -> None:
        """The last step is run: a move that has not happened by then comes to nothing, which is noted."""
        if self.move is not None and isinstance(self._job.state, Closing | Releasing):
            self._job.orders.note(say.given_up(self.move.source, "the job has run its last step"), now)
            self.move = None

    def requested(self, event: facts.MoveRequested, now: Instant) -> None:
        """Somebody asks for a move; answered at once. A node that is named is tried though newcomers failed there."""
        if event.to in self._roster.nodes:
            self._roster.nodes[event.to].failed_candidates = 0
        answer = self._answer(event)
        if answer.accepted and self.move is None and (source := self._source(event)) is not None:
            self.move = RankMove(source, event.rank, event.to, event.reason, self._roster.world)
        self._job.orders.add_answer(answer)

    def _source(self, event: facts.MoveRequested) -> NodeId | None:
        if event.rank is None:
            return event.node
        name = self._roster.places.get(event.rank)
        return None if name is None else self._roster.workers[name].node

    def _answer(self, event: facts.MoveRequested) -> AnswerScale:
        job, there = self._job, {node.node: node for node in self._roster.living_nodes()}
        source = self._source(event)
        if isinstance(job.state, Closing | Releasing):
            return AnswerScale(False, "the job has run its last step")
        if job.stopping:
            return AnswerScale(False, f"the job is being stopped: {job.stopping}")
        if job.world == 0 or not self._roster.places or isinstance(job.state, Building):
            return AnswerScale(False, say.NOT_YET)
        if source is None:
            return AnswerScale(False, say.no_such_rank(event.rank or Rank(0), job.world))
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
        refusal = self._obstacle(ranks, source, event.to)
        return AnswerScale(not refusal, refusal or say.accepted(ranks, source))

    def _ranks(self, source: NodeId, rank: Rank | None) -> list[Rank]:
        """The ranks of a node that are to move."""
        there = sorted(each.rank for each in self._roster.nodes[source].placed.values() if each.rank is not None)
        return there if rank is None else [each for each in there if each == rank]

    def _obstacle(self, ranks: Sequence[Rank], source: NodeId, to: NodeId | None) -> str:
        """Why these ranks cannot move now; empty: they can."""
        job = self._job
        if not job.replacements.allowed:
            return said_at_end.no_newcomers(job.replacements.refuted)
        room = sum(_room(self._roster.nodes[node]) for node in self._homes(source, to))
        if to == source:
            return say.there_already(ranks, to)
        if room < len(ranks):
            others = [each for each in self._roster.living_nodes() if each.node != source and to in (None, each.node)]
            closed = {each.node: why for each in others if (why := _closed(each))}
            return say.no_room(ranks, room, to, closed)
        if len(self._regroup.dispensable(ranks)) < len(ranks):
            return say.held_nowhere_else(ranks)
        return ""

    def _homes(self, source: NodeId, to: NodeId | None) -> list[NodeId]:
        """Nodes on which the replacements may be placed."""
        free = [node for node in scaling.free_slots(self._roster, ATTEMPTS) if node != source]
        return free if to is None else [node for node in free if node == to]

    def _follow(self, now: Instant) -> None:
        """A rank has left others of its replica on a node, which may have a faster network inside: all there follow."""
        if self._job.apart is None or self.move is not None:
            return
        (rank, source), self._job.apart = self._job.apart, None
        name = self._roster.places.get(rank)
        ranks = scaling.left_behind(self._roster, rank, source, self._job.spec.unit)
        if name is None or not ranks or (to := self._roster.workers[name].node) == source:
            return
        why = self._obstacle(ranks, source, to)
        said = say.stays_apart(rank, to, source, why) if why else say.follows(rank, ranks, source, to)
        self._job.orders.note(said, now)
        if not why:
            self.move = RankMove(source, None, to, f"they follow rank {rank} of their replica", self._roster.world)

    def take_proof(self) -> bool:
        """True once a newcomer was proven since nodes in quarantine were looked at."""
        proven = self._await_proof and bool(self._job.replacements.proven)
        self._await_proof = self._await_proof and not proven
        return proven

    def _leave_unfit(self, now: Instant) -> None:
        """Ranks leave a node in quarantine for one that is idle, if a newcomer has shown to compute what a rank does.

        A wrong check costs the pause of a move. Not where ranks have values of their own: large ones do not go along.
        """
        self._await_proof = bool(self.unfit) and not self._job.replacements.proven
        if self.move is not None or self._await_proof or any(self._job.replacements.own.values()):
            return
        for source, why in list(self.unfit.items()):
            node = self._roster.nodes[source]
            ranks = [] if node.away or node.leave_by is not None else self._ranks(source, None)
            if not ranks:
                del self.unfit[source]
            elif not self._obstacle(ranks, source, None):
                self._job.orders.note(say.leave_unfit(ranks, source, why), now)
                self.move = RankMove(source, None, None, f"{source} is in quarantine: {why}", self._roster.world)
                return

    def plan(self, now: Instant) -> ResizePlan | None:
        """Plan the move that was accepted; None: there is none, or it has come to nothing."""
        self._follow(now)
        self._leave_unfit(now)
        move, job = self.move, self._job
        if move is None:
            return None
        node = self._roster.nodes.get(move.source)
        ranks = [] if node is None or node.away else self._ranks(move.source, move.rank)
        if not ranks or (move.rank is not None and move.world != self._roster.world):
            self.move = None  # They have moved, or a fault has moved them.
            return None
        homes = self._homes(move.source, move.to)
        building = {rank for rank, each in self._roster.candidates.items() if each.node in homes}
        missing = [rank for rank in ranks if rank not in building]
        why = self._obstacle(missing, move.source, move.to) if missing else ""
        if not why and len(self._regroup.dispensable(ranks)) < len(ranks):
            why = say.held_nowhere_else(ranks)
        if why:
            self.move = None
            job.orders.note(say.given_up(move.source, why), now)
            return None
        if sum(len(self._roster.nodes[home].free()) for home in homes) < len(missing):
            return None  # Who has left there is about to end.
        targets = sorted({each.node for rank, each in self._roster.candidates.items() if rank in ranks})
        reason = say.moves(ranks, move.source, targets, move.reason)
        return ResizePlan("move", job.replicas, tuple(ranks), reason, ResizeWay.MOVE, homes=tuple(homes))


def _room(node: NodeRecord) -> int:
    """Slots of a node that are free, or will be when those who have left it, or were fenced, have ended."""
    return node.slots - len(node.placed) - sum(each.living and not each.leaver for each in node.others.values())


def _closed(node: NodeRecord) -> str:
    """Why no rank moves to a node, for people; empty: ranks may."""
    if node.leave_by is not None or node.quarantined:
        return "is in quarantine" if node.leave_by is None else "is being given back"
    failed = f"had newcomers that failed one after the other; --to {node.node} tries it again"
    return failed if node.failed_candidates >= ATTEMPTS else "will not be there for long enough" * node.unpaid
