"""Observations of workers from outside, sent to the coordinator, which alone decides whether a worker hangs."""

import msgspec

from regrow.core.ids import Generation, NodeId, Seconds, StepNo, WorkerId
from regrow.core.phase import Phase

DEVICE = "the device"
"""`WorkerObservation.awaits` of a worker that has enqueued its work and waits for its accelerator."""


class WorkerObservation(msgspec.Struct, frozen=True):
    """Observation of one worker by its agent at one moment.

    `seconds`: since its last sign of progress (a phase, a collective). `calls`: collectives of the step. `waits`: True
    if it waits in a collective of regrow's; None: unknown here (NCCL). `awaits`: that collective. `stopped`: the kernel
    reports that the process is stopped. `busy`: it computes, or waits for a disk: its processes used CPU time lately,
    or its main thread runs or cannot be interrupted. `blocked`: where its main thread is, as text. `counts`: number of
    collectives of this generation in each of its groups, by a name that is the same on all ranks of a group. `used`:
    processor time of its processes so far, in seconds.
    """

    worker: WorkerId
    generation: Generation
    step: StepNo
    calls: int
    phase: Phase
    seconds: Seconds
    waits: bool | None = False
    awaits: str = ""
    stopped: bool = False
    busy: bool = False
    blocked: str = ""
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    used: Seconds = 0.0

    @property
    def progress(self) -> tuple[int, int, int]:
        """A tuple that increases whenever the worker makes progress."""
        return self.generation, self.step, self.calls


class NodeSeen(msgspec.Struct, frozen=True, tag=True):
    """An agent's observations of its workers; sent repeatedly while one of them shows no progress, then once more.

    `longest`: duration of the longest of the last steps, in seconds.
    """

    node: NodeId
    observations: list[WorkerObservation] = msgspec.field(name="sights")
    longest: Seconds = 0.0


class WorkerAlive(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ProveAlive`."""

    worker: WorkerId


class StacksTaken(msgspec.Struct, frozen=True, tag=True):
    """Stacks of all threads of a worker, for its log; the answer to `TakeStacks`."""

    worker: WorkerId
    text: str


class ProveAlive(msgspec.Struct, frozen=True, tag=True):
    """To a worker that has been silent for long: answer at once."""

    worker: WorkerId


class TakeStacks(msgspec.Struct, frozen=True, tag=True):
    """To a worker: send the stacks of all your threads, and continue."""

    worker: WorkerId
    reason: str
