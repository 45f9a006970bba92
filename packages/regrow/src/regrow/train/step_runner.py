"""Interface of the loop of steps for code that runs between its steps and after it."""

from contextlib import AbstractContextManager
from typing import Protocol

from regrow.core.messages.facts import WorkerCommitted
from regrow.train.gradients.ddp_buckets import Settling
from regrow.train.gradients.wrappers import Modules
from regrow.train.loop_context import LoopContext


class StepRunner(Protocol):
    """Runs the steps: `regrow.train.loop.StepLoop`."""

    seed: int
    context: LoopContext
    modules: Modules
    settling: Settling
    left: bool
    """True once this worker has no part in the job any more."""

    @property
    def runs_again(self) -> bool:
        """True if the step whose body has just ended was not committed."""

    @property
    def behind_a_body(self) -> bool:
        """True if the script is past a step's body, rehearsed or real."""

    @property
    def between_steps(self) -> bool:
        """True if the loop of steps has begun and the script is in none of them."""

    def start(self, what: str) -> None:
        """Begin the one loop of a job. Raises `UsageError` if there was one before, or nothing is protected."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """Context in which collectives are answered locally; its end restores the state."""

    def arrive(self) -> None:
        """Report this worker as built and warm, so that it can join at the first step, or where the others are."""

    def recover(self) -> None:
        """Wait for the next membership and join it."""

    def recover_if_halted(self) -> bool:
        """Join the next generation if the present one is over; True if it was."""

    def failed(self, error: Exception) -> bool:
        """Handle the error of an attempt: True to go on in a new membership, False if the error is the script's."""

    def agrees(self) -> bool:
        """True if this rank's replicas have the same state, or were not compared."""

    def announce(self, fact: WorkerCommitted) -> None:
        """Report a committed step of a training that has a loop of its own."""

    def stops(self) -> None:
        """Send all reports on steps that are still due, as no step follows."""

    def loops_left(self) -> None:
        """Called when all ranks have left their loops: no step runs again."""
