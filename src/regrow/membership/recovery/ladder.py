"""What is done about a fault: the rungs of recovery, each within its budget.

retry in place → a standby, or a fresh fork, in the lost rank → a free slot of another node → fewer replicas (see
`regroup.py`) → restart from the durable checkpoint → end, with one readable diagnosis.
"""

from collections import Counter
from collections.abc import Sequence, Set

import msgspec

from regrow.core import records as record
from regrow.core.exit_codes import RUN_AGAIN, SCRIPT_ERROR, exit_text
from regrow.core.ids import Generation, Instant, Rank, StepNo
from regrow.core.job import JobSpec
from regrow.core.messages import FaultSpec, Role, WorldChange
from regrow.membership import diagnosis as say
from regrow.membership import recovery_point, scaling
from regrow.membership.faults import FaultPlan, ScriptErrors
from regrow.membership.held_copies import HeldCopies
from regrow.membership.incident import Budget, Incidents
from regrow.membership.job_state import JobState
from regrow.membership.layouts import Layouts
from regrow.membership.orders import Orders
from regrow.membership.recovery import proof_of_life, standbys
from regrow.membership.recovery.doubts import Doubts
from regrow.membership.recovery.losses import Losses
from regrow.membership.roster import BUILDING, Roster, Seat, Stage, WorkerRecord
from regrow.membership.scaling import Change
from regrow.membership.states import (
    Building,
    Ended,
    Forming,
    Mending,
    Releasing,
    Restarting,
    State,
    Training,
)

STANDBY_ATTEMPTS = 3
_PREFERENCE = {Stage.READY: 0, Stage.IDLE: 1, Stage.STARTING: 2, Stage.ORDERED: 3}


class Ladder:
    """The job's state, and every way from one generation to the next.

    Args:
        facts: what the job was started with.
        faults: faults on demand, by plan.
        resume: whether the first workers load the newest durable checkpoint.
    """

    def __init__(self, facts: JobSpec, faults: Sequence[FaultSpec], resume: bool) -> None:
        self.facts = facts
        self.job = JobState()
        self.generation = Generation(0)
        self.step = StepNo(0)
        self.restarts = 0
        self.layouts = Layouts(facts.unit)
        self.copies = HeldCopies()
        self.doubts = Doubts()
        self.roster = Roster()
        self.limits = scaling.Limits.of(facts)
        self.wanted = facts.replicas
        """How many replicas there should be as soon as there is room for them."""
        self.wanted_by = "the job was started with them"
        """Why it is that number."""
        self.change: Change | None = None
        self._telling: WorldChange | None = None
        """The last change, until all workers stand in the world that it made.

        Where another follows before that, the two are told as one: who knows of the first already hears of both again.
        """
        self.short_since: Instant | None = None
        """Since when there has been no place for a lost rank, or none for a world to start again."""
        self.plan = FaultPlan(faults)
        self.errors = ScriptErrors()
        self.losses = Losses(self.roster, self.errors)
        self.incidents = Incidents()
        self.orders = Orders(facts, self.roster, self.plan)
        self._budget = Budget(facts.max_faults, facts.window)
        self._resume = resume
        self._failed: Counter[Rank] = Counter()
        """How many newcomers for a rank have died before they were built, since the last generation stood."""

    @property
    def state(self) -> State:
        """Where the job is."""
        return self.job.now

    @property
    def resumes(self) -> bool:
        """Whether workers that start the job, or start it again, read the newest durable checkpoint."""
        return self._resume

    @property
    def world(self) -> int:
        """Ranks of the world that is, or that will be when the change under way is done."""
        return self.roster.world

    @property
    def replicas(self) -> int:
        """That world in replicas."""
        return self.roster.world // self.facts.unit

    def build(self, generation: Generation, now: Instant) -> bool:
        """Start a worker for every rank, on the nodes that there are; False where they have not enough room yet."""
        slots = {node.node: node.slots for node in self.roster.usable_nodes()}
        size = self.limits.fit(min(self.wanted, sum(slots.values()) // self.facts.unit))
        seats = None if size is None else scaling.first_seats(size * self.facts.unit, self.facts.nproc, slots)
        if size is None or seats is None:
            if self.short_since is None:
                lost = [node.away_since for node in self.roster.nodes.values() if node.away_since is not None]
                self.short_since = min(lost, default=now)
            return False
        self.job.goto(Building())
        self.generation, self.doubts.open = generation, None
        self.layouts.forget()
        self.short_since = None
        before = self.change.before if self.change is not None else self.replicas or self.facts.replicas
        reason = "all workers are started, on the nodes that there are"
        kind = "restart" if self.restarts else "start"
        self.change = Change(kind, before, reason) if size != before else None
        self.roster.renumber([], now)
        self.roster.world = len(seats)
        homes = {seat.node for seat in seats}
        self.orders.stores = [node.store for node in self.roster.usable_nodes() if node.node in homes]
        for seat in seats:
            self._spawn(seat, Role.RANK, now)
        return True

    def mend(self, kind: str, workers: list[WorkerRecord], cause: str, now: Instant, fault_at: Instant) -> None:
        """A fault: open or continue the incident and give up the generation; `fill` and `form` follow.

        Without workers it is a symptom; a fault that then explains it is not counted a second time.
        """
        ranks = [worker.rank for worker in workers if worker.rank is not None]
        self.losses.fault(kind, ranks)
        if not self.incidents.explains(ranks) and not self._spend(cause, now):
            return
        self.orders.write(
            *self.incidents.fault(
                kind, ranks, cause, generation=self.generation, step=self.step, now=now, fault_at=fault_at
            )
        )
        if not isinstance(self.state, Mending):
            self.halt(cause, now)
            self.job.goto(Mending(halt_deadline=now + self.facts.halt_patience))

    def halt(self, reason: str, now: Instant) -> None:
        """Everyone in the generation gives it up, at once."""
        self.orders.halt(self.generation, reason, now)
        if self.facts.keeps_copies:
            self.copies.ask(self.generation, self.orders.ask_copies(self.generation))

    def fill(self, now: Instant, *, skip: Set[int] = frozenset(), give_up: bool = False) -> list[Rank]:
        """Give every lost rank the best worker there is: a built standby, one on the way, a fresh fork.

        Args:
            skip: replicas that are not filled, since they go.
            give_up: a rank whose newcomers die one after the other is not tried again.

        Returns:
            The ranks for which there is no place.
        """
        lost = [worker.rank for worker in self.roster.seated(Stage.FENCED, Stage.GONE) if worker.rank is not None]
        stuck = []
        for rank in sorted(rank for rank in lost if rank // self.facts.unit not in skip):
            seat = self._seat_for(rank, give_up=give_up)
            if seat is None:
                stuck.append(rank)
                continue
            moves = seat.node != self.roster.home(rank)[0].node
            spares = [each for each in self.roster.standbys(seat.node) if self.can_take(each, rank, seat.local_rank)]
            if spares:
                standby = min(spares, key=lambda each: _PREFERENCE.get(each.stage, 9))
                self.roster.seat(standby, rank, seat.local_rank, now)
                self.start_if_seated(standby, now)
                proof_of_life.ask(standby, self.roster, self.orders, now)
            else:
                self._spawn(seat, Role.JOINER, now)
            self.incidents.climb("node" if moves else "standby" if spares else "fork")
        return stuck

    def _seat_for(self, rank: Rank, *, give_up: bool) -> Seat | None:
        """Where a lost rank is filled: at home, or on another node where it cannot be, or newcomers die there."""
        home, local_rank = self.roster.home(rank)
        if home.usable and self._failed[rank] < STANDBY_ATTEMPTS:
            return Seat(home.node, rank, local_rank)
        free = {node.node: node.free() for node in self.roster.usable_nodes() if node is not home}
        elsewhere = scaling.new_seats([rank], self.facts.unit, free)
        at_home = Seat(home.node, rank, local_rank) if home.usable and not give_up else None
        return elsewhere[0] if elsewhere else at_home

    @property
    def newcomers_fail(self) -> bool:
        """Whether the newcomers for some rank die one after the other."""
        return any(times >= STANDBY_ATTEMPTS for times in self._failed.values())

    def newcomer_failed(self, worker: WorkerRecord) -> None:
        """A worker was lost; if it was to fill a rank and was not built yet, that counts."""
        if worker.stage in BUILDING and worker.seated and worker.rank is not None:
            self._failed[worker.rank] += 1

    def can_take(self, worker: WorkerRecord, rank: Rank, local_rank: int, world: int | None = None) -> bool:
        """Whether a newcomer fits a rank: its script has built that rank's part, and was told nothing else; or not run.

        `world`: the ranks of the world that is to come, where that is another.
        """
        if worker.stage is Stage.IDLE:
            return True
        anywhere = not (self.roster.sharded or self.roster.grouped)
        fits = anywhere or self.layouts.place(worker.built_for) == self.layouts.place(rank)
        return fits and not standbys.stale(worker, rank, local_rank, world or self.world)

    def start_if_seated(self, worker: WorkerRecord, now: Instant) -> None:
        """An `imports` standby that has got a rank runs the script."""
        if worker.stage is Stage.IDLE and worker.seated and worker.rank is not None:
            self.orders.start_script(worker, worker.rank, self.generation, now, world=self.world)

    def form(self, generation: Generation, now: Instant) -> None:
        """Order a membership, when it is known where it starts. Who has the state gives it to who has not."""
        standings = [recovery_point.standing(worker) for worker in self.roster.seated()]
        self.roster.sharded = len({each.holding for each in standings}) > 1
        start: recovery_point.Start | recovery_point.Uncovered | None = self.doubts.start(standings)
        if start is None and self.doubts.open is not None:
            self.restart(say.no_agreed_state(self.doubts.open.step), now)
            return
        if start is None:
            if self.copies.missing(standings):
                return  # `form` is called again with each answer
            start = recovery_point.decide(standings, self.copies.held)
        if isinstance(start, recovery_point.Uncovered):
            self.restart(say.uncovered(start, self.facts.buddy_every, self.losses.told, self.losses.torn), now)
            return
        # Survivors that have not yet gone back, as was ordered already, lose nothing a second time.
        had = self.step if start.rewind else max(self.step, *(each.state_at for each in standings))
        self.incidents.ordered(set(self.roster.places), start.step, max(0, had - start.step), now)
        self.generation, self.step, self.short_since = generation, start.step, None
        self._tell_change(now)
        self.job.goto(Forming(now + self.facts.form_deadline, start.step))
        self.orders.form(generation, start, now, change=self._telling)

    def _tell_change(self, now: Instant) -> None:
        change, self.change = self.change, None
        if change is None:
            return
        told = change.told(self.generation, self.replicas, now)
        if self._telling is not None:
            told = msgspec.structs.replace(told, before=self._telling.before)
        self._telling = told
        self.incidents.resized(change.before, self.replicas)
        self.orders.write(
            record.WorldChanged(
                at=now,
                generation=self.generation,
                step=self.step,
                kind=change.kind,
                before=change.before,
                after=self.replicas,
                reason=change.reason,
            )
        )

    def formed(self, now: Instant) -> None:
        """Every worker stands in the membership that was ordered; some may have gone on from its step already."""
        step = self.state.step if isinstance(self.state, Forming) else self.step
        self.losses.over()
        self._failed.clear()
        self.job.goto(Training())
        self.doubts.open, self._telling = None, None
        workers = {str(rank): worker for rank, worker in self.roster.places.items()}
        self.orders.write(
            record.GenerationFormed(at=now, generation=self.generation, step=step, workers=workers),
            *self.incidents.formed(self.generation, now),
        )

    def release(self, now: Instant) -> None:
        """Every rank has run its last step, and nobody needs its state any more."""
        self.job.goto(Releasing(now + self.facts.halt_deadline))
        if self.wanted != self.replicas:
            self.orders.note(say.change_too_late(self.replicas, self.wanted, self.wanted_by), now)
        self.orders.release(Stage.FINISHED, now)
        for worker in [*self.roster.standbys(), *self.roster.candidates.values()]:
            self.orders.fence(worker, "the job has run its last step", now)

    def restart(self, cause: str, now: Instant, worker: WorkerRecord | None = None) -> None:
        """The rung for the whole job: every worker is ended and started again, from the durable checkpoint."""
        allowed = self.facts.max_restarts
        if allowed is not None and self.restarts >= allowed and not any(w.has_session for w in self.roster.seated()):
            own = self.own_error(worker) if worker else ""
            self.end(SCRIPT_ERROR, own or say.restarts_spent(allowed, cause), now)
            return
        if self.step > 0 and not self.facts.durable:
            self.end(SCRIPT_ERROR, self.losses.diagnosis(self.step, cause), now)
            return
        if not self._spend(cause, now):
            return
        self.orders.note(f"all workers are started again: {cause}", now)
        self.incidents.climb("restart")
        self._resume = self._resume or self.facts.durable
        self.restarts += 1
        self.job.goto(Restarting(deadline=now + self.facts.halt_deadline))
        for each in list(self.roster.workers.values()):
            if each.living:
                self.orders.fence(each, cause, now)

    def fence_late(self, late: list[WorkerRecord], reason: str, now: Instant) -> None:
        """A deadline has passed: who was late acts no more, and its rank is lost."""
        for worker in late:
            self.newcomer_failed(worker)
            self.orders.fence(worker, reason, now, dump=True)
        self.mend("hang", late, reason, now, now)

    def await_verdict(self, now: Instant) -> None:
        """A worker has failed before its first step: for a moment another's death may turn out to be the cause."""
        if self.state == Building():
            self.job.goto(Building(verdict_at=now + self.facts.verdict_grace))

    def script_failed(self, now: Instant) -> None:
        """An error of the script before its first step, and nobody else's death explains it."""
        gone = list(self.roster.seated(Stage.GONE))
        failed = [worker for worker in gone if worker.exit_code] or gone
        told = next((worker for worker in failed if self.errors.of(worker.worker)), failed[0])
        code = told.exit_code or 0
        if (self.facts.max_restarts or 0) > self.restarts:
            self.restart(f"rank {told.rank} {exit_text(code)}", now, told)
        else:
            self.end(SCRIPT_ERROR, self.own_error(told) or say.died_building(told.rank, code), now)

    def top_up_standbys(self, now: Instant) -> None:
        """Every node has as many standbys as it should, unless they die before they are built."""
        for node in standbys.short_nodes(self.roster, STANDBY_ATTEMPTS):
            for _ in range(self.facts.standbys - len(node.standbys)):
                self._spawn(self.orders.standby_seat(node), Role.STANDBY, now)
            self.roster.short.discard(node.node)

    def standby_failed(self, standby: WorkerRecord, now: Instant) -> None:
        """A standby was lost; after so many in a row no more are started on its node."""
        if standbys.failed(self.roster, standby) == STANDBY_ATTEMPTS:
            self.orders.note(say.standbys_given_up(standby.worker, self.errors.of(standby.worker)), now, standby)

    def built(self, worker: WorkerRecord, now: Instant) -> None:
        """A worker stands before its first step: with the same model as the others, or the job does without it."""
        fits = self.fits(worker)
        if worker.role is not Role.STANDBY:
            if not fits:
                self.end(SCRIPT_ERROR, self.layouts.differs(worker), now)
        elif fits:
            self.roster.nodes[worker.node].failed_standbys = 0
            standbys.see_early_reads(self.roster, self.orders, worker, now)
        else:
            self.orders.note(f"{say.layout_differs(worker.worker, None)}; it is not used", now, worker)
            self.standby_failed(worker, now)
            self.orders.fence(worker, "built another model", now)

    def fits(self, worker: WorkerRecord) -> bool:
        """Whether a worker has built the same model as the others."""
        return self.layouts.fits(worker)

    def own_error(self, worker: WorkerRecord) -> str:
        """The error that ended the worker's script, for people; empty where it told none."""
        told = self.errors.of(worker.worker)
        return say.script_error(worker.rank, told[1], told[0]) if told else ""

    def end(self, code: int, diagnosis: str, now: Instant) -> None:
        """Nothing more is decided."""
        self.job.goto(Ended(code))
        self.orders.end(code, diagnosis, now)

    def _spend(self, cause: str, now: Instant) -> bool:
        if self._budget.spend(now):
            return True
        self.end(RUN_AGAIN, self.losses.first(say.budget_spent(self.facts.max_faults, self.facts.window, cause)), now)
        return False

    def spawn_candidate(self, seat: Seat, world: int, now: Instant) -> None:
        """A worker for a rank of a world of `world` ranks that is to come."""
        self.orders.spawn(
            seat,
            Role.JOINER,
            generation=self.generation,
            restarts=self.restarts,
            resume=False,
            now=now,
            grown=world,
        )

    def _spawn(self, seat: Seat, role: Role, now: Instant) -> None:
        resume = self._resume and role is Role.RANK
        self.orders.spawn(seat, role, generation=self.generation, restarts=self.restarts, resume=resume, now=now)
