"""One step of a training, as the script sees it."""

import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch

from regrow.core.errors import UsageError
from regrow.core.ids import StepNo
from regrow.train.hooks.external import ExternalDraws
from regrow.train.microbatches import MicroBatches
from regrow.train.script.body_bindings import BodyBindings

T = TypeVar("T")


class LoggedNumbers(Protocol):
    """Receives the numbers that a body logs, and its reads."""

    def logged(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """Called when the body has logged these numbers."""

    def read(self, batch: object, what: str) -> None:
        """Called when the body has read this data itself; `what` describes it."""


class StepOwner(Protocol):
    """Interface of a step to the loop that runs it."""

    bindings: BodyBindings
    draws: ExternalDraws

    @property
    def shadow(self) -> LoggedNumbers:
        """Receiver of the numbers that bodies log, in rehearsals too."""

    @property
    def rank(self) -> int:
        """This worker's rank now."""

    @property
    def began(self) -> StepNo:
        """The step of the job that is step 0 of its training."""

    def enter(self, step: "Step") -> None:
        """Called when the script enters the body."""

    def before_update(self) -> None:
        """Called when protected state is about to change."""

    def leave(self, step: "Step", error: BaseException | None) -> bool:
        """Called when the body has ended; True if its exception is absorbed."""

    def log(self, step: "Step") -> None:
        """Called when numbers were added to those of the step."""

    def receive(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """Called with numbers that the body has computed for this rank alone."""


class Step:
    """One optimizer update, and the context manager around its body.

    The body may run again, but its changes to protected state happen once. Entering gives the step's batch.

    Attributes:
        number: number of the step in its training, from 0.
        at: number of the step in the job: differs from `number` if the script had other trainings before.
        attempt: how often this worker has started the step before.
        rehearsal: True if the body only warms up; its results are discarded.
        committed: True once the step is committed; stays False if it must run again.
    """

    def __init__(
        self,
        owner: StepOwner,
        number: StepNo,
        batch: Any,
        *,
        attempt: int = 0,
        rehearsal: bool = False,
        replay: bool = False,
        proof: bool = False,
    ) -> None:
        self.at, self.number = number, StepNo(number - owner.began)
        self.proof = proof
        """True if the step repeats another rank's step, whose numbers it must reproduce."""
        self.replay = replay
        """True if the others have committed the step: it runs only to reach the code after its body, where they are."""
        self.attempt = attempt
        self.rank = owner.rank
        """This worker's rank in the step; a world of another size may give it another rank."""
        self.rehearsal = rehearsal
        self.committed = False
        self.entered = self.left = False
        self.inside = False
        self.staged: dict[str, torch.Tensor | float] = {}
        self.gives: Callable[[Any], Any] | None = None
        """Converts the batch to the one that the script gets; has no side effects, and calls no collectives."""
        self._owner = owner
        self._batch = batch

    def become(self, following: "Step") -> None:
        """Become the step that follows, since the script holds this object."""
        self.__dict__.update(following.__dict__ | {"gives": self.gives})

    def __enter__(self) -> Any:
        if self.entered:
            raise UsageError(
                f"step {self.number} was entered twice", hint="write `with step as batch:` once in the loop"
            )
        if self.gives is not None:
            self._batch = self.gives(self._batch)
        self.entered = self.inside = True
        self._owner.bindings.enters(sys._getframe(1))
        self._owner.draws.begins(self.at, rehearsal=self.rehearsal)
        self._owner.enter(self)
        if isinstance(self._batch, MicroBatches):
            self._batch.enter(self)
        return self._batch

    def __iter__(self) -> NoReturn:
        raise UsageError("a step cannot be unpacked, only its batch can", hint="write `with step as (x, y):`")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(self._batch, MicroBatches):
            self._batch.leave()
        self._batch, self.inside = None, False
        absorbed = self._owner.leave(self, error)
        self.left = True
        if absorbed or error is None:
            self._owner.bindings.leaves(sys._getframe(1), whole=error is None)
        return absorbed

    @property
    def rehearsed(self) -> bool:
        """True if the body runs only to warm up and its results are not used."""
        return self.rehearsal and not self.proof

    @property
    def microbatches(self) -> MicroBatches:
        """This rank's micro-batches, to be iterated once in the body; `with step as microbatches:` gives them too.

        Raises:
            UsageError: `session.steps` was not given `microbatches=`, or the body has ended.
        """
        if not isinstance(self._batch, MicroBatches):
            raise UsageError(
                f"step {self.number} has no micro-batches" + ("" if self.inside else " outside its body"),
                hint="give session.steps(..., microbatches=...), and ask for them inside `with step`",
            )
        return self._batch

    def external(self, draw: Callable[[], T], *, like: T) -> T:
        """Result of `draw()`, which cannot be undone or repeated: a call of a simulator, a browser, a paid service.

            reward = step.external(lambda: simulator.step(action), like=0.0)

        It is drawn once for each rank, step and call. A body that runs again after a fault gets the same result, also
        in a rank that was replaced on its node. If no copy is left it is drawn again; the job reports that, and exits
        with 76. A rehearsed body draws nothing and gets `like`. The result, and `like`, are copied for each call.

        `draw` must not call collectives or change protected state. Its global random numbers go on as in a plain
        call. If it takes longer than a body may take before it counts as hanging, the rank counts as hanging.

        Args:
            draw: makes the result: None, numbers, strings, bytes, tensors (without gradients), numpy arrays, in lists,
                tuples, sets and dicts. 64 MiB are kept for a rank and step, at most 32 MiB for its replacement.
            like: a value of the same form.

        Raises:
            UsageError: outside the step's body, or the result contains another type; the error names the place in it.
        """
        if not self.inside:
            raise UsageError("step.external is called outside its body", hint="call it inside `with step`")
        return cast(T, self._owner.draws.draw(self.at, draw, like, rehearsal=self.rehearsal))

    def update(self) -> None:
        """Declare that protected state is changed from here to the end of the body.

        Optimizers that were protected declare this themselves; call it before changing parameters by hand.
        Raises `GenerationHalted` (absorbed by the `with`) when the step must run again.
        """
        self._owner.before_update()

    def log(self, **metrics: torch.Tensor | float) -> None:
        """Log numbers of this step: only committed steps reach the log, each once.

        Numbers logged inside the body before `backward` survive even the death of this worker after its gradients were
        reduced; numbers logged later are lost in that one case. Does nothing in a rehearsal, or if the step must run
        again.

        Args:
            metrics: floats, or tensors with one element.
        """
        if self.inside:
            self._owner.shadow.logged(metrics)
        if self.rehearsal or not (self.inside or self.committed):
            return
        self.staged.update({name: _detached(name, value) for name, value in metrics.items()})
        self._owner.log(self)

    def receive(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """Receive numbers of a part of this rank's work, which may be checked but are not logged for the step."""
        if not self.rehearsal:
            self._owner.receive(numbers)

    def read(self, what: str, batch: Any) -> None:
        """Note that a part of this rank's data has been read, apart from the step's batch."""
        self._owner.shadow.read(batch, what)

    def numbers(self) -> dict[str, float]:
        """Numbers logged until now, as floats."""
        return {name: float(value) for name, value in self.staged.items()}


def _detached(name: str, value: torch.Tensor | float) -> torch.Tensor | float:
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.numel() != 1:
        raise UsageError(f"log({name}=...) was given a tensor of shape {tuple(value.shape)}", hint="log one number")
    return value.detach()
