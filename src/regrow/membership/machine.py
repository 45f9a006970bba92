"""The coordinator's decisions: facts in, orders out. No clock, no I/O; time is an argument.

    Gathering → Building → Forming → Training ⇄ Mending → Forming …        (restart rung: → Restarting → Building)
                                       └→ Releasing → Ended

In every state with something to wait for there is a deadline, and what has not answered by then is fenced.
"""

from collections.abc import Sequence

from regrow.core import events as record
from regrow.core.checkpoint_messages import CheckpointFailed, CheckpointWritten, PartsWritten, SnapshotHeld
from regrow.core.copies import CopiesHeld, CopyStreamed
from regrow.core.data_messages import DataNoted
from regrow.core.ids import Generation, Instant, Rank, StepNo
from regrow.core.messages import (
    Fact,
    FaultFired,
    FaultKind,
    FaultRequested,
    FaultSpec,
    JobFacts,
    NodeJoined,
    NodeLost,
    NodeProgress,
    NodeStopped,
    StopRequested,
    TimeAdvanced,
    WorkerCommitted,
    WorkerExited,
    WorkerFailed,
    WorkerFaulted,
    WorkerFinished,
    WorkerHalted,
    WorkerHung,
    WorkerReady,
    WorkerResumed,
    WorkerStarted,
)
from regrow.core.replica_messages import CorruptionNamed, ReplicaFact, ReplicasDiffer
from regrow.membership import deadlines
from regrow.membership import diagnosis as say
from regrow.membership.checkpoints import Checkpoints
from regrow.membership.corruption import Corruption
from regrow.membership.incident import Incident
from regrow.membership.ladder import OK, RUN_AGAIN, SCRIPT_ERROR, Ladder
from regrow.membership.nodes import Nodes
from regrow.membership.orders import Command, EndJob
from regrow.membership.roster import BUILDING, IN_GENERATION, Roster, Stage, WorkerRecord
from regrow.membership.states import (
    Building,
    Ended,
    Forming,
    Gathering,
    Mending,
    Releasing,
    Restarting,
    State,
    Training,
)
from regrow.membership.view import JobView, NodeView, WorkerView

__all__ = ["OK", "RUN_AGAIN", "SCRIPT_ERROR", "Command", "EndJob", "Gathering", "JobView", "Membership"]

_GenerationFact = WorkerFaulted | WorkerHalted | WorkerResumed | WorkerCommitted | WorkerFinished | ReplicaFact
_WorkerFact = WorkerStarted | WorkerReady | WorkerFailed | WorkerExited | WorkerHung | FaultFired | _GenerationFact


class Membership:
    """Decides who is in the job.

    Args:
        facts: what the job was started with.
        faults: faults on demand, by plan.
        resume: whether the first workers load the newest durable checkpoint.
    """

    def __init__(self, facts: JobFacts, faults: Sequence[FaultSpec] = (), resume: bool = False) -> None:
        self.facts = facts
        self._ladder = Ladder(facts, faults, resume)
        self._nodes = Nodes(self._ladder)
        self._corruption = Corruption(self._ladder)
        self._orders, self._errors, self._plan = self._ladder.orders, self._ladder.errors, self._ladder.plan
        self._checkpoints = Checkpoints(facts, self.roster, self._orders)

    # --- what the outside calls --------------------------------------------------------------------------------

    def handle(self, event: Fact, now: Instant) -> list[Command]:
        """Take in one fact; return what is to be done, in order."""
        if isinstance(self.state, Ended):
            return []
        match event:
            case NodeJoined():
                self._nodes.joined(event, now)
            case NodeLost():
                self._nodes.lost(event, now)
                self._checkpoints.node_lost(event.node, now)
            case StopRequested():
                self._ladder.end(RUN_AGAIN, say.stopped(event.reason, self.step), now)
            case FaultRequested():
                self._fault_requested(event.fault, now)
            case TimeAdvanced():
                self._checkpoints.time_passed(now)
                self._deadlines(now)
            case NodeProgress():
                for commit in event.commits:
                    self._worker_fact(commit, now)
            case CopiesHeld():
                self._ladder.copies.tell(event)
            case SnapshotHeld() | PartsWritten() | CheckpointWritten() | CheckpointFailed():
                self._checkpoints.tell(event, now)
            case CopyStreamed():
                self._orders.copied(event, self.facts.buddy_every, now)
            case DataNoted():
                self._orders.note(event.text, now)
            case NodeStopped():
                pass
            case _:
                self._worker_fact(event, now)
        while not isinstance(self.state, Ended):
            before = self.state
            self._advance(now)
            if self.state is before:
                break
        return self._orders.take()

    def next_deadline(self) -> Instant | None:
        """When `TimeAdvanced` must be sent at the latest; None: nothing is being waited for."""
        waits = [deadlines.earliest(self.state, self.roster, self.facts), self._checkpoints.next_deadline()]
        return min((at for at in waits if at is not None), default=None)

    def snapshot(self) -> JobView:
        """What the job looks like now."""
        return JobView(
            job=self.facts.job,
            phase=type(self.state).__name__.lower(),
            generation=self.generation,
            step=self.step,
            restarts=self._ladder.restarts,
            incidents=self._ladder.incidents.count,
            ranks=[WorkerView.of(worker) for worker in self.roster.seated()],
            standbys=[WorkerView.of(worker) for worker in self.roster.standbys()],
            nodes=[NodeView.of(node) for node in self.roster.nodes.values()],
        )

    @property
    def state(self) -> State:
        """What the job is doing, and until when."""
        return self._ladder.state

    @property
    def generation(self) -> Generation:
        """The newest membership that was ordered."""
        return self._ladder.generation

    @property
    def step(self) -> StepNo:
        """The newest state that is known of."""
        return self._ladder.step

    @property
    def roster(self) -> Roster:
        """Who there is."""
        return self._ladder.roster

    @property
    def incident(self) -> Incident | None:
        """The open incident."""
        return self._ladder.incidents.open

    # --- people, time ------------------------------------------------------------------------------------------

    def _fault_requested(self, fault: FaultSpec, now: Instant) -> None:
        worker = self.roster.places.get(fault.rank)
        if worker is None:
            self._orders.note(f"no rank {fault.rank} to fail: the world has ranks 0 to {self.facts.world - 1}", now)
        elif self._plan.add(fault):
            self._orders.arm(self.roster.workers[worker], fault)

    def _deadlines(self, now: Instant) -> None:
        self._nodes.overdue(now)
        late = deadlines.late(self.state, self.roster, self.facts, now)
        match self.state:
            case Building(verdict_at=at) if at is not None and now >= at:
                self._ladder.script_failed(now)
            case Building() if late:
                self._ladder.restart(f"rank {late[0].rank} was not ready for its first step in time", now, late[0])
            case Forming(deadline=at) if now >= at:
                if len(late) == len(self.roster.places):
                    # One holds the others up: it was seen to hang, or it will not answer the halt either.
                    late = [worker for worker in late if worker.suspect]
                self._ladder.fence_late(late, "no new groups in time", now)
            case Training(deadline=at):
                for standby in late:
                    self._ladder.standby_failed(standby, now)
                    self._orders.fence(standby, "not ready in time", now, dump=True)
                if at is not None and now >= at:
                    self._ladder.mend("hang", [], "some ranks have finished and others have not", now, now)
            case Mending() if late:
                self._ladder.fence_late(late, "no answer in time", now)
            case Restarting(deadline=at) if now >= at and self.roster.present():
                stuck = [worker.worker for worker in self.roster.workers.values() if worker.stage is not Stage.GONE]
                self._ladder.end(RUN_AGAIN, say.cannot_be_ended(stuck), now)
            case Releasing() if late:
                self._ladder.end(RUN_AGAIN, say.stays_after_loop(late[0].rank, self.facts.build_deadline), now)
            case Releasing(again_at=at) if now >= at:
                self._ladder.state = Releasing(now + self.facts.halt_deadline)
                self._orders.release(Stage.RELEASED, now)
            case _:
                pass

    # --- facts about workers -----------------------------------------------------------------------------------

    def _worker_fact(self, event: _WorkerFact, now: Instant) -> None:
        worker = self.roster.workers.get(event.worker)
        if worker is None:
            return
        match event:
            case FaultFired():
                # Even of a worker that is gone: its end may be known before what it said last.
                injected = self._plan.fired(event, worker.rank)
                self._orders.write(*([injected] if injected is not None else []))
            case _ if worker.stage is Stage.GONE:
                pass
            case WorkerStarted():
                if worker.pid != event.pid and worker.stage in BUILDING:
                    worker.pid = event.pid
                    self._orders.write(record.WorkerForked(at=now, worker=worker.worker, pid=event.pid))
                if worker.stage is Stage.ORDERED:
                    self.roster.move(worker, Stage.STARTING, now)
            case WorkerExited():
                self._worker_exited(worker, event, now)
            case WorkerFailed():
                self._errors.tell(worker.worker, event.error, event.step)
                if event.own and isinstance(self.state, Forming | Training | Mending) and worker.rank is not None:
                    text = say.script_error(worker.rank, event.step, event.error)
                    self._ladder.end(SCRIPT_ERROR, text, now)
            case WorkerReady():
                self._worker_ready(worker, event, now)
            case WorkerHung():
                self._worker_hung(worker, event, now)
            case _ if event.generation == self.generation:
                self._generation_fact(worker, event, now)

    def _generation_fact(self, worker: WorkerRecord, event: _GenerationFact, now: Instant) -> None:
        match event:
            case WorkerHalted() if worker.stage is Stage.HALTING:
                worker.state_at, worker.ready, worker.inside = event.state_at, event.ready, event.inside
                worker.verified = event.verified
                self.roster.move(worker, Stage.HALTED, now)
            case WorkerResumed() if worker.stage is Stage.JOINING:
                self._ladder.incidents.resumed(event.form_s, event.hydrated_bytes)
                self._joined(worker, now)
            case WorkerCommitted():
                self._worker_committed(worker, event, now)
            case WorkerFinished() if worker.stage in IN_GENERATION - {Stage.FINISHED}:
                worker.state_at = event.state_at
                self._ladder.step = max(self.step, event.state_at)
                self.roster.move(worker, Stage.FINISHED, now)
                self._served(worker, now)
            case WorkerFaulted():
                self._worker_faulted(worker, event, now)
            case ReplicasDiffer() | CorruptionNamed() if isinstance(self.state, Forming | Training | Mending):
                self._corruption.tell(event, now)
            case _:
                pass

    def _joined(self, worker: WorkerRecord, now: Instant) -> None:
        if isinstance(self.state, Forming):
            worker.state_at = self.state.step
        worker.suspect = worker.ready = False
        worker.inside = 0
        self.roster.move(worker, Stage.MEMBER, now)

    def _worker_ready(self, worker: WorkerRecord, event: WorkerReady, now: Instant) -> None:
        if worker.stage not in BUILDING or (worker.script_ordered and not event.endpoint):
            return
        if not event.endpoint:
            if worker.stage is not Stage.IDLE:
                self._orders.write(record.WorkerBuilt(at=now, worker=worker.worker, seconds=event.built_s))
            self.roster.move(worker, Stage.IDLE, now)
            self._ladder.start_if_seated(worker, now)
            return
        worker.has_session = True
        worker.state_at, worker.endpoint, worker.layout = event.state_at, event.endpoint, event.layout
        worker.holding, worker.sharded, worker.ready = event.holding, event.sharded, False
        self.roster.move(worker, Stage.READY, now)
        self._orders.write(record.WorkerBuilt(at=now, worker=worker.worker, seconds=event.built_s))
        self._ladder.built(worker, now)

    def _worker_committed(self, worker: WorkerRecord, event: WorkerCommitted, now: Instant) -> None:
        if worker.stage is Stage.JOINING:
            self._joined(worker, now)
        if worker.stage not in (Stage.MEMBER, Stage.FINISHED):
            return
        worker.committed = event.step
        worker.state_at = max(worker.state_at, StepNo(event.step + 1))
        self._ladder.step = max(self.step, worker.state_at)
        self._served(worker, now)

    def _worker_faulted(self, worker: WorkerRecord, event: WorkerFaulted, now: Instant) -> None:
        if worker.stage not in IN_GENERATION | {Stage.HALTING} or worker.faulted_in == event.generation:
            return
        rank, error = _rank(worker), event.error
        if event.kind is FaultKind.BODY:
            worker.faulted_in = event.generation
            if self._errors.again(event.step, rank, error):
                self._ladder.end(SCRIPT_ERROR, say.script_error(rank, event.step, error, again=True), now)
                return
            struck = self._plan.when(worker.worker, now)
            self._ladder.mend("exception", [worker], f"{error.type}: {error.message}", now, struck)
        elif worker.stage in IN_GENERATION:
            what = "collective" if event.kind is FaultKind.COLLECTIVE else "hydration"
            self._ladder.mend(what, [], f"{what} failed on rank {rank}: {error.message}", now, now)

    def _worker_hung(self, worker: WorkerRecord, event: WorkerHung, now: Instant) -> None:
        if worker.stage in (Stage.HALTING, Stage.HALTED):
            worker.suspect = True
            return
        # Who hangs in a body of an older generation does not come to this one either.
        stuck = worker.stage is Stage.JOINING and event.generation < self.generation
        if not stuck and (event.generation != self.generation or worker.stage not in IN_GENERATION):
            return
        left = [w for w in self.roster.seated(Stage.FINISHED) if w.state_at <= event.step]
        if left:
            self._ladder.end(SCRIPT_ERROR, say.left_alone(_rank(left[0]), left[0].state_at, event.step), now)
            return
        self._orders.fence(worker, f"no progress for {event.seconds:.1f} s", now, dump=True)
        self._ladder.mend("hang", [worker], event.detail, now, self._plan.when(worker.worker, now - event.seconds))

    def _worker_exited(self, worker: WorkerRecord, event: WorkerExited, now: Instant) -> None:
        was, worker.exit_code = worker.stage, event.code
        self.roster.move(worker, Stage.GONE, now)
        for forgotten in self.roster.forget_dead():
            self._errors.forget(forgotten)
        why = say.exit_text(event.code)
        self._orders.write(
            record.WorkerGone(at=now, worker=worker.worker, rank=worker.rank, code=event.code, reason=why)
        )
        if was is Stage.FENCED:
            return
        if not worker.seated:
            self._ladder.standby_failed(worker, now)
        elif isinstance(self.state, Building):
            self._exited_building(worker, event.code, now)
        elif isinstance(self.state, Releasing):
            if event.code != 0:
                self._ladder.end(
                    SCRIPT_ERROR, self._ladder.own_error(worker) or say.died_after_loop(worker.rank, event.code), now
                )
        elif isinstance(self.state, Forming | Training | Mending):
            self._lost(worker, event, now)

    def _exited_building(self, worker: WorkerRecord, code: int, now: Instant) -> None:
        if code == 0 and not worker.has_session:
            return
        if code < 0:
            self._ladder.restart(f"rank {worker.rank} {say.exit_text(code)}", now, worker)
        else:
            self._await_verdict(now)

    def _await_verdict(self, now: Instant) -> None:
        if self.state == Building():
            self._ladder.state = Building(verdict_at=now + self.facts.verdict_grace)

    def _lost(self, worker: WorkerRecord, event: WorkerExited, now: Instant) -> None:
        rank = _rank(worker)
        told = self._errors.of(worker.worker)
        if told is not None:
            error, step = told
            if self._errors.again(step, None, error):
                self._ladder.end(SCRIPT_ERROR, say.script_error(rank, step, error, again=True), now)
                return
            cause = f"{error.type}: {error.message}"
            self._ladder.told = f"rank {rank} failed by {cause}"
        else:
            cause = say.exit_text(event.code)
        self._ladder.mend("exit", [worker], f"rank {rank} {cause}", now, self._plan.when(worker.worker, event.at))

    # --- progress ----------------------------------------------------------------------------------------------

    def _advance(self, now: Instant) -> None:
        """Take the next step that the facts so far allow."""
        roster = self.roster
        match self.state:
            case Building(verdict_at=None) if roster.all_at(Stage.READY):
                self._ladder.form(self.generation, now)
            case Building(verdict_at=None) if roster.all_at(Stage.GONE):
                self._ladder.end(OK, "", now)  # Any code but 0 has been judged by `_exited_building`.
            case Building(verdict_at=None) if roster.count(Stage.GONE) and roster.count(Stage.READY):
                self._await_verdict(now)
            case Mending():
                self._ladder.fill(now)
                if not roster.count(Stage.HALTING):
                    self._ladder.incidents.halted(now)
                if roster.all_at(Stage.HALTED, Stage.READY):
                    self._ladder.form(Generation(self.generation + 1), now)
            case Forming() if roster.all_at(Stage.MEMBER, Stage.FINISHED):
                self._ladder.formed(now)
            case Training(deadline=at) if roster.all_at(Stage.FINISHED):
                if self._checkpoints.finished(self.step, now):
                    self._ladder.release(now)
                elif at is not None:
                    self._ladder.state = Training()
            case Training(deadline=None) if roster.count(Stage.FINISHED):
                self._ladder.state = Training(now + self.facts.build_deadline)
            case Releasing() if roster.all_at(Stage.GONE):
                self._ladder.end(OK, "", now)
            case Restarting() if not roster.present() and len(roster.living_nodes()) == self.facts.nodes:
                if self._checkpoints.idle:
                    self._ladder.build(Generation(self.generation + 1), now)
            case _:
                pass
        if isinstance(self.state, Training) and self.incident is None:
            self._ladder.top_up_standbys(now)
        if isinstance(self.state, Training):
            self._checkpoints.training(self.step, now)
        else:
            self._checkpoints.interrupted()

    def _served(self, worker: WorkerRecord, now: Instant) -> None:
        """A rank has gone on; the last one closes the incident."""
        self._orders.write(*self._ladder.incidents.served(_rank(worker), self.generation, now))


def _rank(worker: WorkerRecord) -> Rank:
    return worker.rank if worker.rank is not None else Rank(-1)
