"""Growth and shrinking of the world: requests, the change under way, and candidates that build while others train.

A larger world begins with candidates: workers that build for their future ranks while the others train. When all of
them are ready for their first step, the world is switched (`resize_boundary.py`). A smaller world is switched to at
once. One change is under way at a time; a later request replaces it until it is switched.
"""

from collections.abc import Sequence

from regrow.core import records as record
from regrow.core.ids import Generation, Instant, NodeId, Rank, Seconds
from regrow.core.messages import facts
from regrow.core.messages.observations import NodeSeen
from regrow.core.messages.vocabulary import Role
from regrow.membership import diagnosis as say
from regrow.membership import scaling
from regrow.membership.elastic.draining import Draining
from regrow.membership.elastic.leavers import Leavers
from regrow.membership.elastic.moving import Moving
from regrow.membership.elastic.resize_boundary import ResizeBoundary, ResizePlan
from regrow.membership.job import Job, WantedSize
from regrow.membership.orders import AnswerScale
from regrow.membership.recovery import said_at_end as say_end
from regrow.membership.recovery.newcomers import ATTEMPTS
from regrow.membership.recovery.regroup import Regroup
from regrow.membership.recovery.standbys import Standbys
from regrow.membership.roster import BUILDING, NodeRecord, RankSlot, Stage, WorkerRecord
from regrow.membership.states import Closing, Releasing

_WARM = (Stage.READY, Stage.IDLE)
"""Stages of standbys that can be candidates, the best first."""


class Resizing:
    """Decides on the size of the world, and begins the change to it.

    Args:
        job: the job of the world.
        size: the wanted size.
        standbys: may become candidates.
        regroup: knows which ranks may leave.
        resize_boundary: carries out the change.
    """

    def __init__(
        self, job: Job, size: WantedSize, standbys: Standbys, regroup: Regroup, resize_boundary: ResizeBoundary
    ) -> None:
        self._job, self._size, self._standbys = job, size, standbys
        self._regroup, self._resize_boundary = regroup, resize_boundary
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self._look = True
        """True if something has changed since the last planning."""
        self._seen = Generation(0)
        """Generation for which the last planning was done."""
        self._drains, self.moves = Draining(job, size, regroup, resize_boundary), Moving(job, regroup)
        self._leavers = Leavers(job.roster, job.spec.leave_deadline)
        self._came: dict[NodeId, int] = {}
        """Slots of new nodes that were too few for a whole replica; later nodes may bring the rest."""
        self._no_larger: tuple[int, str] | None = None
        """Largest possible number of replicas by a candidate's script, and the reason; None: no limit is known."""

    # --- requests ----------------------------------------------------------------------------------------------

    def asked(self, event: facts.ScaleRequested | facts.DrainRequested | facts.MoveRequested, now: Instant) -> None:
        """Answer a request to scale, drain or move at once."""
        match event:
            case facts.ScaleRequested():
                self._size_asked(event, now)
            case facts.DrainRequested():
                self.drain_requested(event, now)
            case facts.MoveRequested():
                self.moves.requested(event, now)
                self._look = True

    def _size_asked(self, event: facts.ScaleRequested, now: Instant) -> None:
        job = self._job
        asked: int | str = event.replicas
        if event.ranks is not None:
            asked = scaling.replicas_of(event.ranks, self._spec.unit)
        refusal = asked if isinstance(asked, str) else self._refusal(asked)
        size = asked if isinstance(asked, int) else event.replicas
        if not refusal and event.stay is not None and size > job.replicas:
            refusal = self._weigh(size, event.stay, now)
        if refusal:
            self._orders.write(record.ScaleRefused(at=now, replicas=size, reason=refusal))
            self._orders.add_answer(AnswerScale(False, refusal))
            return
        self._size.wanted, self._size.wanted_by = size, event.reason
        for node in self._roster.nodes.values():
            node.failed_candidates, node.unpaid = 0, False
        self._look = True
        self._orders.add_answer(AnswerScale(True, say.scale_accepted(job.replicas, size)))

    def drain_requested(self, event: facts.DrainRequested, now: Instant) -> None:
        """Answer a request to drain a node at once."""
        self._drains.requested(event, now)
        self._look = True

    def draining(self, event: facts.NodeDraining, now: Instant) -> None:
        """Begin to drain a node whose end was announced."""
        self._drains.begin(event, now)
        self._look = True

    def let_go(self, now: Instant) -> None:
        """Stop the agents of draining nodes that have no workers left."""
        self._drains.let_go(now)
        self.moves.let_go(now)

    def node_came(self, node: NodeRecord, event: facts.NodeJoined, now: Instant, *, new: bool) -> None:
        """Let the world grow onto a new or returned node, by as many replicas as it has room for."""
        self._drains.reconsider()
        self._look = True
        if self._job.world == 0:
            return
        job, unit = self._job, self._spec.unit
        wanted = self._size.wanted
        if new:
            everywhere = sum(each.slots for each in self._roster.usable_nodes()) // unit
            wanted = max(wanted, min(wanted + self._replicas_more(node), everywhere, self._most))
        size = self._size.limits.fit(min(wanted, job.replicas + self._room()))
        if event.stay is not None and size is not None and size > job.replicas:
            node.unpaid = bool(self._weigh(size, event.stay, now))
        if not node.unpaid and (wanted > self._size.wanted or (size is not None and size > job.replicas)):
            self._size.wanted, self._size.wanted_by = wanted, f"{node.node} has come"

    def _replicas_more(self, node: NodeRecord) -> int:
        """Number of replicas that a new node adds room for, together with earlier nodes that had too little room."""
        here = {each.node for each in self._roster.usable_nodes()}
        came = {name: slots for name, slots in self._came.items() if name in here} | {node.node: node.slots}
        more, left = divmod(sum(came.values()), self._spec.unit)
        self._came = {node.node: left} if more else came
        return more

    def changed(self) -> None:
        """Plan again at the next `advance`, because the room for ranks may have changed."""
        self._look = True

    def unfit(self, node: NodeId, reason: str) -> None:
        """Move the ranks of a node in quarantine to other nodes, if they have room."""
        self.moves.unfit[node], self._look = reason, True

    # --- candidates --------------------------------------------------------------------------------------------

    def candidate_ready(self, worker: WorkerRecord, now: Instant) -> None:
        """Check a candidate that is ready for its first step; fence it if its model or part of the state differs."""
        self._look = True
        rank = worker.candidate_for
        if rank is not None and not self._regroup.is_replica(worker, rank):
            reason = say.size_fixed(self._size.limits, self._regroup.fixed())
            self._orders.write(record.ScaleRefused(at=now, replicas=self._size.wanted, reason=reason))
            self._orders.fence(worker, "built another part of the state", now)
        elif worker.fixed and rank is not None and rank >= self._job.world:
            self._candidate_fixed(worker, rank, now)
        elif not self._standbys.fits(worker):
            self._count_failure(worker, f"candidate {worker.worker} built another model", now)
            self._orders.fence(worker, "built another model", now)

    def _candidate_fixed(self, worker: WorkerRecord, rank: Rank, now: Instant) -> None:
        """Give up growing: by this candidate's script, a larger world could not run or could not change again."""
        job = self._job
        size = max(self._size.wanted, rank // self._spec.unit + 1)
        reason = f"the world cannot grow while the job trains: {worker.fixed}"
        self._orders.write(record.ScaleRefused(at=now, replicas=size, reason=reason))
        self._no_larger = job.replicas, reason
        self._size.wanted = min(self._size.wanted, job.replicas)
        if worker.role is Role.STANDBY:
            self._roster.nominate(worker, None, worker.local_rank)
        else:
            self._orders.fence(worker, "its script does not fit a larger world", now)

    def candidate_lost(self, worker: WorkerRecord, why: str, now: Instant) -> None:
        """Count a failure, because a candidate has ended before it got its rank."""
        self._count_failure(worker, f"candidate {worker.worker} {why}", now)

    def late(self, now: Instant) -> None:
        """Fence candidates that are not built in time and leavers that have not left in time."""
        for worker in list(self._roster.candidates.values()):
            if worker.stage in BUILDING and now >= worker.since + self._spec.build_deadline:
                self._count_failure(worker, f"candidate {worker.worker} was not ready in time", now)
                self._orders.fence(worker, "not ready in time", now, dump=True)
        for leaver in self._leavers.late(now):
            self._orders.note(say.leaver_stays(leaver.rank, leaver.node, self._spec.leave_deadline), now, leaver)
            self._orders.fence(leaver, "it was released and has not ended", now, dump=True)
        if self._job.look_at is not None and now >= self._job.look_at:
            self._look, self._job.look_at = True, None

    def seen(self, event: NodeSeen, now: Instant) -> None:
        """Note an agent's observations of workers that are leaving."""
        self._leavers.seen(event, now)

    def next_deadline(self) -> Instant | None:
        """Latest time at which `late` must be called; None: nothing is awaited."""
        building = (each for each in self._roster.candidates.values() if each.stage in BUILDING)
        times = [each.since + self._spec.build_deadline for each in building]
        times += [at for at in (self._leavers.next_deadline(), self._job.look_at) if at is not None]
        return min(times, default=None)

    # --- progress ----------------------------------------------------------------------------------------------

    def advance(self, now: Instant) -> None:
        """Begin, continue or drop the wanted change. Called while the job trains without a fault."""
        generation = self._job.generation
        looks = self._look or self._seen != generation or self.moves.take_proof()
        if not looks or self._roster.count(Stage.FINISHED):
            return
        self._look, self._job.look_at = False, None
        if not self._seen:
            self._warn(now)
        self._seen, self.moves.waits = generation, ((), ())
        plan = self._plan(now)
        need, homes = self.moves.waits if plan is None else (plan.newcomers, plan.homes)
        self._keep_only(need, homes, now)
        if plan is None:
            return
        missing = [rank for rank in need if rank not in self._roster.candidates]
        if missing:
            self._spawn(missing, plan.size * self._spec.unit, homes, now)
            plan = (self.moves.plan(now) if plan.kind == "move" else None) or plan  # it names the newcomers' nodes
        built = [rank for rank, each in self._roster.candidates.items() if each.stage is Stage.READY]
        if len(built) == len(need):
            self._resize_boundary.begin(plan, now)

    # --- parts of it -------------------------------------------------------------------------------------------

    @property
    def _most(self) -> int:
        """Largest number of replicas to try."""
        most = self._size.limits.most
        return most if self._no_larger is None else min(most, self._no_larger[0])

    def _warn(self, now: Instant) -> None:
        """Before the first step, note why sizes that the flags allow cannot be had."""
        limits, fixed = self._size.limits, self._regroup.fixed()
        if limits.least < limits.most and (why := fixed or self._microbatches(limits.most)):
            self._orders.note(say.size_fixed(limits, why) if fixed else f"--replicas allows too many: {why}", now)

    def _microbatches(self, size: int) -> str:
        batches = min((w.microbatches for w in self._roster.placed() if w.microbatches), default=0)
        return say.too_few_microbatches(size, batches) if 0 < batches < size else ""

    def _refusal(self, size: int) -> str:
        job = self._job
        if isinstance(job.state, Closing | Releasing):
            return "the job has run its last step"
        refusal = self._size.limits.refusal(size)
        if size > 0 and refusal and not self._spec.elastic:
            return say.never_elastic(job.replicas or self._spec.replicas)
        if refusal or size == job.replicas:
            return refusal
        if fixed := self._regroup.fixed():
            return say.size_fixed(self._size.limits, fixed)
        if size > job.replicas and not job.replacements.allowed:
            return say_end.no_newcomers(job.replacements.refuted)
        if self._no_larger is not None and size > self._no_larger[0]:
            return self._no_larger[1]
        if few := self._microbatches(size):
            return few
        slots = sum(node.slots for node in self._roster.nodes.values() if node.leave_by is None)
        if job.world and size * self._spec.unit > slots:
            return say.too_few_slots(size, self._spec.unit, slots)
        return ""

    def _weigh(self, size: int, stay: Seconds, now: Instant) -> str:
        """Reason why growing to `size` does not pay; empty: it does. Writes gain and cost to the records."""
        before = self._job.replicas
        if before == 0:
            return ""
        weighed = scaling.weigh(before, size, stay, self._job.incidents.pauses.get("grow", 0.0))
        self._orders.write(
            record.GrowthWeighed(
                at=now, before=before, after=size, stay=stay, gain=weighed.gain, cost=weighed.cost, grows=weighed.grows
            )
        )
        return "" if weighed.grows else say.does_not_pay(before, size, stay, weighed)

    def _plan(self, now: Instant) -> ResizePlan | None:
        """The change that the world needs now; None: no change."""
        job = self._job
        if self._drains.leaving:
            return self._drains.plan(now, free=self._free_slots() if job.replacements.allowed else 0, most=self._most)
        if (move := self.moves.plan(now)) is not None:
            return move
        size = self._size.limits.fit(min(self._size.wanted, job.replicas + self._room(), self._most))
        if size is None or size == job.replicas or self._regroup.fixed():
            return None
        if size > job.replicas and not job.replacements.allowed:
            return None  # The next restart of all workers adds the ranks.
        if now < (at := self._resize_boundary.changed_at + self._spec.change_pause):
            job.look_at = min(at, job.look_at or at)
            return None
        if job.replicas < size < self._size.wanted and self._leavers.oldest is not None:
            return None  # The leavers' slots will be free soon, and one change is better than two.
        kind = "grow" if size > job.replicas else "shrink"
        return ResizePlan(kind, size, scaling.added_ranks(job.replicas, size, self._spec.unit), self._size.wanted_by)

    def _room(self) -> int:
        """Number of additional replicas for which there is room, including those that candidates build for."""
        return self._free_slots() // self._spec.unit

    def _free_slots(self) -> int:
        building = sum(self._roster.nodes[each.node].usable for each in self._roster.candidates.values())
        return sum(len(slots) for slots in scaling.free_slots(self._roster, ATTEMPTS).values()) + building

    def _keep_only(self, need: Sequence[Rank], homes: Sequence[NodeId], now: Instant) -> None:
        """Reassign superfluous candidates to the needed ranks that they fit; make the others standbys, or fence them.

        Candidates on draining nodes, or outside of `homes` if that is not empty, are superfluous too.
        """
        roster, take = self._roster, self._standbys.can_take

        def fit_home(worker: WorkerRecord) -> bool:
            return roster.nodes[worker.node].usable and (not homes or worker.node in homes)

        built = sorted(roster.candidates.items())
        spare = [worker for rank, worker in built if rank not in need or not fit_home(worker)]
        missing = [rank for rank in need if rank not in roster.candidates]
        for worker in spare:
            fits = (rank for rank in missing if take(worker, rank, worker.local_rank, max(need) + 1))
            rank = next(fits, None) if fit_home(worker) else None
            if rank is not None:
                missing.remove(rank)
                roster.nominate(worker, rank, worker.local_rank)
            elif worker.role is Role.STANDBY:
                roster.nominate(worker, None, worker.local_rank)
            else:
                self._orders.fence(worker, "it is no longer needed", now)

    def _spawn(self, ranks: Sequence[Rank], world: int, homes: Sequence[NodeId], now: Instant) -> None:
        free = scaling.free_slots(self._roster, ATTEMPTS)
        rank_slots = scaling.new_slots(
            ranks,
            self._spec.unit,
            {node: slots for node, slots in free.items() if not homes or node in homes},
            domains=scaling.failing_together(self._roster),
            held={rank: node for rank, node in scaling.nodes_of_ranks(self._roster).items() if rank not in ranks}
            | {rank: each.node for rank, each in self._roster.candidates.items()},
        )
        for slot in rank_slots:
            standby = self._standby(slot, world)
            if standby is None:
                self._job.spawn(slot, Role.JOINER, now, grown=world)
                continue
            self._roster.nominate(standby, slot.rank, slot.local_rank)
            if standby.stage is Stage.IDLE:
                self._orders.start_script(standby, slot.rank, self._job.generation, now, world=world)

    def _standby(self, slot: RankSlot, world: int) -> WorkerRecord | None:
        """The best standby of the slot's node that can take the slot; None: there is none."""
        standbys = self._roster.nodes[slot.node].standbys.values()
        fitting = [
            each
            for each in standbys
            if (each.stage is Stage.IDLE or (each.stage is Stage.READY and self._regroup.alike(each, slot.rank)))
            and not (each.fixed and slot.rank >= self._job.world)
            and self._standbys.can_take(each, slot.rank, slot.local_rank, world)
        ]
        return min(fitting, key=lambda each: _WARM.index(each.stage), default=None)

    def _count_failure(self, worker: WorkerRecord, what: str, now: Instant) -> None:
        self._look = True
        node = self._roster.nodes[worker.node]
        node.failed_candidates += 1
        if node.failed_candidates == ATTEMPTS:
            reason = say.candidates_given_up(node.node, what, self._job.errors.of(worker.worker))
            self._orders.write(record.ScaleRefused(at=now, replicas=self._size.wanted, reason=reason))
