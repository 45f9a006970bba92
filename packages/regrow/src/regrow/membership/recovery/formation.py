"""Life of generations: starting workers, ordering and forming a membership, and ending the last generation."""

import msgspec

from regrow.core import records as record
from regrow.core.ids import Generation, Instant, NodeId
from regrow.core.messages.copies import ForgetCopies
from regrow.core.messages.vocabulary import Role, WorldChange
from regrow.membership import diagnosis as say
from regrow.membership import recovery_point, scaling
from regrow.membership.job import Job, WantedSize
from regrow.membership.recovery.doubts import Doubts
from regrow.membership.recovery.held_copies import HeldCopies
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.recovery.standbys import Standbys
from regrow.membership.roster import RankSlot, Stage
from regrow.membership.scaling import Change
from regrow.membership.states import Building, Closing, Forming, Releasing, Training


class Generations:
    """Makes one generation after the other.

    Args:
        job: the job of the generations.
        size: the wanted size of the world.
        ladder: restarts workers if a generation cannot be formed.
        standbys: knows what workers have built.
        copies: the nodes' copies of the state.
    """

    def __init__(self, job: Job, size: WantedSize, ladder: Ladder, standbys: Standbys, copies: HeldCopies) -> None:
        self._job, self._size, self._ladder, self._standbys, self.copies = job, size, ladder, standbys, copies
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self.doubts = Doubts()
        self._reported_exposed = ""
        self.announced: WorldChange | None = None
        """The last change, until all workers have joined the world that it made.

        If another change follows before that, both are sent as one, also to workers that know the first already.
        """

    def build(self, generation: Generation, now: Instant) -> bool:
        """Start a worker for every rank, on the present nodes; False if they have too little room yet."""
        slots, size = self._room()
        rank_slots = None if size is None else self._first_slots(size, slots)
        if size is None or rank_slots is None:
            if self._job.short_since is None:
                lost = [node.away_since for node in self._roster.nodes.values() if node.away_since is not None]
                self._job.short_since = min(lost, default=now)
            return False
        self._job.goto(Building())
        self._job.generation, self.doubts.open = generation, None
        self._job.past_last_step = False
        self._orders.left.clear()
        self._job.replacements.restarted()
        if self._job.kept is not None:
            self.copies.ask(generation, self._orders.ask_copies(generation))
        self._standbys.layouts.forget()
        self._standbys.loaders.forget()
        self._job.short_since = None
        former, kind = self._size.change, "restart" if self._job.restarts else "start"
        before = former.before if former is not None else self._job.replicas or self._spec.replicas
        reason = "all workers are started, on the nodes that there are"
        self._size.change = Change(kind, before, reason) if size != before else None
        self._roster.renumber([], now)
        self._roster.world = len(rank_slots)
        homes = {slot.node for slot in rank_slots}
        self._orders.build(generation, [node for node in self._roster.usable_nodes() if node.node in homes])
        for slot in rank_slots:
            self._job.spawn(slot, Role.RANK, now)
        spares, plain = self._spec.spares, size <= self._spec.replicas and not self._job.restarts
        if plain and len(homes) > self._spec.nodes - spares and len(slots) - len(homes) < spares:
            self._orders.note(say.spares_not_kept(spares, len(homes)), now)
        return True

    def _first_slots(self, size: int, slots: dict[NodeId, int]) -> list[RankSlot] | None:
        unit, together = self._spec.unit, scaling.failing_together(self._roster)
        return scaling.first_slots(size * unit, self._spec.nproc, slots, unit=unit, domains=together)

    def _room(self) -> tuple[dict[NodeId, int], int | None]:
        """The nodes' slots, and the number of replicas that fit; without nodes in quarantine if the others suffice."""
        usable, ways = self._roster.usable_nodes(), []
        for nodes in ([node for node in usable if not node.quarantined], usable):
            slots = {node.node: node.slots for node in nodes}
            fits = self._size.limits.fit(min(self._size.wanted, sum(slots.values()) // self._spec.unit))
            ways.append((slots, fits))
        return ways[0] if ways[0][1] == ways[1][1] else ways[1]

    def form(self, generation: Generation, now: Instant) -> None:
        """Order a membership once its start point is known. Ranks that have the state send it to those that lack it."""
        survivors = [recovery_point.survivor_state(worker) for worker in self._roster.placed()]
        self._roster.built(now)
        self._roster.sharded = len({each.holding for each in survivors}) > 1
        start: recovery_point.Start | recovery_point.Uncovered | None = self.doubts.start(survivors)
        if start is None and self.doubts.open is not None:
            self._ladder.restart(say.no_agreed_state(self.doubts.open.step), now)
            return
        if start is None:
            if self.copies.missing(survivors):
                return  # `form` is called again after each answer.
            start = recovery_point.decide(survivors, self.copies.held)
        if isinstance(start, recovery_point.Uncovered):
            losses, self._job.kept = self._ladder.losses, None
            self._ladder.restart(say.uncovered(start, self._spec.buddy_every, losses.text, losses.torn), now)
            return
        if self._job.past_last_step and start.step < self._job.step:
            self._ladder.restart(f"no rank has the state after the last step ({self._job.step}) any more", now)
            return
        # Survivors that have not yet carried out an earlier rewind must not be counted as losing steps twice.
        had = self._job.step if start.rewind else max(self._job.step, *(each.state_at for each in survivors))
        self._job.incidents.ordered(set(self._roster.places), start.step, max(0, had - start.step), now)
        self._job.generation, self._job.step, self._job.short_since = generation, start.step, None
        self._announce_change(now)
        self._job.goto(Forming(now + self._spec.form_deadline, start.step))
        kept = self._job.kept
        as_committed = kept is not None and kept.as_committed and kept.step == start.step
        self._orders.form(
            generation, start, now, change=self.announced, over=self._job.past_last_step, as_committed=as_committed
        )
        if any(source.rank != rank for rank, source in start.restored.items()):
            doubt = self._job.belief.copied()
            if self._job.replacements.alone:
                doubt = self._job.replacements.refuted
            if doubt:
                self._job.doubted(doubt, now)
        self._say_exposed(now)

    def _say_exposed(self, now: Instant) -> None:
        """Write a note, once for each case, if all holders of one part of the state would fail together."""
        held = {each.rank: each.holding for each in self._roster.placed() if each.rank is not None}
        together = scaling.failing_together(self._roster)
        ranks = scaling.exposed_ranks(held, scaling.nodes_of_ranks(self._roster), together)
        reported = say.exposed(ranks, together[self._roster.home(ranks[0])[0].node]) if ranks else ""
        if reported and reported != self._reported_exposed:
            self._orders.note(reported, now)
        self._reported_exposed = reported

    def has_room(self) -> bool:
        """True if all workers could be started again on the present nodes."""
        return self._room()[1] is not None

    def _announce_change(self, now: Instant) -> None:
        change, self._size.change = self._size.change, None
        if change is None:
            return
        reported = change.world_change(self._job.generation, self._job.replicas, now)
        if self.announced is not None:
            reported = msgspec.structs.replace(reported, before=self.announced.before)
        self.announced = reported
        self._job.incidents.resized(change.before, self._job.replicas)
        self._orders.write(
            record.WorldChanged(
                at=now,
                generation=self._job.generation,
                step=self._job.step,
                kind=change.kind,
                before=change.before,
                after=self._job.replicas,
                reason=change.reason,
            )
        )

    def formed(self, now: Instant) -> None:
        """Begin to train, as every worker has joined the membership; some may be past its first step already."""
        step = self._job.state.step if isinstance(self._job.state, Forming) else self._job.step
        self._ladder.formed()
        self._job.goto(Closing(now + self._spec.halt_deadline) if self._job.past_last_step else Training())
        self.doubts.open, self.announced = None, None
        if self._job.kept is not None and not self._spec.buddy_every:
            for node in self._roster.living_nodes():
                self._orders.add(ForgetCopies(node.node))
        self._job.kept = None
        self._orders.tables.formed(self._roster.member_nodes())
        workers = {str(rank): worker for rank, worker in self._roster.places.items()}
        trainings = self._job.trainings
        self._orders.write(
            record.GenerationFormed(now, self._job.generation, step, workers, trainings.present, trainings.began),
            *self._job.incidents.formed(self._job.generation, now),
        )
        if self._job.past_last_step:
            # No commit follows, and the script's remaining code may take any time.
            self._orders.write(*self._job.incidents.found_intact(set(), self._job.generation, now))

    def end_steps(self, now: Instant) -> None:
        """Let all ranks leave the loop after their last step; later faults are repaired if the script allows that."""
        if not all(worker.goes_on for worker in self._roster.placed()):
            self.release(now)
            return
        self._job.past_last_step = True
        for worker in list(self._roster.placed(Stage.FINISHED)):
            self._roster.move(worker, Stage.MEMBER, now)
        self.release_from_loop(now)
        for candidate in list(self._roster.candidates.values()):
            self._orders.fence(candidate, "the job has run its last step", now)

    def release_from_loop(self, now: Instant) -> None:
        """Send, or repeat, the permission to leave the loop, as no later order would replace one that was lost."""
        waiting = self._roster.newest(Stage.FINISHED)
        if waiting is not None and now >= waiting.since + self._spec.build_deadline:
            self.release(now)  # Ranks that have finished no longer wait for the others.
            return
        self._job.goto(Closing(now + self._spec.halt_deadline))
        self._orders.release_from_loop()

    def release(self, now: Instant) -> None:
        """Release all ranks, which have run their last step; the next training begins, or the job ends."""
        if (ended := self._job.trainings.ended()) is not None:
            self._job.goto(self._job.trainings.turn(ended, now))
            return
        self._job.goto(Releasing(now + self._spec.halt_deadline))
        if self._size.wanted != self._job.replicas:
            self._orders.note(say.change_too_late(self._job.replicas, self._size.wanted, self._size.wanted_by), now)
        self._orders.release(Stage.FINISHED, now)
        self._orders.release(Stage.MEMBER, now)  # Ranks still in the code after the loop; no longer repaired.
        for worker in [*self._roster.standbys(), *self._roster.candidates.values()]:
            self._orders.fence(worker, "the job has run its last step", now)
