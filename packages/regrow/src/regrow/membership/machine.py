"""The coordinator's state machine: facts in, commands out. Pure. `job_state.NEXT` has all changes.

    without faults:       Gathering → Building → Forming → Training → Closing → Releasing → Ended
    a fault:              Forming, Training, Switching or Closing → Mending (→ Waiting, for more nodes) → Forming
    another world size:   Training → Switching → Forming
    restart all workers:  Mending or Waiting (→ Retaining, to keep the state) → Restarting → Building
    the job must end:     Forming, Training, Switching, Mending, Waiting or Retaining → Saving → Ended
Time is an argument; nothing here reads a clock or does I/O.
"""

from collections.abc import Collection, Mapping, Sequence

from regrow.core.exit_codes import OK, RUN_AGAIN
from regrow.core.ids import Generation, Instant, NodeId, StepNo
from regrow.core.job import JobSpec
from regrow.core.messages import facts
from regrow.core.messages.checkpoints import CheckpointFailed, CheckpointWritten, PartsWritten, SnapshotHeld
from regrow.core.messages.copies import CopiesHeld, CopyStreamEnded, StateKept
from regrow.core.messages.data import DataNoted
from regrow.core.messages.health import NodeExamined
from regrow.core.messages.log_rules import LogRulesNoted
from regrow.core.messages.observations import NodeSeen
from regrow.core.messages.succession import NodeReport
from regrow.core.messages.tables import TableMissed
from regrow.core.messages.unions import Fact
from regrow.core.messages.vocabulary import FaultSpec
from regrow.membership import deadlines
from regrow.membership import diagnosis as say
from regrow.membership.checkpoints import Checkpoints
from regrow.membership.elastic.resize import Resizing
from regrow.membership.elastic.resize_boundary import ResizeBoundary
from regrow.membership.incident import Incident
from regrow.membership.job import Job, WantedSize
from regrow.membership.nodes import Nodes
from regrow.membership.orders import Command, EndJob
from regrow.membership.pace import Pace
from regrow.membership.recovery import proof_of_life, standbys
from regrow.membership.recovery.auditing import Auditor
from regrow.membership.recovery.corruption import Corruption
from regrow.membership.recovery.formation import Generations
from regrow.membership.recovery.held_copies import HeldCopies
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.recovery.quarantine import Quarantine
from regrow.membership.recovery.regroup import Regroup
from regrow.membership.recovery.resuming import Resuming
from regrow.membership.recovery.standbys import Standbys
from regrow.membership.recovery.standstill import Standstills
from regrow.membership.recovery.stopping import Stopping
from regrow.membership.recovery.stragglers import Stragglers
from regrow.membership.roster import Roster, Stage, WorkerRecord
from regrow.membership.states import (
    Building,
    Closing,
    Ended,
    Forming,
    Gathering,
    Mending,
    Releasing,
    Restarting,
    Retaining,
    Saving,
    State,
    Switching,
    Training,
    Waiting,
)
from regrow.membership.succession.adoption import Succession
from regrow.membership.succession.memory import JobMemory
from regrow.membership.tables import Tables
from regrow.membership.view import JobView, NodeView, WorkerView
from regrow.membership.workers import WorkerFailure, Workers

__all__ = ["Command", "EndJob", "Gathering", "JobView", "Membership"]


class Membership:
    """Decides the membership of the job.

    Args:
        spec: settings of the job.
        faults: faults on demand, by plan.
        resume: whether the first workers load the newest durable checkpoint.
        memory: knowledge of a failed coordinator; `take_over` must be called next.
    """

    def __init__(
        self, spec: JobSpec, faults: Sequence[FaultSpec] = (), resume: bool = False, *, memory: JobMemory | None = None
    ) -> None:
        self.spec = spec
        self._memory = memory
        former = (None, None, None) if memory is None else (memory.plan, memory.incidents, memory.errors)
        self._job = job = Job(spec, faults, resume, plan=former[0], incidents=former[1], errors=former[2])
        self._orders, self._plan = job.orders, job.plan
        self._size, self._standbys = WantedSize(spec), Standbys(job)
        self._copies = HeldCopies(lambda: job.trainings.began)
        self._ladder = ladder = Ladder(job, self._standbys, self._copies)
        self._generations = Generations(job, self._size, ladder, self._standbys, self._copies)
        pace = Pace()
        self._checkpoints = Checkpoints(spec, self.roster, self._orders, pace, refused=job.refused)
        self._resuming = Resuming(job, ladder)
        self._regroup = Regroup(job, self._size, ladder, self._generations, self._checkpoints)
        self._resize_boundary = ResizeBoundary(job, ladder, self._regroup, pace)
        self._resizing = Resizing(job, self._size, self._standbys, self._regroup, self._resize_boundary)
        self._nodes = Nodes(job, ladder, self._generations, self._copies, self._resizing)
        self._auditor, self._quarantine = Auditor(job, ladder), Quarantine(job, self._resizing.unfit)
        corruption = Corruption(job, ladder, self._generations.doubts, self._quarantine)
        self._workers = Workers(
            job, ladder, self._standbys, corruption, self._auditor, self._resizing, self._resize_boundary, pace
        )
        self._standstills = Standstills(job, ladder, self._regroup)
        self._stopping = Stopping(job, self._checkpoints, self._regroup)
        self._stragglers = Stragglers(job, self._quarantine, self._resizing.drain_requested)
        self._succession = Succession(
            job, self._size, ladder, self._generations, self._standbys, self._nodes, self._workers, self._checkpoints
        )

    # --- called from outside -----------------------------------------------------------------------------------

    def handle(self, event: Fact, now: Instant) -> list[Command]:
        """Take one fact and return the commands that follow from it, in order."""
        if not isinstance(self._job.state, Ended):
            self.decide(event, now)
        return self._orders.take()

    def undelivered(self) -> list[Command]:
        """Return the commands decided before the machine failed on a fact."""
        return self._orders.take()

    def decide(self, event: Fact, now: Instant) -> None:
        """Take one fact and collect the commands that follow; `handle` returns them."""
        match event:
            case facts.NodeProgress():  # First, because nearly every fact is one.
                for commit in event.commits:
                    self._workers.apply(commit, now)
                    self._stragglers.committed(commit, now)
            case facts.NodeJoined():
                self._nodes.joined(event, now)
            case facts.NodeLost():
                self._nodes.lost(event, now)
                self._give_up_checkpoint(event.node, now)
            case facts.StopRequested():
                self._stopping.requested(event, now)
            case facts.FaultRequested():
                self._job.fault_requested(event.fault, now)
            case facts.ScaleRequested() | facts.DrainRequested() | facts.MoveRequested():
                self._resizing.asked(event, now)
            case facts.NodeDraining():
                self._resizing.draining(event, now)
            case facts.TimeAdvanced():
                self._checkpoints.time_passed(now)
                self._resizing.late(now)
                self._deadlines(now)
            case CopiesHeld() | StateKept():
                self._regroup.copied(event, now)
            case SnapshotHeld() | PartsWritten() | CheckpointWritten() | CheckpointFailed():
                self._checkpoints.apply(event, now)
            case CopyStreamEnded():
                self._orders.copied(event, self.spec.buddy_every, now)
            case NodeSeen():
                self._standstills.seen(event, now)
                self._resizing.seen(event, now)
            case TableMissed():
                self._orders.missed(event)
            case NodeExamined():
                self._quarantine.examined(event, now)
            case DataNoted() | LogRulesNoted():
                self._orders.note(event.text, now)
            case facts.NodeStopped():
                self._nodes.stopped(event, now)
                self._give_up_checkpoint(event.node, now)
            case NodeReport():
                pass  # Only the part that requested the report uses it.
            case _:
                self._workers.apply(event, now)
        self._make_transitions(now)

    def take_over(
        self,
        joined: Sequence[facts.NodeJoined],
        reports: Mapping[NodeId, NodeReport],
        failures: Sequence[WorkerFailure],
        now: Instant,
    ) -> list[Command]:
        """Take over a running job. `joined`: the connected agents, which have all reported; `failures`: came later."""
        if self._memory is not None:
            self._succession.adopt(joined, reports, failures, self._memory, now)
            for notice in self._succession.notices(self._memory, now):
                self._resizing.draining(notice, now)
            self._resizing.moves.move, self._resizing.moves.unfit = self._memory.move, dict(self._memory.quarantined)
            self._stopping.recalled(now)
        self._make_transitions(now)
        return self._orders.take()

    def remember(self) -> JobMemory:
        """Return the knowledge about the job that a successor cannot get from the agents."""
        return self._succession.remember(self._resizing.moves.move)

    def _make_transitions(self, now: Instant) -> None:
        """Make all transitions that the facts so far allow."""
        job = self._job
        while not isinstance(job.state, Ended):
            before = job.state
            self._advance(now)
            if job.state is before:
                break
        if job.unforeseen:
            for change in job.take_unforeseen():
                self._orders.note(say.unforeseen(change), now)

    def _give_up_checkpoint(self, lost: NodeId, now: Instant) -> None:
        """Give up the checkpoint that a lost node was writing, unless the job has ended or is being saved."""
        if not isinstance(self.state, Ended | Saving):
            self._checkpoints.node_lost(lost, now)

    def next_deadline(self) -> Instant | None:
        """Latest time at which `TimeAdvanced` must be sent; None: nothing is awaited."""
        short = self._job.short_since if isinstance(self.state, Restarting) else None
        waits = [
            deadlines.earliest(self.state, self.roster, self.spec),
            self._checkpoints.next_deadline(),
            self._resizing.next_deadline(),
            self._stopping.next_deadline,
            self._ladder.next_try,
            None if short is None else short + self.spec.node_deadline,
        ]
        return None if isinstance(self.state, Ended) else min((at for at in waits if at is not None), default=None)

    def snapshot(self) -> JobView:
        """The job's present state, for people."""
        return JobView(
            job=self.spec.job,
            phase=type(self.state).__name__.lower(),
            generation=self.generation,
            step=self.step,
            restarts=self._job.restarts,
            incidents=self._job.incidents.count - self._job.incidents.changes,
            changes=self._job.incidents.changes,
            ranks=[WorkerView.of(worker) for worker in self.roster.placed()],
            standbys=[WorkerView.of(worker) for worker in self.roster.standbys()],
            candidates=[WorkerView.of(worker) for _, worker in sorted(self.roster.candidates.items())],
            nodes=[NodeView.of(node) for node in self.roster.nodes.values()],
            replicas=self._job.replicas,
            wanted=self._size.wanted,
            min_replicas=self._size.limits.least,
            max_replicas=self._size.limits.most,
            unit=self.spec.unit,
            replaceable=self._job.proofs_text,
        )

    @property
    def state(self) -> State:
        """The job's present state, with its deadline."""
        return self._job.state

    @property
    def generation(self) -> Generation:
        """The newest membership that was ordered."""
        return self._job.generation

    @property
    def step(self) -> StepNo:
        """The newest known step."""
        return self._job.step

    @property
    def world(self) -> int:
        """Number of ranks of the present world, or of the one that is being formed."""
        return self._job.world

    @property
    def roster(self) -> Roster:
        """The workers and nodes of the job."""
        return self._job.roster

    @property
    def refused(self) -> Collection[StepNo]:
        """Durable checkpoints that some rank could not read."""
        return self._job.refused.keys()

    @property
    def tables(self) -> Tables:
        """Tables of the generations, the same for all their workers."""
        return self._orders.tables

    @property
    def quiet(self) -> bool:
        """True if steps are being run and no incident is open."""
        return isinstance(self.state, Training) and self.incident is None

    @property
    def incident(self) -> Incident | None:
        """The open incident."""
        return self._job.incidents.open

    def _deadlines(self, now: Instant) -> None:
        short = self._job.short_since
        late = deadlines.late(self.state, self.roster, self.spec, now)
        match self.state:
            case Building(verdict_at=at) if at is not None and now >= at:
                self._ladder.script_failed(now)
            case Building() if late:
                self._ladder.restart(f"rank {late[0].rank} was not ready for its first step in time", now, late[0])
            case Forming(deadline=at) if now >= at:
                if len(late) == len(self.roster.places):
                    late = []  # One of them blocks the others; it will not answer the halt either.
                self._ladder.fence_late(late, "no new groups in time", now)
            case Training(deadline=at):
                for standby in late:
                    self._standbys.failed(standby, now)
                    self._orders.fence(standby, "not ready in time", now, dump=True)
                if at is not None and now >= at:
                    self._ladder.mend("hang", [], "some ranks have finished and others have not", now, now)
            case Switching():
                self._resize_boundary.late(now, self._standstills.overdue)
            case Mending(halt_deadline=at):
                for standby in proof_of_life.give_up(self.roster, self._orders, now):
                    self._ladder.newcomer_failed(standby, now)
                self._late_in_mending(late, now, halt_over=now >= at)
            case Waiting(deadline=at) as waiting if now >= at:
                self._regroup.overdue(waiting, now)
            case Restarting(deadline=at) as state if now >= at and self.roster.present():
                self._ladder.not_ended(state, now)
            case Restarting() if short is not None and now >= short + self.spec.node_deadline:
                self._regroup.give_up(now)
            case Closing(again_at=at) if now >= at:
                self._generations.release_from_loop(now)
            case Releasing() if late:
                self._job.end(RUN_AGAIN, say.stays_after_loop(late[0].rank, deadlines.LAST_ACTS_S, self._job.step), now)
            case Releasing(again_at=at) if now >= at:
                self._job.goto(Releasing(now + self.spec.halt_deadline))
                self._orders.release(Stage.RELEASED, now)

    def _late_in_mending(self, late: list[WorkerRecord], now: Instant, *, halt_over: bool) -> None:
        """Fence workers that were never ready and those that hang instead of halting; wait for slow ones."""
        hung = self._standstills.overdue(now) if halt_over else []
        if halt_over:
            self._job.goto(Mending(now + self.spec.halt_patience / 4))
        if late or hung:
            self._ladder.fence_late([*late, *hung], "no answer in time", now)
            self._standstills.fenced(hung)
        elif halt_over:
            self._standstills.waiting_for(now)

    # --- progress ----------------------------------------------------------------------------------------------

    def _advance(self, now: Instant) -> None:
        """Go to the next state if the facts so far allow it."""
        job, roster = self._job, self._job.roster
        match job.state:
            case Building(verdict_at=None) if roster.all_at(Stage.READY):
                if self._resuming.agreed(now):
                    self._auditor.started(now)
                    self._generations.form(self.generation, now)
            case Building(verdict_at=None) if roster.all_at(Stage.GONE):
                self._job.end(OK, "", now)  # Any code but 0 has been judged by `_exited_building`.
            case Building(verdict_at=None) if roster.count(Stage.GONE) and roster.count(Stage.READY):
                self._ladder.await_verdict(now)
            case Mending() | Retaining() | Waiting(saving=False):
                self._regroup.advance(now)
            case Waiting(saving=True):
                self._regroup.saved(now)
            case Switching():
                self._resize_boundary.advance(now)
            case Forming() if roster.all_at(Stage.MEMBER, Stage.FINISHED):
                self._generations.formed(now)
                standbys.renew(roster, self._orders, now)
                self._nodes.formed()
            case Training(deadline=at) if roster.all_at(Stage.FINISHED):
                if self._checkpoints.finished(self.step, now):
                    self._generations.end_steps(now)
                elif at is not None:
                    self._job.goto(Training())
            case Training(deadline=None) if roster.count(Stage.FINISHED):
                self._job.goto(Training(now + self.spec.build_deadline))
            case Closing() if roster.all_at(Stage.FINISHED, Stage.GONE):
                self._generations.release(now)
            case Releasing() if roster.all_at(Stage.GONE):
                self._job.end(OK, "", now)
            case Restarting() if not roster.present() and self._checkpoints.idle:
                self._generations.build(Generation(self.generation + 1), now)
            case _:
                pass
        if isinstance(job.state, Ended):
            return
        if quiet := self.quiet:
            self._resizing.advance(now)
        self._standbys.top_up(now, quiet=quiet)
        self._resizing.let_go(now)
        self._stopping.advance(now)
        state = job.state
        if isinstance(state, Training):
            self._checkpoints.training(job.step, now)
        elif isinstance(state, Saving | Retaining) or (isinstance(state, Waiting) and state.saving):
            self._checkpoints.stop_schedule()
        else:
            self._checkpoints.interrupted()
