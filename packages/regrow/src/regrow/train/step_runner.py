"""Interface of the loop of steps to what stands between its steps and behind it."""

from contextlib import AbstractContextManager
from typing import Protocol

from regrow.core.messages.facts import WorkerCommitted
from regrow.train.gradients.ddp_buckets import Settling
from regrow.train.gradients.wrappers import Modules
from regrow.train.loop_context import LoopContext


class StepRunner(Protocol):
    """Runs the steps: `regrow.train.loop.StepLoop`."""

    seed: int
    standing: LoopContext
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
        """The one loop of a job begins. Raises `UsageError` where there was one, or nothing is protected."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """Within this, collectives are answered locally; afterwards the state is as it was."""

    def arrive(self) -> None:
        """Built and warm: stand before the first step, or where the others are."""

    def recover(self) -> None:
        """Wait for the next membership and stand in it."""

    def recover_if_halted(self) -> bool:
        """Join the next generation if the present one is over; True if it was."""

    def failed(self, error: Exception) -> bool:
        """An attempt ended with an error; True: go on in a new membership. False: the error is the script's."""

    def agrees(self) -> bool:
        """True if this rank's replicas have the same state, or were not compared."""

    def report(self, fact: WorkerCommitted) -> None:
        """A step of a training with a loop of its own has happened."""

    def stops(self) -> None:
        """There are no steps any more."""

    def over(self) -> None:
        """All ranks have left their loops."""
