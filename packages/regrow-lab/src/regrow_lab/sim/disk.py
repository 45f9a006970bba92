"""Durable checkpoints of a simulated job: snapshots that its agents hold, and the shared disk."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from regrow.core.ids import Instant, NodeId, Rank, Seconds, StepNo, WorkerId
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
from regrow.core.messages.unions import AgentFact
from regrow_lab.sim.script import Doing
from regrow_lab.sim.workers import SimWorker

_WRITE_S: Seconds = 0.5
"""Approximate time of writing a part, or the manifest of all parts."""
_STAND_IN = 4
"""Steps between checkpoints of a durable job whose checkpoints regrow does not write."""

DiskOrder = WriteCheckpoint | FinishCheckpoint | AbandonCheckpoint
DiskKey = tuple[type[DiskOrder], NodeId, int]


@dataclass(frozen=True)
class DiskHost:
    """View of the world that the disk needs.

    Attributes:
        now: the time.
        after: schedules an action, which is dropped if the node has another agent by then.
        jitter: a random time of about this length.
        say: sends a node's fact to the coordinator.
        reachable: true if a worker's agent runs.
        ranks: number of ranks in the newest generation.
        require: raises unless a law holds.
    """

    now: Callable[[], Instant]
    after: Callable[[NodeId, Seconds, Callable[[], None]], None]
    jitter: Callable[[Seconds], Seconds]
    say: Callable[[NodeId, AgentFact], None]
    reachable: Callable[[SimWorker], bool]
    ranks: Callable[[], int]
    require: Callable[[bool, str], None]


class SimDisk:
    """Finished and unfinished checkpoints.

    Args:
        spec: the job's settings, which say if and by whom checkpoints are written.
        parts: number of parts of the state, at least 1, and at most one for each rank.
        host: the world.
    """

    def __init__(self, spec: JobSpec, parts: int, host: DiskHost) -> None:
        self.durable = StepNo(0)
        """The step of the newest complete checkpoint."""
        self._spec, self._parts, self._host = spec, parts, host
        self._divided: defaultdict[tuple[int, StepNo], int] = defaultdict(int)
        """Number of parts of each attempt: a job that starts or restarts with fewer ranks has fewer."""
        self._stuck_until: Instant = float("-inf")
        self._wanted: dict[WorkerId, StepNo] = {}
        self._obeyed: set[DiskKey] = set()
        """Orders received so far; a repeated order is ignored."""
        self._held: defaultdict[NodeId, dict[Rank, tuple[StepNo, str]]] = defaultdict(dict)
        self._written: defaultdict[tuple[int, StepNo], dict[Rank, tuple[StepNo, str]]] = defaultdict(dict)

    def sticks(self, lasts: Seconds) -> None:
        """Delay the end of all writes by this time."""
        self._stuck_until = self._host.now() + lasts

    def committed(self, step: StepNo, *, by_all: bool) -> None:
        """Handle a committed step; the script itself saves some steps if regrow does not."""
        if self._spec.durable and not self._spec.checkpoint_every and by_all and (step + 1) % _STAND_IN == 0:
            self.durable = max(self.durable, StepNo(step + 1))

    def want(self, worker: SimWorker, step: StepNo) -> None:
        """Have a worker take a snapshot of this step or a later one."""
        self._wanted[worker.worker] = step
        if worker.doing in (Doing.HALTED, Doing.FINISHED):
            self._take(worker)

    def entered(self, worker: SimWorker, doing: Doing) -> None:
        """Handle a change of activity: between two steps, and while a worker waits, its state is constant."""
        if doing in (Doing.COMPUTING, Doing.HALTED, Doing.FINISHED):
            self._take(worker)

    def _take(self, worker: SimWorker) -> None:
        asked = self._wanted.get(worker.worker)
        acts = self._host.reachable(worker) and not worker.hung and not worker.stalled
        if asked is not None and asked <= worker.state and acts:
            del self._wanted[worker.worker]
            self._held[worker.spawn.node][worker.rank] = worker.state, worker.holding
            self._host.say(worker.spawn.node, SnapshotHeld(worker.worker, asked, worker.state))

    def forget(self, node: NodeId) -> None:
        """Drop the snapshots of a node's agent that is gone."""
        self._held.pop(node, None)

    def obey(self, order: DiskOrder) -> None:
        """Have an agent write, as soon as the disk permits."""
        key = type(order), order.node, order.attempt
        if key in self._obeyed:
            return
        self._obeyed.add(key)
        match order:
            case WriteCheckpoint():
                held = self._held[order.node]
                parts = {rank: held.pop(rank) for rank in order.ranks if rank in held}
                if {step for step, _ in parts.values()} != {order.step} or len(parts) < len(order.ranks):
                    reason = f"{order.node} has no snapshots of state@{order.step} any more"
                    self._host.say(order.node, CheckpointFailed(order.node, order.attempt, order.step, reason))
                else:
                    self._later(order, lambda: self._write(order, parts))
            case FinishCheckpoint():
                self._later(order, lambda: self._finish(order))
            case AbandonCheckpoint():
                self._written.pop((order.attempt, order.step), None)

    def _later(self, order: DiskOrder, action: Callable[[], None]) -> None:
        takes = self._host.jitter(_WRITE_S) + max(0.0, self._stuck_until - self._host.now())
        self._host.after(order.node, takes, action)

    def _write(self, order: WriteCheckpoint, parts: dict[Rank, tuple[StepNo, str]]) -> None:
        at = order.attempt, order.step
        self._divided[at] = max(self._divided[at], min(self._parts, self._host.ranks()))
        self._written[at].update(parts)
        self._host.say(order.node, PartsWritten(order.node, order.attempt, order.step, order.ranks, 0, _WRITE_S))

    def _finish(self, order: FinishCheckpoint) -> None:
        parts = self._written.pop((order.attempt, order.step), {})
        if not parts:
            reason = f"the parts of state@{order.step} are gone"
            self._host.say(order.node, CheckpointFailed(order.node, order.attempt, order.step, reason))
            return
        holdings = {holding for _, holding in parts.values()}
        divided = self._divided[order.attempt, order.step]
        self._host.require(len(holdings) == divided, f"a checkpoint has all {divided} parts: {holdings}")
        self._host.require(parts.keys() >= set(order.ranks), f"no rank of {order.ranks} is left out: {sorted(parts)}")
        self.durable = max(self.durable, order.step)
        self._host.say(order.node, CheckpointWritten(order.node, order.attempt, order.step, "checkpoints", 0))
