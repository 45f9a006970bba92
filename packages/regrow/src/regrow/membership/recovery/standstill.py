"""Reaction to workers that make no progress: wait and report them, or replace them."""

import msgspec

from regrow.core.exit_codes import SCRIPT_ERROR
from regrow.core.ids import Instant, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.observations import NodeSeen, TakeStacks, WorkerObservation
from regrow.core.phase import IN_BODY
from regrow.membership import diagnosis as say
from regrow.membership.job import Job
from regrow.membership.recovery import hangs
from regrow.membership.recovery.hangs import Bounds, RankObservation
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.recovery.regroup import Regroup
from regrow.membership.roster import Stage, WorkerRecord
from regrow.membership.states import Forming, Switching, Training

FRESH_S: Seconds = 12.0
"""Observations older than this do not count: the worker makes progress again, or its agent is paused."""
_JUDGE_A_RANK_S: Seconds = 0.002
_JUDGE_MOST_S: Seconds = 0.2
"""Least pause between two judgements: this much for each rank, as one covers all of them, up to this limit."""
_SAY_S: Seconds = 60.0
_LIKE_SLOW = 2.0
_ANEW_MOST = 3
"""Most times that groups are formed anew at one step; a step that still exceeds all bounds is slow, not dead."""


class Standstills:
    """Keeps the agents' observations and acts on the verdicts of `hangs`.

    Args:
        job: the job of the workers.
        ladder: replaces hanging workers.
        regroup: knows which ranks have which part of the state.
    """

    def __init__(self, job: Job, ladder: Ladder, regroup: Regroup) -> None:
        self._job, self._ladder, self._regroup = job, ladder, regroup
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self._observations: dict[WorkerId, tuple[WorkerObservation, Instant]] = {}
        self._longest: dict[NodeId, Seconds] = {}
        self._suspects: dict[WorkerId, Instant] = {}
        """Workers that were judged to hang once, with the time of this; a newer observation must confirm it."""
        self._judged_at: Instant = float("-inf")
        self._said_at: Instant = float("-inf")
        self._patience = 1.0
        self._anew_at = StepNo(-1)
        self._anew = 0
        """Number of times that groups were formed anew at step `_anew_at` because all waited for their devices."""
        self._slow: Seconds = 0.0
        """Duration of the slowest step that ended after a long wait; similar steps do not lead to new groups."""

    @property
    def bounds(self) -> Bounds:
        """Present bounds on the standstill of workers."""
        spec = self._spec
        longest = max(self._longest.values(), default=0.0)
        return Bounds.of(spec.hang_timeout, spec.hang_floor, longest, self._patience)

    def seen(self, event: NodeSeen, now: Instant) -> None:
        """Store an agent's observations of its workers, and judge at intervals which workers hang."""
        self._longest[event.node] = event.longest
        for observation in event.observations:
            if observation.worker in self._roster.workers:
                self._observations[observation.worker] = (observation, now)
        begun = [s.step for s in event.observations if s.phase in IN_BODY and s.generation == self._job.generation]
        if begun and isinstance(self._job.state, Training) and self._left_alone(max(begun), now):
            return
        if now - self._judged_at < min(_JUDGE_MOST_S, _JUDGE_A_RANK_S * len(self._roster.places)):
            return
        self._judged_at = now
        if len(self._observations) > 2 * len(self._roster.workers):
            self._observations = {
                name: seen for name, seen in self._observations.items() if name in self._roster.workers
            }
        # While workers are halting, `overdue` judges them.
        if isinstance(self._job.state, Training | Switching | Forming) and not self._roster.count(Stage.HALTING):
            self._judge(now)

    def observation(self, worker: WorkerRecord, now: Instant) -> WorkerObservation | None:
        """The last observation of a worker; None if there is none or it is too old."""
        seen = self._observations.get(worker.worker)
        return seen[0] if seen is not None and now - seen[1] <= FRESH_S else None

    def overdue(self, now: Instant) -> list[WorkerRecord]:
        """Workers that were ordered to halt but hang. Workers that are only late are not among them."""
        late = [w for w in (*self._roster.placed(Stage.HALTING), *self._away()) if self._silent(w, now)]
        names = {worker.worker for worker in late}
        self._suspects = {name: at for name, at in self._suspects.items() if name in names}
        return self._given_up([worker for worker in late if self._confirmed(worker, now)], now)

    def waiting_for(self, now: Instant) -> None:
        """Write a note, every minute, that names the workers for which a halted job waits."""
        looks = [self._look(w, now) for w in (*self._roster.placed(Stage.HALTING), *self._away())]
        if looks:
            self._say(looks, "it has been asked to stop its step", now)

    def fenced(self, workers: list[WorkerRecord]) -> None:
        """Allow more time from now on, as `workers` were replaced for standing still and may only have been slow."""
        if self._spec.hang_timeout is None and workers:
            self._patience = min(hangs.MOST_PATIENCE, 2 * self._patience)

    # --- parts of it -------------------------------------------------------------------------------------------

    def _away(self) -> list[WorkerRecord]:
        return [self._roster.workers[name] for name in sorted(self._roster.away)]

    def _silent(self, worker: WorkerRecord, now: Instant) -> bool:
        return hangs.overdue(self.observation(worker, now), now - worker.since, self.bounds)

    def _look(self, worker: WorkerRecord, now: Instant) -> RankObservation:
        rank = worker.rank if worker.rank is not None else Rank(-1)
        observation = self.observation(worker, now)
        if observation is not None and now - worker.since < observation.seconds:
            # Standstill from before this stage does not count.
            observation = msgspec.structs.replace(observation, seconds=now - worker.since)
        return RankObservation(rank, worker.worker, observation, finished=worker.stage is Stage.FINISHED)

    def _judge(self, now: Instant) -> None:
        workers = [w for w in self._roster.placed() if w.living]
        if any(worker.stage is Stage.JOINING for worker in workers):
            # Ranks that wait for newcomers are not to blame, but a worker whose process is stopped is.
            workers = [w for w in workers if (s := self.observation(w, now)) is not None and s.stopped]
            verdict = hangs.HangVerdict(tuple(x for x in (self._look(w, now) for w in workers) if self._late(x)))
            if len(verdict.hung) == len(self._roster.places):
                return
        else:
            verdict = hangs.judge([self._look(worker, now) for worker in workers], self.bounds)
        if verdict.anew:
            self._at_devices(workers, verdict, now)
            return
        hung = [self._roster.workers[look.worker] for look in verdict.hung]
        step = min((look.seen.step for look in verdict.hung if look.seen is not None), default=verdict.left_at)
        if step is not None and self._left_alone(step, now):
            return
        if not hung:
            self._suspects.clear()
        confirmed = [worker for worker in hung if self._confirmed(worker, now)]
        fenced = self._given_up(confirmed, now) if len(confirmed) == len(hung) else []
        if fenced:
            self._fence(fenced, verdict, now)
        elif len(confirmed) == len(hung):
            self._doubt([self._look(worker, now) for worker in workers], verdict, now)

    def _at_devices(self, workers: list[WorkerRecord], verdict: hangs.HangVerdict, now: Instant) -> None:
        """Form the groups anew, without ending a worker, as all have waited too long for their devices.

        The second time at a step, ranks that have called fewer collectives are replaced, because new groups do not help
        them. If all have called the same, the step may only be slow: after `_ANEW_MOST` times the job waits for it.
        """
        confirmed = [worker for worker in workers if self._confirmed(worker, now)]
        if len(confirmed) < len(workers):
            return
        looks = [self._look(worker, now) for worker in workers]
        lasted = min((look.seen.seconds for look in looks if look.seen is not None), default=0.0)
        anew = self._anew + 1 if self._anew_at == self._job.step else 1
        counts = {look.rank: look.seen.counts for look in looks if look.seen is not None}
        late = set(hangs.behind(counts)) if anew > 1 else set()
        fenced = self._given_up([worker for worker in workers if worker.rank in late], now)
        if not fenced and (anew > _ANEW_MOST or lasted < _LIKE_SLOW * self._slow):
            self._slow = max(self._slow, lasted) if anew > _ANEW_MOST else self._slow
            self._doubt(looks, verdict, now)
            return
        self._anew_at, self._anew = self._job.step, anew
        self._suspects.clear()
        self.fenced(workers)  # More time, in case they are only slow.
        if fenced:
            behind = tuple(look for look in looks if look.rank in late)
            why = "it has called fewer collectives than the others, for the second time"
            self._fence(fenced, hangs.HangVerdict(behind, why=why), now)
            return
        shown = "; ".join(hangs.describe(look) for look in looks[:4]) + (" ..." if len(looks) > 4 else "")
        self._ladder.mend("standstill", [], f"{verdict.why}, and the groups are formed anew: {shown}", now, now)

    def _late(self, look: RankObservation) -> bool:
        return look.seen is not None and look.seen.seconds >= self.bounds.allowed(look.seen)

    def _left_alone(self, step: StepNo, now: Instant) -> bool:
        """End the job if a rank has left its loop before a step that needs it; True if one has.

        Args:
            step: the step in which the others stand still.
        """
        left = [worker for worker in self._roster.placed(Stage.FINISHED) if worker.state_at <= step]
        if not left or self._job.past_last_step:
            return False
        rank = left[0].rank if left[0].rank is not None else Rank(-1)
        self._job.end(SCRIPT_ERROR, say.left_alone(rank, left[0].state_at, step), now)
        return True

    def _confirmed(self, worker: WorkerRecord, now: Instant) -> bool:
        """True if the worker was suspected before and has been observed again since."""
        first = self._suspects.setdefault(worker.worker, now)
        seen = self._observations.get(worker.worker)
        return seen is None or seen[1] > first

    def _given_up(self, workers: list[WorkerRecord], now: Instant) -> list[WorkerRecord]:
        """The workers among these that may be ended; on suspicion alone, none with the last copy of some state."""
        ranks = {worker.rank for worker in workers if worker.rank is not None}
        if not ranks or self._regroup.held_without(ranks) or self._spec.buddy_every > 0:
            return workers
        if self._spec.hang_timeout is not None and self._spec.durable:
            return workers
        patient = [w for w in workers if (s := self.observation(w, now)) is not None and s.seconds < self.bounds.most]
        return [] if patient else workers

    def _fence(self, workers: list[WorkerRecord], verdict: hangs.HangVerdict, now: Instant) -> None:
        looks = {look.worker: look for look in verdict.hung}
        details = [hangs.describe(looks[worker.worker]) for worker in workers]
        observations = [look.seen for look in verdict.hung if look.seen is not None]
        since = now - max((observation.seconds for observation in observations), default=0.0)
        if not all(observation.stopped for observation in observations):
            self.fenced(workers)
        for worker in workers:
            self._orders.fence(worker, "it hangs", now, dump=True)
            self._suspects.pop(worker.worker, None)
        cause = "; ".join(details) + (f": {verdict.why}" if verdict.why else "")
        self._ladder.mend("hang", workers, cause, now, self._job.plan.when(workers[0].worker, since))

    def _doubt(self, looks: list[RankObservation], verdict: hangs.HangVerdict, now: Instant) -> None:
        """Note that all stand still and none is certainly to blame, and wait."""
        still = [look.seen.seconds for look in looks if look.seen is not None]
        if len(still) < len(looks) or min(still, default=0.0) < min(_SAY_S, self.bounds.base):
            return
        self._say(list(verdict.holding_up or looks), verdict.why, now)

    def _say(self, looks: list[RankObservation], why: str, now: Instant) -> None:
        if now - self._said_at < _SAY_S:
            return
        self._said_at = now
        shown = "; ".join(hangs.describe(look) for look in looks[:4]) + (" ..." if len(looks) > 4 else "")
        self._orders.note(f"training makes no progress; regrow waits ({why}): {shown}; stacks are in the logs", now)
        for look in looks[:64]:
            self._orders.add(TakeStacks(look.worker, why))
