"""Faults that are known by name: those on demand, and the script's own errors."""

from collections import deque
from collections.abc import Iterable

from regrow.core.events import FaultInjected
from regrow.core.ids import Instant, Rank, StepNo, WorkerId
from regrow.core.messages import ErrorReport, FaultFired, FaultSpec


class FaultPlan:
    """Faults on demand: told again with every generation until they have struck, and never after.

    Args:
        specs: the plan that the job was started with.
    """

    def __init__(self, specs: Iterable[FaultSpec] = ()) -> None:
        self._pending: dict[str, FaultSpec] = {spec.fault: spec for spec in specs}
        self._struck: set[str] = set()
        self._struck_at: dict[WorkerId, Instant] = {}

    def add(self, spec: FaultSpec) -> bool:
        """Plan one more; False where it has struck already."""
        if spec.fault in self._struck:
            return False
        self._pending[spec.fault] = spec
        return True

    def of(self, rank: Rank) -> list[FaultSpec]:
        """What is still to strike the rank."""
        return [spec for spec in self._pending.values() if spec.rank == rank] if self._pending else []

    def fired(self, event: FaultFired, rank: Rank | None) -> FaultInjected | None:
        """One has struck; None where that is known already."""
        spec = self._pending.pop(event.fault, None)
        if spec is None:
            return None
        self._struck.add(event.fault)
        self._struck_at[event.worker] = event.at
        return FaultInjected(
            at=event.at,
            fault=event.fault,
            worker=event.worker,
            rank=rank,
            step=event.step,
            stage=spec.stage,
            how=spec.how,
        )

    def when(self, worker: WorkerId, otherwise: Instant) -> Instant:
        """When the worker was struck, asked once; `otherwise` where no fault on demand struck it."""
        return self._struck_at.pop(worker, otherwise)


class ScriptErrors:
    """What the script raised: by worker until its exit follows, and where, to know the same error a second time."""

    def __init__(self) -> None:
        self._told: dict[WorkerId, tuple[ErrorReport, StepNo]] = {}
        self._seen: deque[tuple[StepNo, Rank | None, str]] = deque(maxlen=64)

    def tell(self, worker: WorkerId, error: ErrorReport, step: StepNo) -> None:
        """A worker's script has ended with an error; its exit follows."""
        self._told[worker] = (error, step)

    def of(self, worker: WorkerId) -> tuple[ErrorReport, StepNo] | None:
        """The error that ended the worker's script, if any."""
        return self._told.get(worker)

    def forget(self, worker: WorkerId) -> None:
        """The worker is of no interest any more."""
        self._told.pop(worker, None)

    def again(self, step: StepNo, rank: Rank | None, error: ErrorReport) -> bool:
        """Whether this error struck this rank at this step, or the one before, already; remembers it.

        The one before, because an error raised after the gradients were reduced may find the others a step further.
        """
        known = any(step - at in (0, 1) and rank == by and error.fingerprint == what for at, by, what in self._seen)
        self._seen.append((step, rank, error.fingerprint))
        return known
