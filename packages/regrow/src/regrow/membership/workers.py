"""Facts about workers: their steps, their results, their errors and their exits."""

from regrow.core import records as record
from regrow.core.exit_codes import SCRIPT_ERROR, exit_text
from regrow.core.ids import Instant, Rank, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.data import LoaderShown
from regrow.core.messages.log_rules import LogRuleNews
from regrow.core.messages.observations import WorkerAlive
from regrow.core.messages.replacements import (
    ReplacementFact,
    ReplacementProven,
    ReplacementRefuted,
    ReplacementUnproven,
    not_proven,
)
from regrow.core.messages.replicas import CorruptionNamed, ReplicaFact, ReplicasDiffer, StateSampled
from regrow.core.messages.vocabulary import FaultKind, Role
from regrow.membership import diagnosis as say
from regrow.membership.elastic.resize import Resizing
from regrow.membership.elastic.resize_boundary import ResizeBoundary
from regrow.membership.job import Job
from regrow.membership.pace import Pace
from regrow.membership.recovery import said_at_end as say_end
from regrow.membership.recovery import standbys
from regrow.membership.recovery.auditing import Auditor
from regrow.membership.recovery.corruption import Corruption
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.recovery.standbys import Standbys
from regrow.membership.recovery_point import enter_halted, enter_ready
from regrow.membership.roster import BUILDING, IN_GENERATION, Stage, WorkerRecord
from regrow.membership.states import RUNNING, Building, Closing, Forming, Releasing
from regrow.membership.trainings import turning

_GenerationFact = (
    facts.WorkerFaulted
    | facts.WorkerHalted
    | facts.HaltMissed
    | facts.WorkerResumed
    | facts.WorkerCommitted
    | facts.WorkerFinished
    | ReplicaFact
    | StateSampled
)
WorkerNews = (
    facts.WorkerStarted
    | facts.WorkerReady
    | facts.ModulesImported
    | facts.WorkerNoted
    | LoaderShown
    | facts.WorkerFailed
    | facts.ScriptReturned
    | facts.ScriptEnded
    | facts.WorkerExited
    | WorkerAlive
    | facts.FaultFired
    | LogRuleNews
    | ReplacementFact
    | _GenerationFact
)
_NO_ANSWER = (facts.WorkerStarted, LogRuleNews)
"""Facts that an agent reports on behalf of a worker, so that they do not prove the worker alive."""
WorkerFailure = facts.WorkerFailed | facts.WorkerFaulted | facts.WorkerExited


class Workers:
    """Enters facts about workers; the ladder decides the consequences.

    Args:
        job: the job of the workers.
        ladder: repairs faults.
        standbys: receives what workers have built.
        corruption: receives reports of replicas that differ.
        auditor: receives samples of workers' state.
        resizing: receives facts about candidates and leavers.
        resize_boundary: receives planned stops.
        pace: receives committed steps.
    """

    def __init__(
        self,
        job: Job,
        ladder: Ladder,
        standbys: Standbys,
        corruption: Corruption,
        auditor: Auditor,
        resizing: Resizing,
        resize_boundary: ResizeBoundary,
        pace: Pace,
    ) -> None:
        self._job, self._ladder, self._standbys = job, ladder, standbys
        self._corruption, self._auditor = corruption, auditor
        self._resizing, self._resize_boundary, self._pace = resizing, resize_boundary, pace
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self._errors, self._plan = job.errors, job.plan
        self._short_in: int | None = None
        """Value of `restarts` at the last exit of a worker that was building, if memory had run out; else None."""
        self._ended: set[WorkerId] = set()  # workers whose scripts have ended
        self._noted: set[str] = set()  # notes that were written, so that each is written once

    def apply(self, event: WorkerNews, now: Instant) -> None:
        """Take one fact about a worker."""
        worker = self._roster.workers.get(event.worker)
        if worker is None:
            if isinstance(event, LogRuleNews):
                self._corruption.suspects.printed(None, event, now)
            return
        if self._roster.unproven and not isinstance(event, _NO_ANSWER):
            self._roster.unproven.pop(worker.worker, None)
        match event:
            case facts.WorkerCommitted():  # First, because nearly every fact is one.
                if event.generation == self._job.generation:
                    self._worker_committed(worker, event, now)
            case LogRuleNews():
                self._corruption.suspects.printed(worker, event, now)
            case facts.FaultFired():
                # Also for a worker that is gone, as its end may be known before its last facts arrive.
                injected = self._plan.fired(event, worker.rank)
                self._orders.write(*([injected] if injected is not None else []))
            case ReplacementRefuted():
                self._replacement_judged(event, now)  # Valid even if the worker that found it is gone.
            case _ if worker.stage is Stage.GONE:
                pass
            case facts.WorkerStarted():
                if worker.pid != event.pid and worker.stage in BUILDING:
                    worker.pid = event.pid
                    self._orders.write(record.WorkerForked(at=now, worker=worker.worker, pid=event.pid))
                if worker.stage is Stage.ORDERED:
                    self._roster.move(worker, Stage.STARTING, now)
            case facts.ScriptReturned():
                self._job.returned[event.worker] = now, event.threads
            case facts.ScriptEnded():
                self._ended.add(worker.worker)
            case facts.WorkerExited():
                self._worker_exited(worker, event, now)
            case facts.WorkerFailed():
                self._errors.apply(worker.worker, event.error, event.step)
                # An error of a worker that has never been in the world is only a failed attempt to fill its rank.
                member = worker.placed and worker.entered is not None and not worker.leaver
                if event.own and isinstance(self._job.state, RUNNING) and member:
                    text = say.script_error(worker.rank, event.step, event.error)
                    self._job.end_saved(SCRIPT_ERROR, text, now)
            case facts.WorkerReady():
                self._worker_ready(worker, event, now)
            case facts.ModulesImported():
                standbys.imported(self._roster, self._orders, worker, event, now)
            case LoaderShown() if worker.stage in (*BUILDING, *IN_GENERATION):
                self._standbys.shown(worker, event, now)
            case LoaderShown():
                pass  # Too late to be of use.
            case facts.WorkerNoted():
                self._worker_noted(worker, event, now)
            case ReplacementProven() | ReplacementUnproven():
                self._replacement_judged(event, now)
            case WorkerAlive():
                pass
            case _ if event.generation == self._job.generation:
                self._generation_fact(worker, event, now)

    def _generation_fact(self, worker: WorkerRecord, event: _GenerationFact, now: Instant) -> None:
        match event:
            case facts.WorkerHalted() if worker.stage is Stage.HALTING or self._resize_boundary.expects(worker):
                enter_halted(worker, event)
                if event.left:
                    self._orders.left[_rank(worker)] = event.left
                planned = worker.stage is not Stage.HALTING
                self._roster.move(worker, Stage.HALTED, now)
                if not event.stands:
                    self._roster.away.add(worker.worker)
                if planned:
                    self._resize_boundary.halted(event, now)
            case facts.WorkerHalted() if worker.stage is Stage.HALTED and event.stands:
                worker.restart_index, worker.verified = event.restart_index, event.verified
                self._roster.away.discard(worker.worker)
            case facts.HaltMissed():
                self._resize_boundary.missed(event, now)
            case facts.WorkerResumed() if worker.stage is Stage.JOINING:
                self._job.incidents.resumed(event, fresh=worker.entered == event.generation)
                self._auditor.resumed(worker, event)
                self._joined(worker, now)
            case facts.WorkerFinished() if event.goes_on and self._job.past_last_step:
                pass  # Repeated by an agent; the worker was ordered to go on since.
            case facts.WorkerFinished() if worker.stage in (Stage.JOINING, Stage.MEMBER):
                worker.state_at, worker.goes_on, worker.ended = event.state_at, event.goes_on, event.training
                self._job.step = max(self._job.step, event.state_at)
                self._roster.move(worker, Stage.FINISHED, now)
                self._served(worker, now)
            case facts.WorkerFaulted():
                self._worker_faulted(worker, event, now)
            case StateSampled() if isinstance(self._job.state, RUNNING):
                self._auditor.sampled(worker, event, now)
            case ReplicasDiffer() | CorruptionNamed() if isinstance(self._job.state, RUNNING):
                self._corruption.apply(event, now)
            case _:
                pass

    def _worker_noted(self, worker: WorkerRecord, event: facts.WorkerNoted, now: Instant) -> None:
        if event.text not in self._noted:
            self._noted.add(event.text)
            self._orders.note(event.text, now, worker)
            if event.doubts:
                self._job.doubted(event.text, now)

    def _replacement_judged(self, event: ReplacementFact, now: Instant) -> None:
        """Take evidence about newcomers, from any worker."""
        replacements = self._job.replacements
        self._standbys.proofs.apply(event, now)
        if isinstance(event, ReplacementProven):
            replacements.proves(event.rank, event.step)
            self._orders.write(record.ReplacementJudged(at=now, rank=event.rank, step=event.step))
        elif isinstance(event, ReplacementUnproven):
            if replacements.doubts(event.reason):
                self._orders.note(not_proven(event.reason, event.rank), now)
        elif replacements.refutes(event.reason, alone=event.alone):
            self._orders.write(record.ReplacementJudged(at=now, rank=event.rank, step=event.step, reason=event.reason))
            for each in [*self._roster.standbys(), *self._roster.candidates.values()]:
                self._orders.fence(each, "no newcomer is equal to the rank that it would replace", now)
            self._standbys.proofs.pause(now)
            if self._job.belief.newcomers:
                self._job.doubted(event.reason, now)
            reported = self._roster.workers[event.worker]
            fresh = (
                reported.placed and reported.living and reported.role is not Role.RANK and reported.committed is None
            )
            if fresh and reported.entered is not None and isinstance(self._job.state, RUNNING):
                self._orders.fence(reported, event.reason, now)
                self._ladder.mend("replacement", [reported], event.reason, now, now)

    def _joined(self, worker: WorkerRecord, now: Instant) -> None:
        if isinstance(self._job.state, Forming):
            worker.state_at = self._job.state.step
        worker.ready, worker.restart_index, worker.torn_at = False, 0, None
        self._roster.move(worker, Stage.MEMBER, now)

    def _worker_ready(self, worker: WorkerRecord, event: facts.WorkerReady, now: Instant) -> None:
        if worker.stage not in BUILDING or (worker.script_ordered and not event.endpoint):
            return
        if not event.endpoint:
            if worker.stage is not Stage.IDLE:
                self._orders.write(record.WorkerBuilt(at=now, worker=worker.worker, seconds=event.built_s))
            self._roster.move(worker, Stage.IDLE, now)
            self._standbys.start_if_placed(worker, now)
            standbys.prepare(self._roster, self._orders, worker)
            return
        self._standbys.learn(worker, event, now)
        enter_ready(worker, event)
        self._auditor.keep_own(worker)
        for step, why in event.refused.items():
            self._job.refused.setdefault(step, f"rank {worker.rank}: {why}")
        self._roster.grouped = self._roster.grouped or event.sharded
        self._roster.move(worker, Stage.READY, now)
        self._orders.write(record.WorkerBuilt(at=now, worker=worker.worker, seconds=event.built_s))
        if worker.placed:
            self._job.incidents.built(event)
        if worker.candidate_for is not None:
            self._resizing.candidate_ready(worker, now)
        else:
            self._standbys.built(worker, now)

    def _worker_committed(self, worker: WorkerRecord, event: facts.WorkerCommitted, now: Instant) -> None:
        if worker.stage is Stage.JOINING:
            self._joined(worker, now)
        if worker.stage not in (Stage.MEMBER, Stage.FINISHED):
            return
        self._pace.committed(event, now)
        for reported in self._plan.unstruck(event.step, now):
            self._orders.note(reported, now)
        if worker.role is not Role.RANK:
            self._job.belief.newcomers = True
            if doubt := self._job.belief.copied() or self._job.replacements.refuted:
                self._job.doubted(doubt, now)
        worker.committed, worker.state_at = event.step, max(worker.state_at, StepNo(event.step + 1))
        self._job.step = max(self._job.step, worker.state_at)
        self._job.incidents.committed(event)
        self._served(worker, now)

    def _worker_faulted(self, worker: WorkerRecord, event: facts.WorkerFaulted, now: Instant) -> None:
        if worker.stage not in (*IN_GENERATION, Stage.HALTING) or worker.faulted_in == event.generation:
            return
        rank, error = _rank(worker), event.error
        if event.kind is FaultKind.BODY:
            worker.faulted_in = event.generation
            reported = self._errors.shared(event.step, event.generation, error)
            self._ladder.losses.error(rank, event.step, error)
            self._corruption.suspects.not_finite(worker, error)
            if self._errors.again(event.step, event.generation, error):
                behind = self._job.incidents.cause_elsewhere()
                text = say.script_error(rank, event.step, error, again=True, behind=behind)
                self._job.end_saved(SCRIPT_ERROR, text, now)
                return
            if reported:
                self._job.incidents.also([rank])
                return
            struck = self._plan.when(worker.worker, now)
            self._ladder.mend("exception", [worker], f"{error.type}: {error.message}", now, struck)
        elif worker.stage in IN_GENERATION:
            if event.kind is FaultKind.COLLECTIVE and self._errors.unexplained(event.step, event.generation, error):
                self._job.end_saved(SCRIPT_ERROR, say.script_error(rank, event.step, error, again=True), now)
                return
            what = "hydration" if event.kind is FaultKind.HYDRATION else "collective"
            self._ladder.mend(what, [], f"{what} failed on rank {rank}: {error.message}", now, now)

    def _worker_exited(self, worker: WorkerRecord, event: facts.WorkerExited, now: Instant) -> None:
        was, worker.exit_code = worker.stage, event.code
        holder = None if worker.rank is None or worker.leaver else self._roster.places.get(worker.rank)
        if event.left and holder is not None and (worker.placed or self._roster.workers[holder].entered is None):
            self._orders.left[_rank(worker)] = event.left
        if isinstance(self._job.state, RUNNING):
            self._ladder.newcomer_failed(worker, now)
        self._roster.move(worker, Stage.GONE, now)
        for forgotten in self._roster.forget_dead():
            self._errors.forget(forgotten)
            self._ended.discard(forgotten)
        why = exit_text(event.code, memory=event.memory)
        self._orders.write(
            record.WorkerGone(at=now, worker=worker.worker, rank=worker.rank, code=event.code, reason=why)
        )
        self._resizing.changed()
        if was is Stage.FENCED or worker.leaver:
            return
        if worker.candidate_for is not None:
            self._resizing.candidate_lost(worker, why, now)
        elif worker.role is Role.PROVER:
            self._standbys.proofs.lost(worker, event, now)
        elif not worker.placed:
            self._standbys.failed(worker, now)
        elif isinstance(self._job.state, Building):
            self._exited_building(worker, event, why, now)
        elif isinstance(self._job.state, Releasing) or turning(self._job.state):
            if event.code < 0 and (turning(self._job.state) or worker.worker in self._ended):
                # All ranks have met after the loop and this one's script had ended, so nothing can be lost.
                text = say.died_after_loop(worker.rank, event.code, self._job.step, through=True)
                self._orders.note(text, now, worker)
            elif event.code:
                self._died_after_loop(worker, event, now)
        elif isinstance(self._job.state, Closing) and event.code == 0:
            pass  # Its script has ended normally.
        elif self._job.past_last_step and self._is_the_end(worker, event):
            self._died_after_loop(worker, event, now)
        elif isinstance(self._job.state, RUNNING) and not self._ladder.breaks_devices(worker, now):
            self._lost(worker, event, now)

    def _died_after_loop(self, worker: WorkerRecord, event: facts.WorkerExited, now: Instant) -> None:
        reported = self._ladder.own_error(worker)
        self._job.end(SCRIPT_ERROR, reported or say.died_after_loop(worker.rank, event.code, self._job.step), now)

    def _is_the_end(self, worker: WorkerRecord, event: facts.WorkerExited) -> bool:
        """True if an exit after the last step ends the job: by the script's choice, or as no worker is left."""
        if event.code > 0 and self._errors.of(worker.worker) is None:
            return True
        return not self._spec.durable and not any(each.living and each.entered for each in self._roster.placed())

    def _exited_building(self, worker: WorkerRecord, event: facts.WorkerExited, why: str, now: Instant) -> None:
        code, memory = event.code, event.memory
        if code == 0 and not worker.has_session:
            return
        if code < 0:
            again = self._short_in is not None and self._short_in < self._job.restarts
            self._short_in = self._job.restarts if memory else None
            if again and self._short_in is not None:
                self._job.end(SCRIPT_ERROR, f"rank {worker.rank} {why}, for the second time before its first step", now)
                return
            self._ladder.restart(f"rank {worker.rank} {why}", now, worker)
        else:
            self._ladder.await_verdict(now)

    def _lost(self, worker: WorkerRecord, event: facts.WorkerExited, now: Instant) -> None:
        rank = _rank(worker)
        reported, member = self._errors.of(worker.worker), worker.entered is not None
        who = f"rank {rank}" if member else say_end.newcomer(rank)
        if reported is not None:
            error, step = reported
            if member and not say.cut_off(error) and self._errors.ended_again(step, error):
                self._job.end_saved(SCRIPT_ERROR, say.script_error(rank, step, error, again=True), now)
                return
            cause = say.cut_off(error) or f"{error.type}: {error.message}"
            self._ladder.losses.text = f"{who} failed by {cause}"
        else:
            cause = exit_text(event.code, memory=event.memory)
        self._ladder.mend("exit", [worker], f"{who} {cause}", now, self._plan.when(worker.worker, event.at))

    def _served(self, worker: WorkerRecord, now: Instant) -> None:
        """Note that a rank has committed again; the last one closes the incident."""
        incidents = self._job.incidents
        if incidents.open is not None:
            self._orders.write(*incidents.served(_rank(worker), self._job.generation, now))
            if incidents.open is not None:
                return
        self._corruption.suspects.gone_on(now)
        if reported := self._ladder.losses.take_passed():
            self._orders.note(reported, now, worker)


def _rank(worker: WorkerRecord) -> Rank:
    return worker.rank if worker.rank is not None else Rank(-1)
