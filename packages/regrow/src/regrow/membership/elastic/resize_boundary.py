"""Switch to a world of another size: all ranks stop before one agreed step and go on in the new world.

No rank is halted in the middle of a step, so the ranks that stay pause only to form the new generation and run its
first step. If the agreed step was too early, or a rank does not stop, all are halted at once: that step runs again,
and nothing is lost. A change without a deadline waits for a while before it halts them, because a script may evaluate
between two steps for much longer than a step takes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from regrow.core.ids import Instant, NodeId, Rank, Seconds, StepNo
from regrow.core.messages import facts
from regrow.membership.deadlines import SWITCH_S
from regrow.membership.job import Job
from regrow.membership.pace import Pace
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.recovery.regroup import Regroup
from regrow.membership.roster import IN_GENERATION, Stage, WorkerRecord
from regrow.membership.states import Mending, Switching, Training

_LEAVE_S: Seconds = 1.0
"""Time that a worker needs to leave."""
_STOP_S: Seconds = 0.5
"""Time that an immediate halt needs before a worker can leave."""
MOST_TRIES = 3
"""Number of steps that may be agreed on, one after the other, before all ranks are halted at once."""


class ResizeWay(StrEnum):
    """Way in which the world changes."""

    RESIZE = "resize"
    MOVE = "move"
    """Candidates take over ranks of other workers."""
    HOLD = "hold"
    """Ranks leave, and no worker can take them yet."""


@dataclass(frozen=True)
class ResizePlan:
    """A change of the world. `kind`: `grow`, `shrink`, `preempt` or `move`; `size`: number of replicas after it.

    `newcomers`: the ranks that candidates will have; `homes`: nodes on which these may run, empty: any.
    """

    kind: str
    size: int
    newcomers: tuple[Rank, ...]
    reason: str
    way: ResizeWay = ResizeWay.RESIZE
    by: Instant | None = None
    """Time by which the change must be done; None: no deadline."""
    homes: tuple[NodeId, ...] = ()

    @property
    def rung(self) -> str:
        """The rung of the ladder under which this change is recorded."""
        return "node" if self.way is not ResizeWay.RESIZE else "grow" if self.kind == "grow" else "shrink"


class ResizeBoundary:
    """Carries out one change of the world.

    Args:
        job: the job of the world.
        ladder: halts and fences workers that do not stop.
        regroup: leads the halted generation to the next one.
        pace: pace of the steps.
    """

    def __init__(self, job: Job, ladder: Ladder, regroup: Regroup, pace: Pace) -> None:
        self.changed_at: Instant = float("-inf")
        """Time of the last change of the world that was optional, that is, neither a drain nor a move."""
        self._job, self._ladder, self._regroup = job, ladder, regroup
        self._roster, self._spec, self._orders = job.roster, job.spec, job.orders
        self._pace = pace
        self._plan: ResizePlan | None = None
        self._begun_at: Instant = 0.0
        """Time at which the change began."""
        self._by: Instant = float("inf")
        """Time by which the change must be done."""

    def begin(self, plan: ResizePlan, now: Instant) -> None:
        """Order all ranks to stop before a step that none has begun."""
        self._plan, self._begun_at = plan, now
        self._by = float("inf") if plan.by is None else plan.by
        self._order(self._pace.ahead(now), 1, now)

    def hurry(self, by: Instant, now: Instant) -> None:
        """Bring a change under way forward, because a node has to be given back by this time."""
        state, self._by = self._job.state, min(self._by, by)
        if isinstance(state, Switching) and state.at is not None:
            deadline = min(state.deadline, now + self._pace.patience(state.margin), self._last_moment)
            self._job.goto(replace(state, deadline=deadline))

    def expects(self, worker: WorkerRecord) -> bool:
        """True if the worker was ordered to stop as planned."""
        return isinstance(self._job.state, Switching) and worker.stage is Stage.MEMBER

    def halted(self, event: facts.WorkerHalted, now: Instant) -> None:
        """Take a worker's report that it has halted as planned; halt all at once if it halted before another step."""
        state, plan = self._job.state, self._plan
        if not isinstance(state, Switching) or plan is None:
            return
        self._open(plan, event.state_at, now)
        if event.state_at != state.at:
            self._at_once("not all could stop before one step", now)

    def missed(self, event: facts.HaltMissed, now: Instant) -> None:
        """Agree on a later step, or halt all at once, because a worker began the step before its order arrived."""
        job, state = self._job, self._job.state
        job.step = max(job.step, event.step)
        if not isinstance(state, Switching) or state.at is None or event.at != state.at:
            return
        if state.tries < MOST_TRIES and not self._roster.count(Stage.HALTED):
            self._order(2 * state.margin, state.tries + 1, now)
        else:
            self._at_once(f"step {event.step} had begun when its halt arrived", now)

    def late(self, now: Instant, overdue: Callable[[Instant], list[WorkerRecord]]) -> None:
        """After the deadline, halt workers that do not stop as planned, and fence those that hang (`overdue`)."""
        state = self._job.state
        if not isinstance(state, Switching) or now < state.deadline:
            return
        silent = list(self._roster.placed(Stage.HALTING))
        if state.at is None and silent:
            if hung := overdue(now):
                self._ladder.fence_late(hung, "no answer in time", now)
            else:
                self._job.goto(replace(state, deadline=now + self._spec.halt_patience / 4))
        elif state.at is not None and self._may_wait(now):
            # Waiting delays no step, because ranks that have stopped would wait for the others in any case.
            longer = max(state.deadline - self._begun_at, 0.0)
            self._job.goto(replace(state, deadline=min(now + longer, self._begun_at + SWITCH_S)))
            self._orders.halt_before(state.at, self._job.generation, self._reason)
        else:
            self._at_once("not all have stopped in time", now)

    def advance(self, now: Instant) -> None:
        """Carry out the change once all ranks have stopped; drop it if the training has ended before that step."""
        roster, job, plan, state = self._roster, self._job, self._plan, self._job.state
        if not isinstance(state, Switching) or plan is None:
            return
        if roster.all_at(Stage.FINISHED):
            job.goto(Training())  # The training ended before the agreed step.
        elif roster.count(Stage.FINISHED) and roster.count(Stage.HALTED):
            self._at_once("the training ends", now)
        if not roster.all_at(Stage.HALTED) or not isinstance(job.state, Switching):
            return
        job.incidents.halted(now)
        self._plan = None
        job.goto(Mending(now + self._spec.halt_patience))
        changed = not state.over and self._possible(plan) and self._carry_out(plan, now)
        if changed and plan.kind not in ("preempt", "move"):
            self.changed_at = now

    # --- parts of it -------------------------------------------------------------------------------------------

    def _order(self, margin: int, tries: int, now: Instant) -> None:
        job = self._job
        at, by = StepNo(job.step + margin), self._last_moment
        job.goto(Switching(at, min(now + self._pace.patience(margin), by), margin, tries))
        self._orders.halt_before(at, job.generation, self._reason)
        if now + self._pace.until(margin) > by:
            self._at_once("there is no time for another step", now)

    def _open(self, plan: ResizePlan, step: StepNo, now: Instant) -> None:
        job, what = self._job, (plan.kind, plan.rung, plan.reason)
        self._orders.write(*job.incidents.change(*what, generation=job.generation, step=step, now=now))

    @property
    def _reason(self) -> str:
        return "" if self._plan is None else self._plan.reason

    @property
    def _last_moment(self) -> Instant:
        """Latest time to halt all ranks at once so that the leavers are gone in time."""
        return self._by - _LEAVE_S - _STOP_S

    def _may_wait(self, now: Instant) -> bool:
        """True if there is still time to wait for the agreed step."""
        return self._by == float("inf") and now < self._begun_at + SWITCH_S

    def _at_once(self, reason: str, now: Instant) -> None:
        job, state = self._job, self._job.state
        if not isinstance(state, Switching) or (state.at is None and not self._roster.count(*IN_GENERATION)):
            return
        over = state.over or self._roster.count(Stage.FINISHED) > 0
        job.goto(replace(state, at=None, deadline=now + self._spec.halt_deadline, over=over))
        plan = self._plan
        if plan is not None:
            self._open(plan, job.step, now)
        self._ladder.halt(reason, now)

    def _possible(self, plan: ResizePlan) -> bool:
        """True if the candidates for the planned ranks are still ready, and there are no others."""
        candidates = self._roster.candidates
        return set(candidates) == set(plan.newcomers) and all(
            each.stage is Stage.READY and self._roster.nodes[each.node].usable for each in candidates.values()
        )

    def _carry_out(self, plan: ResizePlan, now: Instant) -> bool:
        """Carry out the change of the world; False if it is not possible now."""
        job, roster = self._job, self._roster
        newcomers = [worker for _, worker in sorted(roster.candidates.items())]
        match plan.way:
            case ResizeWay.HOLD:
                self._regroup.hold(now)
            case ResizeWay.MOVE if self._regroup.covered(set(plan.newcomers)):
                self._regroup.move(newcomers, now, kind=plan.kind, reason=plan.reason, by=plan.by)
            case ResizeWay.MOVE:
                return False  # After an immediate halt a leaving rank may be a step ahead; others need its state first.
            case ResizeWay.RESIZE:
                going = job.replicas - plan.size + len(newcomers) // self._spec.unit
                drop = self._regroup.choose(going)
                if len(drop) != going:
                    return False
                self._regroup.resize(drop, newcomers, now, kind=plan.kind, reason=plan.reason, by=plan.by)
        return True
