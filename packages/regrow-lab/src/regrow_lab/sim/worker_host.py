"""The world as a simulated worker sees it."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from regrow.core.ids import Generation, Instant, Seconds, StepNo
from regrow.core.messages import facts
from regrow.core.messages.checkpoints import SnapshotForDisk
from regrow.core.messages.copies import CopySource, SnapshotTaken
from regrow.core.messages.data import OrderDeclared, ProducerServed, ProducerWanted
from regrow.core.messages.observations import StacksTaken
from regrow.core.messages.unions import WorkerFact
from regrow.core.messages.vocabulary import Member
from regrow_lab.sim.collectives import Group
from regrow_lab.sim.script import Doing, SimScript

W = TypeVar("W", contravariant=True)
"""Type of the worker."""
FOR_THE_AGENT = (
    StacksTaken | facts.WorkerStaged | SnapshotTaken | SnapshotForDisk | OrderDeclared | ProducerWanted | ProducerServed
)
"""Facts that a worker sends only to its agent."""


class Disk(Protocol):
    """Disk that all nodes can read."""

    durable: StepNo
    """The step of the newest durable checkpoint."""


class WorkerHost(Protocol[W]):
    """The world as a worker sees it."""

    script: SimScript

    @property
    def disk(self) -> Disk:
        """The disk with the durable checkpoints."""
        ...

    def now(self) -> Instant:
        """The time."""
        ...

    def after(self, delay: Seconds, action: Callable[[], None]) -> None:
        """Schedule an action after a delay."""
        ...

    def jitter(self, around: Seconds) -> Seconds:
        """A random time of about this length."""
        ...

    def say(self, worker: W, fact: WorkerFact) -> None:
        """Carry a fact to the coordinator."""
        ...

    def progressed(self, worker: W, commit: facts.WorkerCommitted) -> None:
        """Record a commit, which the agent reports later."""
        ...

    def exited(self, worker: W, code: int) -> None:
        """Report the end of a worker's process."""
        ...

    def fails(self, worker: W) -> bool:
        """True if the script of a newcomer raises before its loop."""
        ...

    def readable(self, source: CopySource) -> bool:
        """True if an agent has this copy, so that it can be read."""
        ...

    def group(self, generation: Generation, members: list[Member]) -> Group:
        """The groups of a generation, the same for all its members."""
        ...

    def entered(self, worker: W, doing: Doing) -> None:
        """Handle a change of activity, at which faults can strike."""
        ...

    def hung(self, worker: W) -> None:
        """Record that a worker makes no progress any more."""
        ...
