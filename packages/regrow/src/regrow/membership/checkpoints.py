"""Schedule of durable checkpoints: their times, steps and writers. Training waits only for a copy in memory.

    Idle → Snapshotting → Writing → Finishing → Idle

The lowest rank of each holding copies its state into shared memory, all at the same step. The agents write it to disk
from there, and one of them puts the parts together. Only one checkpoint is under way at a time.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from regrow.core import records as record
from regrow.core.ids import NO_STATE, Instant, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages.checkpoints import (
    AbandonCheckpoint,
    CheckpointFailed,
    CheckpointWritten,
    FinishCheckpoint,
    PartsWritten,
    SnapshotHeld,
    WriteCheckpoint,
)
from regrow.core.messages.copies import TakeSnapshot
from regrow.membership.orders import Orders
from regrow.membership.pace import LEAST_AHEAD, Pace
from regrow.membership.roster import Roster, Stage, WorkerRecord

SNAPSHOT_S: Seconds = 600.0
WRITE_S: Seconds = 1800.0
_MOST_AHEAD = 1 << 12
_NO_NEWS_S: Seconds = 0.2
_NUMBER = re.compile(r"\d+")

CheckpointFact = SnapshotHeld | PartsWritten | CheckpointWritten | CheckpointFailed


@dataclass(frozen=True)
class NoCheckpoint:
    """State while no checkpoint is under way."""


@dataclass(frozen=True)
class Snapshotting:
    """State while the workers in `asked` take a snapshot at `step`; `held`: the step at which each has taken it."""

    step: StepNo
    since: Instant
    deadline: Instant
    asked: dict[WorkerId, tuple[Rank, NodeId]]
    held: dict[WorkerId, StepNo] = field(default_factory=dict)


@dataclass(frozen=True)
class Writing:
    """State while the agents write their parts; `left`: nodes that have not reported that they are done."""

    step: StepNo
    since: Instant
    deadline: Instant
    parts: dict[NodeId, list[Rank]]
    left: frozenset[NodeId]


@dataclass(frozen=True)
class Finishing:
    """State while one agent puts the parts together."""

    step: StepNo
    since: Instant
    deadline: Instant
    node: NodeId


State = NoCheckpoint | Snapshotting | Writing | Finishing


class Checkpoints:
    """Durable checkpoints of one job.

    Args:
        spec: interval between checkpoints, and number that is kept.
        roster: the workers that hold the ranks.
        orders: receives the commands.
        pace: pace of the steps.
        refused: steps of checkpoints that could not be read, with the reasons.
    """

    def __init__(
        self, spec: JobSpec, roster: Roster, orders: Orders, pace: Pace, refused: dict[StepNo, str] | None = None
    ) -> None:
        self._spec, self._roster, self._orders, self._pace = spec, roster, orders, pace
        self._refused: dict[StepNo, str] = {} if refused is None else refused
        self._state: State = NoCheckpoint()
        self.attempts = 0
        """Number of the newest checkpoint, which is also the number of checkpoints begun so far."""
        self._next_at: Instant | None = None
        self._ahead = LEAST_AHEAD
        self._written: StepNo | None = None
        self._given_up: StepNo | None = None
        """Newest step whose checkpoint was given up."""
        self._at_end = False
        self._wanted: StepNo | None = None
        """Set when the job is to end: a state of this step or a later one is saved first."""
        self._taken_for_end = False
        """True if a checkpoint was begun after `_wanted` was set."""
        self._said: set[str] = set()

    # --- called by the membership machine ----------------------------------------------------------------------

    def next_deadline(self) -> Instant | None:
        """Time at which the next `TimeAdvanced` is needed; None: at no time."""
        if not isinstance(self._state, NoCheckpoint):
            return self._state.deadline
        return self._next_at

    def stop_schedule(self) -> None:
        """Begin no further checkpoint on schedule, because the job has stopped training."""
        self._next_at = None

    @property
    def idle(self) -> bool:
        """True if nothing is being written. Only then do all workers find the same newest checkpoint on disk."""
        return not isinstance(self._state, Writing | Finishing)

    def training(self, step: StepNo, now: Instant) -> None:
        """Begin a checkpoint if one is due. Called while the job trains and has reached `step`."""
        if not self._spec.checkpoint_every:
            return
        if self._wanted is not None:
            if isinstance(self._state, NoCheckpoint) and not self.saved_before_end:
                self._take(step, now)
        elif self._next_at is None:
            self._next_at = now + self._spec.checkpoint_every
        elif isinstance(self._state, NoCheckpoint) and now >= self._next_at:
            new = step not in (0, self._written)
            self._next_at = now + max(self._spec.checkpoint_every, 0.0 if new else _NO_NEWS_S)
            if new:
                self._take(step, now)

    def interrupted(self) -> None:
        """Drop pending snapshots as the generation is over and their workers may be gone; keep writing held ones."""
        if isinstance(self._state, Snapshotting):
            self._state = NoCheckpoint()
        self._next_at = self._given_up = None
        self._at_end = False

    def forsake_dead(self, now: Instant) -> None:
        """Stop waiting for lost nodes and for dead workers that were asked for a snapshot. Called when the job ends."""
        self._at_end = True
        for node in [each.node for each in self._roster.nodes.values() if each.away]:
            self.node_lost(node, now)
        state, workers = self._state, self._roster.workers
        if isinstance(state, Snapshotting) and any(
            worker not in state.held and not (worker in workers and workers[worker].living) for worker in state.asked
        ):
            self._state = NoCheckpoint()

    @property
    def patience(self) -> Seconds:
        """Longest time that one checkpoint may take."""
        return SNAPSHOT_S + 2 * WRITE_S

    def savable(self) -> StepNo | None:
        """Newest step at which halted workers have the whole state; None: none, or the job writes no checkpoints."""
        if not self._spec.checkpoint_every:
            return None
        workers = list(self._roster.placed())
        holdings = {worker.holding for worker in workers if worker.holding}
        for step in sorted({w.state_at for w in workers if w.stage is Stage.HALTED and w.state_at > 0}, reverse=True):
            if {w.holding for w in workers if w.stage is Stage.HALTED and w.state_at == step} >= holdings:
                return step
        return None

    def save_before_end(self, step: StepNo, patience: Seconds, now: Instant) -> None:
        """Save the state of `step` or of a later one. `patience`: the job ends without it after this time."""
        self._wanted, self._taken_for_end, self._next_at = step, False, None  # no other is begun on schedule
        if self._spec.checkpoint_every and patience and not self.saved_before_end:
            self._orders.note(f"the state goes to disk first, for which there are {patience:g} s", now)

    @property
    def saved_before_end(self) -> bool:
        """True if the wanted step is on disk or was given up, or if there is nothing to save."""
        step = self._wanted
        if not self._spec.checkpoint_every or not step:
            return True
        return any(done is not None and done >= step for done in self._done)

    @property
    def may_be_behind(self) -> bool:
        """True if the newest checkpoint was taken before the stop was requested: ranks may have run further steps."""
        return bool(self._spec.checkpoint_every and self._wanted) and not self._taken_for_end

    def is_news(self, step: StepNo) -> bool:
        """True if this step is later than every step that was written or given up."""
        return all(done is None or step > done for done in self._done)

    @property
    def newest(self) -> StepNo:
        """The newest step on disk that can be read; `NO_STATE`: there is none."""
        return NO_STATE if (written := self._done[0]) is None else written

    @property
    def _done(self) -> tuple[StepNo | None, StepNo | None]:
        """The newest step on disk, None if it cannot be read, and the newest one that was given up."""
        return None if self._written in self._refused else self._written, self._given_up

    def finished(self, step: StepNo, now: Instant, *, halted: bool = False) -> bool:
        """True if the last step is on disk or was given up; else begin its checkpoint. All ranks must be at that step.

        Args:
            halted: ask only ranks that are halted at this step; there may be no others.
        """
        if not self._spec.checkpoint_every or step in (self._written, self._given_up):
            return True
        self._at_end = True
        idle = isinstance(self._state, NoCheckpoint)
        if idle or (isinstance(self._state, Snapshotting) and self._state.step != step):
            self._take(step, now, exactly=True, halted=halted)
        return False

    def time_passed(self, now: Instant) -> None:
        """Give up a checkpoint that takes too long."""
        state = self._state
        if isinstance(state, NoCheckpoint) or now < state.deadline:
            return
        waited = f"within {state.deadline - state.since:.0f} s"
        match state:
            case Snapshotting():
                late = [rank for worker, (rank, _) in state.asked.items() if worker not in state.held]
                self._fail(f"rank {late[0]} made no snapshot {waited}", now)
            case Writing():
                self._fail(f"{min(state.left)} did not write its part {waited}", now)
            case Finishing():
                self._fail(f"{state.node} did not put the parts together {waited}", now)

    def node_lost(self, node: NodeId, now: Instant) -> None:
        """Give up a checkpoint that needs the lost node. Other ranks may still save the state before the job ends."""
        match self._state:
            case Snapshotting(asked=asked) if any(home == node for _, home in asked.values()):
                self._fail(f"{node} was lost", now, again=True)
            case Writing(parts=parts) if node in parts:
                self._fail(f"{node} was lost", now, again=True)
            case Finishing(node=at) if at == node:
                self._fail(f"{node} was lost", now, again=True)
            case _:
                pass

    def apply(self, fact: CheckpointFact, now: Instant) -> None:
        """Apply an agent's report; ignore one about another attempt."""
        if isinstance(fact, SnapshotHeld):
            if isinstance(self._state, Snapshotting) and fact.asked == self._state.step:
                self._snapshot_held(self._state, fact, now)
            return
        if fact.attempt != self.attempts:
            return
        match fact, self._state:
            case PartsWritten(), Writing() as state:
                self._say_removed(fact.removed, now)
                left = state.left - {fact.node}
                self._state = replace(state, left=left)
                if not left:
                    self._writing_to_finishing(state, now)
            case CheckpointWritten(), Finishing() as state:
                self._finishing_to_idle(state, fact, now)
            case CheckpointFailed(), Writing() | Finishing():
                self._fail(fact.reason, now, torn=fact.torn)
            case _:
                pass

    # --- transitions -------------------------------------------------------------------------------------------

    def _take(self, step: StepNo, now: Instant, *, exactly: bool = False, halted: bool = False) -> None:
        """Order snapshots: from one writer at its next boundary, from several at a step that none has reached."""
        self.attempts += 1
        self._taken_for_end = self._wanted is not None
        writers = list(self._writers(step if halted else None))
        if len(writers) > 1 and not exactly:
            step = StepNo(step + max(self._ahead, self._pace.ahead(now)))
        asked = {worker.worker: (rank, worker.node) for rank, worker in writers}
        self._state = Snapshotting(step, now, now + SNAPSHOT_S, asked)
        for worker in asked:
            self._orders.add(TakeSnapshot(worker, step))

    def _writers(self, halted_at: StepNo | None) -> Iterator[tuple[Rank, WorkerRecord]]:
        """The lowest rank of each holding; if `halted_at` is given, only among ranks that are halted at that step."""
        seen: set[str] = set()
        for rank, name in sorted(self._roster.places.items()):
            worker = self._roster.workers[name]
            counts = halted_at is None or (worker.stage is Stage.HALTED and worker.state_at == halted_at)
            if counts and worker.holding not in seen:
                seen.add(worker.holding)
                yield rank, worker

    def _snapshot_held(self, state: Snapshotting, fact: SnapshotHeld, now: Instant) -> None:
        if fact.worker not in state.asked:
            return
        if fact.error:
            self._fail(fact.error, now)
            return
        held = state.held | {fact.worker: fact.step}
        self._state = replace(state, held=held)
        if held.keys() != state.asked.keys():
            return
        steps = set(held.values())
        if len(steps) == 1:
            self._snapshotting_to_writing(state, steps.pop(), now)
        else:  # Some workers had passed the step before the order reached them.
            self._ahead = min(2 * self._ahead, _MOST_AHEAD)
            self._take(max(steps), now)

    def _snapshotting_to_writing(self, state: Snapshotting, step: StepNo, now: Instant) -> None:
        parts: defaultdict[NodeId, list[Rank]] = defaultdict(list)
        for rank, node in state.asked.values():
            parts[node].append(rank)
        self._state = Writing(step, state.since, now + WRITE_S, dict(parts), frozenset(parts))
        for node, ranks in parts.items():
            self._orders.add(WriteCheckpoint(node, self.attempts, step, ranks, self._is_last))

    def _writing_to_finishing(self, state: Writing, now: Instant) -> None:
        node = next(iter(state.parts))
        ranks = sorted(rank for ranks in state.parts.values() for rank in ranks)
        self._state = Finishing(state.step, state.since, now + WRITE_S, node)
        keep, refused = self._spec.checkpoint_keep, sorted(self._refused)
        self._orders.add(FinishCheckpoint(node, self.attempts, state.step, ranks, keep, refused, self._is_last))

    def _finishing_to_idle(self, state: Finishing, fact: CheckpointWritten, now: Instant) -> None:
        self._state, self._written = NoCheckpoint(), state.step
        self._refused.pop(state.step, None)
        self._say_removed(fact.removed, now)
        self._said &= {_NUMBER.sub("#", fact.unkept)}
        self._say_once(fact.unkept, f"{fact.unkept}; checkpoints are written on", now)
        self._orders.write(
            record.CheckpointSaved(
                at=now, step=state.step, folder=fact.folder, nbytes=fact.nbytes, seconds=now - state.since
            )
        )

    def _fail(self, reason: str, now: Instant, *, torn: bool = False, again: bool = False) -> None:
        """Give this checkpoint up and note the reason, once for each cause. Training goes on.

        Args:
            torn: begin another checkpoint at once.
            again: other ranks may still save this step before the job ends.
        """
        state, self._state = self._state, NoCheckpoint()
        if isinstance(state, NoCheckpoint):
            return
        step, attempt = state.step, self.attempts
        self.attempts += 1
        nodes = (
            list(state.parts) if isinstance(state, Writing) else [state.node] if isinstance(state, Finishing) else []
        )
        cleaner = next((node for node in nodes if not self._roster.nodes[node].away), None)
        if cleaner is not None:
            self._orders.add(AbandonCheckpoint(cleaner, attempt, step))
        if torn:
            self._next_at = now
            return
        self._given_up = None if again and self._is_last else step
        then = "the job ends without it" if self._at_end else "training goes on"
        if again and self._is_last:
            then = "another node that has the whole state is asked to write it"
        self._say_once(reason, f"state@{step} could not be written to disk: {reason}; {then}", now)

    @property
    def _is_last(self) -> bool:
        """True if the job ends after this checkpoint."""
        return self._at_end or self._wanted is not None

    def _say_removed(self, folders: Sequence[str], now: Instant) -> None:
        for folder in folders:
            self._orders.note(f"the disk is full: {folder} was removed to make room for the last state", now)

    def _say_once(self, cause: str, text: str, now: Instant) -> None:
        cause = _NUMBER.sub("#", cause)
        if cause and cause not in self._said:
            self._said.add(cause)
            self._orders.note(text, now)
