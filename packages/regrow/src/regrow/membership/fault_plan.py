"""Faults on demand, and the script's own errors, which are recognized when they recur."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from regrow.core.ids import Generation, Instant, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.vocabulary import ErrorReport, FaultSpec, FaultStage
from regrow.core.records import FaultInjected

STRIKES_WITHIN: Seconds = 30.0
"""Longest wait for a requested fault to strike while steps are run; after that, a message says that it has not."""


class FaultPlan:
    """Faults on demand. Each of them is sent with every generation until it has struck.

    Args:
        specs: the plan that the job was started with, or the rest of it.
        struck: faults that have struck already.
    """

    def __init__(self, specs: Iterable[FaultSpec] = (), struck: Iterable[str] = ()) -> None:
        self._pending: dict[str, FaultSpec] = {spec.fault: spec for spec in specs}
        self._struck = set(struck)
        self._struck_at: dict[WorkerId, Instant] = {}
        self._asked: dict[str, Instant] = {}
        """Request time of each fault between two steps, until it strikes or is reported as not having struck."""

    @property
    def pending(self) -> list[FaultSpec]:
        """Faults that have still to strike."""
        return list(self._pending.values())

    @property
    def struck(self) -> list[str]:
        """Faults that have struck."""
        return sorted(self._struck)

    def add(self, spec: FaultSpec, now: Instant) -> bool:
        """Plan one more fault; returns False if it has struck already."""
        if spec.fault in self._struck:
            return False
        self._pending[spec.fault] = spec
        if spec.stage is FaultStage.BETWEEN:
            self._asked[spec.fault] = now
        return True

    def unstruck(self, step: StepNo, now: Instant) -> list[str]:
        """Messages, one for each, about faults between steps that have not struck in time. Called after each commit."""
        if not self._asked:
            return []
        reported = []
        for fault, since in list(self._asked.items()):
            spec = self._pending.get(fault)
            if spec is not None and (now - since < STRIKES_WITHIN if spec.step is None else step <= spec.step):
                continue
            del self._asked[fault]
            if spec is not None:
                where = f"within {STRIKES_WITHIN:g} s" if spec.step is None else f"before step {spec.step}"
                reported.append(
                    f"the {spec.how} of rank {spec.rank} that was asked for between two steps has not struck {where}: "
                    "no function marked @regrow.restartable, and no collective, has run there"
                )
        return reported

    def of(self, rank: Rank) -> list[FaultSpec]:
        """Faults that have still to strike the rank."""
        return [spec for spec in self._pending.values() if spec.rank == rank] if self._pending else []

    def fired(self, event: facts.FaultFired, rank: Rank | None) -> FaultInjected | None:
        """Record of a fault that has just struck; None if it was recorded before."""
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
        """Time at which a fault on demand struck the worker, returned only once; `otherwise` if none did."""
        return self._struck_at.pop(worker, otherwise)


class _Seen(NamedTuple):
    step: StepNo
    generation: Generation
    kind: str
    """Type and place of the error, to recognize one whose message changes each time."""
    error: str


class DeviceFailure(NamedTuple):
    """Permanent failure of a device that a rank was using.

    Attributes:
        device: the node, and the device's index on it.
    """

    step: StepNo
    generation: Generation
    rank: Rank
    device: tuple[NodeId, int]


_LIKE = 3
"""After this many equal errors at one step, or symptoms without a cause, the script is to blame."""


class ScriptErrors:
    """Errors that the script raised: by worker until it exits, and by place, to recognize an error that recurs."""

    def __init__(self) -> None:
        self._reported: dict[WorkerId, tuple[ErrorReport, StepNo]] = {}
        self._exits: deque[tuple[StepNo, str]] = deque(maxlen=64)
        self._bodies: deque[_Seen] = deque(maxlen=64)
        self._symptoms: set[tuple[StepNo, Generation, str]] = set()
        self._devices: deque[DeviceFailure] = deque(maxlen=64)

    def apply(self, worker: WorkerId, error: ErrorReport, step: StepNo) -> None:
        """Remember the error that ended a worker's script until the worker's exit is reported."""
        self._reported[worker] = (error, step)

    def of(self, worker: WorkerId) -> tuple[ErrorReport, StepNo] | None:
        """The error that ended the worker's script, if any."""
        return self._reported.get(worker)

    def forget(self, worker: WorkerId) -> None:
        """Forget the worker's error."""
        self._reported.pop(worker, None)

    def ended_again(self, step: StepNo, error: ErrorReport) -> bool:
        """True if this error has already ended a worker at this step or the one before; remembers it."""
        known = any(step - at in (0, 1) and error.fingerprint == what for at, what in self._exits)
        self._exits.append((step, error.fingerprint))
        return known

    def shared(self, step: StepNo, generation: Generation, error: ErrorReport) -> bool:
        """True if another rank has reported this error in this generation, so that it is not another fault."""
        return any(
            each.generation == generation and each.error == error.fingerprint and abs(step - each.step) <= 1
            for each in self._bodies
        )

    def again(self, step: StepNo, generation: Generation, error: ErrorReport) -> bool:
        """True if a body had this error at this step or the one before in an older generation; remembers it.

        The rank does not matter, because chance decides which rank reports first. The step before counts because
        the others are one step further when an error comes after the gradients were reduced or after the update.
        """
        kind = f"{error.type}|{error.where}"
        near = [each for each in self._bodies if each.generation < generation and step - each.step in (0, 1)]
        known = any(each.error == error.fingerprint for each in near)
        alike = {each.generation for each in near if each.kind == kind}
        self._bodies.append(_Seen(step, generation, kind, error.fingerprint))
        return known or len(alike) >= _LIKE - 1

    def unexplained(self, step: StepNo, generation: Generation, error: ErrorReport) -> bool:
        """True if this symptom came at this step in `_LIKE` generations and never had a known cause; remembers it."""
        self._symptoms.add((step, generation, error.fingerprint))
        times = {g for at, g, what in self._symptoms if at == step and what == error.fingerprint}
        return len(times) >= _LIKE

    def breaks_devices(self, failed: DeviceFailure) -> tuple[list[DeviceFailure], bool]:
        """Earlier device failures of this rank at this step or the one before, and whether the script causes them.

        A single device may be broken, but several devices do not break at the same step. The script is to blame if
        another device failed under this rank at this step before, or if this one has failed `_LIKE` times.
        """
        before = [
            each
            for each in self._devices
            if each.rank == failed.rank and each.generation < failed.generation and failed.step - each.step in (0, 1)
        ]
        self._devices.append(failed)
        return before, any(each.device != failed.device for each in before) or len(before) >= _LIKE - 1

    def explained(self) -> None:
        """Forget the symptoms so far, because their cause was found."""
        self._symptoms.clear()
