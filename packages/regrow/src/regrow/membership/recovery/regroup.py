"""Way out of a generation that was given up: lost ranks are filled, or their replicas are dropped.

If no place is left for a lost rank, the world goes on with fewer replicas, if the limits allow that. Below the minimum
the survivors wait and keep the state until there is room again, or until the deadline.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.ids import NO_STATE, Generation, Instant, Rank
from regrow.core.messages.copies import CopiesHeld, StateKept
from regrow.membership import diagnosis as say
from regrow.membership import recovery_point, scaling
from regrow.membership.checkpoints import Checkpoints
from regrow.membership.job import Job, WantedSize
from regrow.membership.recovery import said_at_end as say_end
from regrow.membership.recovery.all_again import StartFromMemory
from regrow.membership.recovery.formation import Generations
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.roster import BUILDING, Stage, WorkerRecord
from regrow.membership.scaling import Change
from regrow.membership.states import Mending, Retaining, Waiting


class Regroup:
    """Leads from a generation that was given up to the next one.

    Args:
        job: the job of the generation.
        size: the wanted size of the world.
        ladder: fills lost ranks.
        generations: forms the next one.
        checkpoints: saves the state if the wait takes too long.
    """

    def __init__(
        self, job: Job, size: WantedSize, ladder: Ladder, generations: Generations, checkpoints: Checkpoints
    ) -> None:
        self._job, self._size, self._ladder, self._generations = job, size, ladder, generations
        self._checkpoints = checkpoints
        self._unlike = ""
        """Reason why the world can have no other size, found by a candidate; empty: no candidate has found any."""
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self.again = StartFromMemory(job, ladder, generations.copies, checkpoints, generations.doubts)

    def advance(self, now: Instant) -> None:
        """Fill lost ranks or drop replicas, then form the next generation, or wait, as far as the facts allow."""
        job, roster = self._job, self._roster
        self._ladder.newcomers.due(now)
        if isinstance(job.state, Retaining):
            self.again.advance(now)
            return
        halting = roster.count(Stage.HALTING)
        if not halting:
            job.incidents.halted(now)
        going = self._surplus()
        if going and halting:
            return  # Leaving replicas are chosen once all ranks have halted.
        drop = self.choose(going) if going else frozenset()
        if self._without_newcomers(drop, now):
            return
        stuck = self._ladder.fill(now, skip=drop, give_up=self._ladder.newcomers.die and self.may_shrink())
        if stuck and halting and self.may_shrink():
            return
        if stuck:
            drop = self._without(stuck, drop)
            stuck = [] if drop else self._ladder.fill(now)
        if stuck:
            self._stuck(stuck, now)
            return
        job.short_since = None
        if isinstance(job.state, Waiting):
            job.goto(Mending(now + self._spec.halt_patience))
        if drop:
            if not self._stand(drop):
                return
            self._do_without(drop, asked=going > 0, now=now)
        if roster.all_at(Stage.HALTED, Stage.READY) and not roster.away and not roster.unproven:
            self._generations.form(Generation(job.generation + 1), now)

    def copied(self, fact: CopiesHeld | StateKept, now: Instant) -> None:
        """Take a node's report on the state in its memory."""
        if isinstance(fact, StateKept):
            self.again.apply(fact, now)
        else:
            self._generations.copies.apply(fact)

    def _without_newcomers(self, drop: Set[int], now: Instant) -> bool:
        """Restart all workers from memory if no newcomer can take a lost rank; returns True if no newcomer is tried.

        If they do not fit on the nodes, or newcomers only fail, the world goes on with fewer replicas, if allowed.
        """
        job, ladder = self._job, self._ladder
        refuted = not job.replacements.allowed
        if refuted:
            for worker in list(self._roster.placed()):
                if worker.living and worker.entered is None:
                    self._orders.fence(worker, "no newcomer is equal to the rank that it would replace", now)
        lost = ladder.lost(drop)
        hopeless = ladder.hopeless(lost)
        if not lost or not (refuted or hopeless):
            return False
        for rank in hopeless:
            ladder.newcomers.tried(rank)
        room = self._generations.has_room()
        if self.may_shrink() and not (refuted and room):
            return False
        if not self._roster.count(Stage.HALTING) and not self._roster.away:
            if not room:
                self._stuck(lost, now)
                return True
            cause = job.replacements.refuted
            if not refuted:
                error = ladder.newcomers.errors.get(hopeless[0])
                cause = say_end.newcomers_fail(hopeless[0], ladder.newcomers.times(hopeless[0]), error)
            self.again.begin(cause, now, to_disk=not refuted)
        return True

    def resize(
        self,
        drop: Set[int],
        newcomers: Sequence[WorkerRecord],
        now: Instant,
        *,
        kind: str,
        reason: str,
        by: Instant | None = None,
    ) -> None:
        """Remove the replicas `drop`, append `newcomers` as the last ranks, renumber all. All ranks have halted."""
        roster, unit = self._roster, self._spec.unit
        after = self._job.replicas - len(drop) + len(newcomers) // unit
        reported = self._change(kind, reason, by).world_change(Generation(self._job.generation + 1), after, now)
        staying: list[WorkerRecord] = []
        for rank, name in roster.places.items():
            worker = roster.workers[name]
            if rank // unit in drop:
                self._orders.dismiss(worker, "its replica leaves the job", reported, now)
            else:
                staying.append(worker)
        for worker in newcomers:
            roster.nodes[worker.node].failed_candidates = 0
        roster.renumber([*staying, *newcomers], now)
        self._orders.left.clear()  # The values are stored by the former ranks.

    def move(
        self, newcomers: Sequence[WorkerRecord], now: Instant, *, kind: str, reason: str, by: Instant | None = None
    ) -> None:
        """Let candidates take over the ranks for which they were built. All ranks have halted."""
        replicas, generation = self._job.replicas, Generation(self._job.generation + 1)
        reported = self._change(kind, reason, by).world_change(generation, replicas, now)
        for worker in newcomers:
            rank = worker.candidate_for
            if rank is None:
                continue
            self._orders.dismiss(self._roster.workers[self._roster.places[rank]], "its rank moves", reported, now)
            self._roster.nodes[worker.node].failed_candidates = 0
            self._roster.place(worker, rank, worker.local_rank, now)

    def hold(self, now: Instant) -> None:
        """Let ranks on nodes that are given back leave, while the others keep the state. All ranks have halted.

        If the other ranks do not have the whole state, it is saved and the job ends.
        """
        leaving = [worker for worker in self._roster.placed() if not self._roster.nodes[worker.node].usable]
        if self.covered({worker.rank for worker in leaving if worker.rank is not None}):
            replicas, generation = self._job.replicas, Generation(self._job.generation + 1)
            reported = Change("preempt", replicas, "its node is given back").world_change(generation, replicas, now)
            for worker in leaving:
                self._orders.dismiss(worker, "its node is given back", reported, now)
        elif self.can_save():
            self._save(now)

    def covered(self, without: Set[Rank]) -> bool:
        """True if the ranks other than `without` have the whole newest state."""
        workers = list(self._roster.placed())
        newest = recovery_point.newest(_living(worker) for worker in workers)[1]
        left = {w.holding for w in workers if w.rank in newest and w.rank not in without}
        return left == {worker.holding for worker in workers}

    def held_without(self, without: Set[Rank]) -> bool:
        """True if living workers of ranks other than `without` have every part of the state, each at some step."""
        workers = [worker for worker in self._roster.placed() if worker.living and worker.state_at >= 0]
        return {w.holding for w in workers if w.rank not in without} == {worker.holding for worker in workers}

    def dispensable(self, ranks: Sequence[Rank]) -> list[Rank]:
        """Ranks among these that can leave together while the remaining ranks have every part of the state."""
        moving = set(ranks)
        staying = {worker.holding for worker in self._roster.placed() if worker.rank not in moving}
        can_go = []
        for rank in ranks:
            holding = self._roster.workers[self._roster.places[rank]].holding
            if holding in staying:
                can_go.append(rank)
            staying.add(holding)  # If this rank has to stay, others with the same holding can go.
        return can_go

    def can_save(self) -> bool:
        """True if the job writes durable checkpoints."""
        return self._spec.checkpoint_every > 0

    def may_shrink(self) -> bool:
        """True if the job may go on with fewer replicas than it has."""
        limits = self._size.limits
        return limits.fit(self._job.replicas - 1) is not None and not self.fixed()

    def fixed(self) -> str:
        """Reason, for people, why this world can have no other size; empty: it can."""
        workers = list(self._roster.placed())
        own = self._unlike or next((worker.fixed for worker in workers if worker.fixed), "")
        holdings = [worker.holding for worker in workers]
        if own:
            return own
        return say.unlike_replicas(scaling.unlike_places(holdings, self._spec.unit), self._spec.unit)

    def is_replica(self, candidate: WorkerRecord, rank: Rank) -> bool:
        """True if a candidate has the part of the state that belongs to the rank; if not, no other size is possible."""
        if self.alike(candidate, rank):
            return True
        self._unlike = say.unlike_replicas(rank, self._spec.unit)
        return False

    def alike(self, candidate: WorkerRecord, rank: Rank) -> bool:
        """True if a built worker has the same part of the state as the rank that has that place now."""
        model = rank if rank in self._roster.places else Rank(rank % self._spec.unit)
        return self._roster.workers[self._roster.places[model]].holding == candidate.holding

    def overdue(self, state: Waiting, now: Instant) -> None:
        """Save the state, then end the job, because the deadline of the wait has passed."""
        if state.saving:
            self.give_up(now)
        else:
            self._save(now)

    def saved(self, now: Instant) -> None:
        """End the job once the state is on disk or given up; go on instead if there is room before that."""
        if self._job.short_since is not None:
            self.advance(now)
        if not isinstance(self._job.state, Waiting):
            return
        if self._checkpoints.finished(self._job.step, now, halted=True):
            self.give_up(now)

    def replica_candidates(self, drop: Set[int]) -> list[scaling.ReplicaCandidate]:
        """Facts about each replica, by which the replicas to remove are chosen."""
        roster, unit = self._roster, self._spec.unit
        workers = list(roster.placed())
        _, newest = recovery_point.newest(_living(worker) for worker in workers)
        together, made = scaling.failing_together(roster), []
        for replica in range(len(workers) // unit):
            mine = workers[replica * unit : (replica + 1) * unit]
            made.append(
                scaling.ReplicaCandidate(
                    replica,
                    dead=replica in drop or any(not worker.living or worker.stage in BUILDING for worker in mine),
                    draining=any(not roster.nodes[worker.node].usable for worker in mine),
                    newest=any(worker.rank in newest for worker in mine),
                    homes=tuple(together[worker.node] for worker in mine),
                )
            )
        return made

    def choose(self, count: int, broken: Set[int] = frozenset()) -> frozenset[int]:
        """Choose `count` replicas whose removal keeps the newest state; none if it would be lost."""
        drop = scaling.leavers(self.replica_candidates(broken), count)
        unit = self._spec.unit
        everybody = [_living(worker) for worker in self._roster.placed()]
        staying = [each for each in everybody if each.rank // unit not in drop]
        return drop if recovery_point.newest(staying)[0] == recovery_point.newest(everybody)[0] else frozenset()

    # --- parts of it -------------------------------------------------------------------------------------------

    def _surplus(self) -> int:
        """Number of replicas in excess of the wanted number."""
        job = self._job
        if self._size.wanted >= job.replicas or self._size.change is not None or self.fixed():
            return 0
        size = self._size.limits.fit(self._size.wanted)
        return 0 if size is None else job.replicas - size

    def _without(self, stuck: Iterable[Rank], drop: Set[int]) -> frozenset[int]:
        """The replicas to remove because these ranks cannot be filled; none if that is not possible."""
        job = self._job
        broken = {rank // self._spec.unit for rank in stuck} | drop
        size = self._size.limits.fit(min(self._size.wanted, job.replicas - len(broken)))
        if size is None or self.fixed():
            return frozenset()
        return self.choose(job.replicas - size, broken)

    def _stand(self, drop: Set[int]) -> bool:
        """True if all staying workers are ready for the next generation."""
        unit = self._spec.unit
        return all(
            worker.stage in (Stage.HALTED, Stage.READY)
            for worker in self._roster.placed()
            if worker.rank is not None and worker.rank // unit not in drop
        )

    def _stuck(self, stuck: list[Rank], now: Instant) -> None:
        job, roster = self._job, self._roster
        homes = {roster.home(rank)[0].node: roster.home(rank)[0] for rank in stuck}
        if job.short_since is None:
            leaving = sorted(name for name, node in homes.items() if node.leave_by is not None)
            lost = sorted(name for name, node in homes.items() if node.away and name not in leaving)
            job.short_since = min((node.away_since for node in homes.values() if node.away_since), default=now)
            self._orders.note(say_end.waits_for_room(lost, leaving, stuck, self._spec.node_deadline), now)
        busy = roster.count(Stage.HALTING, Stage.RELEASED, *BUILDING)
        if not busy and isinstance(job.state, Mending):
            job.goto(Waiting(job.short_since + self._spec.node_deadline))

    def _change(self, kind: str, reason: str, by: Instant | None = None) -> Change:
        """Set the change that the next generation records; it replaces a change that was not carried out."""
        former = self._size.change
        change = Change(kind, self._job.replicas if former is None else former.before, reason, by)
        self._size.change = change
        return change

    def _do_without(self, drop: Set[int], *, asked: bool, now: Instant) -> None:
        incident = self._job.incidents.open
        reason = incident.cause if incident is not None else "a rank could not be filled"
        if asked:
            reason = f"{self._size.wanted_by}; meanwhile: {reason}"
        self.resize(drop, [], now, kind="shrink" if asked else "fault", reason=reason)
        self._job.incidents.climb("shrink")

    def _save(self, now: Instant) -> None:
        step = self._checkpoints.savable()
        if step is None:
            self.give_up(now)
            return
        self._job.step = step
        self._job.goto(Waiting(now + self._checkpoints.patience, saving=True))

    def give_up(self, now: Instant) -> None:
        """End the job, to be run again, because there was no room in time."""
        lost = [node.node for node in self._roster.nodes.values() if node.away and not node.stopped]
        given_back = [node.node for node in self._roster.nodes.values() if node.leave_by is not None]
        text = say.nodes_given_back(given_back, self._size.limits.least)
        since = [node.away_since for node in self._roster.nodes.values() if node.node in lost and node.away_since]
        waited_out = bool(since) and now >= min(since) + self._spec.node_deadline
        if self._job.stopping and not waited_out:
            text = say.stopped(self._job.stopping, self._job.step)
        elif waited_out or not given_back:
            text = say.nodes_stay_away(lost, self._spec.node_deadline)
        self._job.end(RUN_AGAIN, text, now)


def _living(worker: WorkerRecord) -> recovery_point.SurvivorState:
    """A worker's state for the decision where to continue; a dead worker has none."""
    survivor = recovery_point.survivor_state(worker)
    return survivor if worker.living else replace(survivor, state_at=NO_STATE, ready=False)
