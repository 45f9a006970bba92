"""Sights of workers from outside, sent to the coordinator, which alone judges which of them hang."""

import msgspec

from regrow.core.ids import Generation, NodeId, Seconds, StepNo, WorkerId
from regrow.core.phase import Phase

DEVICE = "the device"
"""Name for the wait of a worker whose work is enqueued, and which waits until its accelerator has come to its end."""


class WorkerObservation(msgspec.Struct, frozen=True):
    """One look at a worker.

    `seconds`: since it showed a sign of progress last (a phase, a collective). `calls`: collectives of the step.
    `waits`: whether it waits in a collective of ours; None: that cannot be told here (NCCL). `awaits`: which one.
    `stopped`: the kernel says that the process is stopped. `busy`: it computes, or waits for a disk: its processes used
    CPU time lately, or its main thread runs or cannot be interrupted. `blocked`: what its main thread is in, in words.
    `counts`: of each of its groups, by a name that is the same on all its ranks, the collectives of this generation.
    `used`: seconds of a processor that its processes have used so far.
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
        """Grows as the worker goes on."""
        return self.generation, self.step, self.calls


class NodeSeen(msgspec.Struct, frozen=True, tag=True):
    """Sight that an agent has of its workers; sent repeatedly while one of them stands still, and once after that.

    `longest`: the longest of the last steps, in seconds.
    """

    node: NodeId
    observations: list[WorkerObservation] = msgspec.field(name="sights")
    longest: Seconds = 0.0


class WorkerAlive(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ProveAlive`."""

    worker: WorkerId


class StacksTaken(msgspec.Struct, frozen=True, tag=True):
    """Stacks of all threads of a worker; the answer to `TakeStacks`, for its log."""

    worker: WorkerId
    text: str


class ProveAlive(msgspec.Struct, frozen=True, tag=True):
    """To a worker that has not been heard of for long: answer at once."""

    worker: WorkerId


class TakeStacks(msgspec.Struct, frozen=True, tag=True):
    """To a worker: write down where all your threads are, and go on."""

    worker: WorkerId
    reason: str
