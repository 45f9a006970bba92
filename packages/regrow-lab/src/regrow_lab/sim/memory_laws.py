"""Laws of a start of all workers from state in memory, and of a job that was asked to stop."""

from collections.abc import Callable, Collection, Mapping, Sequence

from regrow.core.ids import NO_STATE, Instant, NodeId, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.copies import StateKept
from regrow.core.messages.replacements import ReplacementRefuted
from regrow.core.messages.vocabulary import Role
from regrow.membership.recovery.newcomers import ATTEMPTS
from regrow_lab.sim.workers import SimWorker

_AT_ONCE = 0.001
IN_MEMORY = "which is in memory"


class MemoryLaws:
    """Watches one job. Only facts that the machine received count, and only of nodes that it does not know as lost.

    Args:
        workers: all simulated workers until now.
        durable: the step of the newest checkpoint on disk.
        require: raises unless a law holds.
    """

    def __init__(
        self,
        workers: Mapping[WorkerId, SimWorker],
        durable: Callable[[], StepNo],
        require: Callable[[bool, str], None],
    ) -> None:
        self._workers, self._durable, self._require = workers, durable, require
        self._kept: dict[NodeId, dict[str, StepNo]] = {}
        """By node and part of the state: the step of the copy there."""
        self._times = 0
        """Number of starts of all workers from memory since a generation was formed."""
        self._from_memory = False
        """True if the last restart of all workers is from memory, and has formed no generation yet."""
        self.ends = False
        """True if the machine's present answer ends the job: workers that it starts in the same answer end with it."""
        self.refuted = False
        """True if no newcomer may be used any more."""
        self.doubtful = False
        """True if a newcomer had trained before newcomers were refuted."""
        self._trained = False
        self.stop_by: Instant | None = None
        """Time by which a job that was asked to stop must have ended."""
        self.stop_at = StepNo(0)
        """Step that the job was known to have done at that request: agents report progress once a second."""

    def apply(self, fact: StateKept | ReplacementRefuted | facts.StopRequested, step: StepNo, now: Instant) -> None:
        """Apply a fact that the machine is about to receive; `step`: the step that it knows."""
        match fact:
            case StateKept(error=""):
                worker = self._workers[fact.worker]
                self._kept.setdefault(worker.spawn.node, {})[worker.holding] = fact.step
            case ReplacementRefuted():
                self.refuted, self.doubtful = True, self.doubtful or self._trained
            case facts.StopRequested() if self.stop_by is None or not fact.patience:
                self.stop_at = step if self.stop_by is None else self.stop_at
                self.stop_by = now + fact.patience
            case _:
                pass

    def committed(self, fact: facts.WorkerCommitted) -> None:
        """Record a commit, in the present generation, that the machine is about to receive."""
        worker = self._workers[fact.worker]
        self._trained = self._trained or (worker.spawn.role is not Role.RANK and worker.alive)
        self.doubtful = self.doubtful or (self._trained and self.refuted)

    @property
    def _stopped(self) -> bool:
        """True if the job was asked to stop. A stop during a takeover is handled after the takeover's own decisions."""
        return self.stop_by is not None and not self.ends

    def lost(self, node: NodeId) -> None:
        """Drop the copies of a node that is lost or was ordered to forget them."""
        self._kept.pop(node, None)

    def spawned(self, order: orders.SpawnWorker) -> None:
        """Check the start of a worker.

        A restart from memory that was decided before the stop goes on: only the ranks can bring that state to the disk.
        """
        again = order.role is Role.RANK and self._stopped and not self._from_memory
        self._require(not again, f"{order.worker} is started in a job that was asked to stop")

    def restarted(self, text: str, parts: Collection[str]) -> bool:
        """Check a restart of all workers; True if it is from the state in memory."""
        self._require(not self._stopped, "no restart is decided for a job that was asked to stop")
        self._from_memory = IN_MEMORY in text
        if self._from_memory:
            self._times += 1
            return True
        held = self.covered(parts)
        tried = self._times >= ATTEMPTS
        self._require(
            held <= self._durable() or tried,
            f"nodes have state@{held} in memory, and all start again from state@{self._durable()}: {text}",
        )
        return False

    def formed(self, forms: Sequence[orders.FormGeneration], parts: Collection[str], *, fresh: bool) -> None:
        """Check the copies that an ordered generation reads."""
        restored = [form for form in forms if form.restore is not None]
        if restored and fresh:
            held = self.covered(parts)
            self._require(forms[0].step >= held, f"nodes have state@{held}, and state@{forms[0].step} is read")
        for form in restored:
            self._require(
                form.restore is not None and form.restore.step == form.step,
                "a copy that is read is of the generation's first step",
            )

    def stood(self) -> None:
        """Record that a generation has formed."""
        self._times, self._from_memory = 0, False

    def covered(self, parts: Collection[str]) -> StepNo:
        """The newest step of which the nodes together have all parts."""
        for step in sorted({step for held in self._kept.values() for step in held.values()}, reverse=True):
            if {part for held in self._kept.values() for part, at in held.items() if at == step} >= set(parts):
                return step
        return NO_STATE

    def ended_in_time(self, now: Instant) -> None:
        """Check that a stopped job ends in time; called after the machine's answer."""
        late = self.stop_by is not None and now > self.stop_by + _AT_ONCE
        self._require(not late, "a job that was asked to stop has ended within the time it was given")
