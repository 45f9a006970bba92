"""Position of a worker's state, and the transitions that may follow.

The training thread and the control thread both use it, under one lock. The rule on which all else depends: once a
worker has reported the step of its state, the state stays there until a new generation is formed.

    Empty ─resume→ Idle(n) ─begin→ Computing(n) ─update→ Updating(n) ─commit→ Idle(n+1)
                     ↑                 │ fail/halt   ↑         │ fail
                     └──── resume ─ Stopped(n) ←─────┼─────────┘ Stopped(-1): a torn update
                                       │ fail     update, roll_forward
                                       └──────── Ready(n) ←ready─ Computing(n)

A replicated world goes from Computing to Updating at once. A sharded one votes in between, in Ready: no other rank
could send this worker the state after the step, so the step must happen on all ranks or on none. Pure.
"""

from dataclasses import dataclass

from regrow.core.ids import NO_STATE, Generation, StepNo


@dataclass(frozen=True)
class Empty:
    """No state of the job yet: a newcomer."""


@dataclass(frozen=True)
class Idle:
    """Between steps, with `state@step`."""

    step: StepNo


@dataclass(frozen=True)
class Computing:
    """In the body; all changes of protected state can still be undone."""

    step: StepNo


@dataclass(frozen=True)
class Ready:
    """The update has all it needs, and the other ranks are being notified. No protected state has changed."""

    step: StepNo


@dataclass(frozen=True)
class Updating:
    """The update has begun; it is never interrupted."""

    step: StepNo


@dataclass(frozen=True)
class Stopped:
    """The attempt was given up. `state_at` is `NO_STATE` if the attempt has changed only a part of the state."""

    step: StepNo
    state_at: StepNo


State = Empty | Idle | Computing | Ready | Updating | Stopped


@dataclass(frozen=True)
class Committed:
    """The step is done; the state is now at `step + 1`."""

    step: StepNo


@dataclass(frozen=True)
class Aborted:
    """The step did not happen; all changes that the body made must be put back."""

    step: StepNo


@dataclass(frozen=True)
class Halted:
    """The generation is over. `state_at`: the step of the state; None while a body runs, whose end decides it."""

    state_at: StepNo | None


@dataclass(frozen=True)
class Adopted:
    """The worker has the state after `step`, which it computed but did not commit itself."""

    step: StepNo


@dataclass(frozen=True)
class Resumed:
    """The worker is in a new generation with `state@step`."""

    step: StepNo


class Transaction:
    """The state of one worker's step."""

    def __init__(self) -> None:
        self.state: State = Empty()
        self._sharded = False
        """True if ranks hold different parts of the state: then they vote at every step."""
        self.halted: Generation | None = None
        """The generation that was given up and not yet replaced."""
        self._stop_before: StepNo | None = None
        self._passed = NO_STATE
        """The newest step of this generation that this worker has begun."""

    @property
    def step(self) -> StepNo:
        """The step that this worker is in, or will run next; `NO_STATE` for a newcomer."""
        return NO_STATE if isinstance(self.state, Empty) else self.state.step

    @property
    def state_at(self) -> StepNo | None:
        """The n of this worker's `state@n`; None while a body runs, whose end decides it."""
        match self.state:
            case Empty():
                return NO_STATE
            case Computing() | Updating():
                return None
            case Stopped(state_at=at):
                return at
            case Idle(step=step) | Ready(step=step):
                return step

    @property
    def is_ready(self) -> bool:
        """True if the update has all it needs, so that a verdict could make this worker carry it out."""
        return isinstance(self.state, Ready)

    def ready(self) -> bool:
        """Note that the update has all it needs; False outside a body. After a halt, a verdict decides the step."""
        if isinstance(self.state, Computing):
            self.state = Ready(self.state.step)
        return isinstance(self.state, Ready)

    def stop_before(self, step: StepNo) -> bool:
        """Plan to give up the generation just before `step`; False if that step has begun already."""
        if self.halted is not None or self._passed >= step:
            return False
        self._stop_before = step
        return True

    def pass_boundary(self, generation: Generation) -> bool:
        """Begin the next step; False if this worker stops at this boundary, as planned."""
        if self.halted is not None or not isinstance(self.state, Idle):
            return True
        if self._stop_before is not None and self.state.step >= self._stop_before:
            self.halt(generation)
            return False
        self._passed = self.state.step
        return True

    def begin(self) -> bool:
        """Start an attempt; False if the generation is over."""
        if self.halted is not None or not isinstance(self.state, Idle):
            return False
        self.state = Computing(self.state.step)
        return True

    def update(self) -> bool:
        """Begin the update; False if protected state must not change.

        In a replicated world a worker that has all its gradients makes its update, even if the generation was given up
        meanwhile: another rank may have done so, and died. In a sharded world it does so once all ranks have voted. If
        the generation is given up before, the worker has reported that it is ready, and waits for the verdict.
        """
        match self.state:
            case Updating():
                return True
            case Ready() if self.halted is not None:
                return False
            case Computing(step=step) | Ready(step=step):
                self.state = Updating(step)
                return True
            case _:
                return False

    def roll_forward(self, verdict: StepNo) -> bool:
        """Begin the update if the next generation starts with `state@verdict`, the state after the update."""
        match self.state:
            case Ready(step=step) if verdict == step + 1:
                self.state = Updating(step)
                return True
            case _:
                return False

    def commit(self) -> Committed | Aborted:
        """Commit a body that ended without an error.

        Call `ready` and `update` before. In a replicated world a body that changes nothing may skip these calls.
        """
        match self.state:
            case Updating(step=step):
                self.state = Idle(StepNo(step + 1))
                return Committed(step)
            case Computing(step=step) if self.halted is None and not self._sharded:
                self.state = Idle(StepNo(step + 1))
                return Committed(step)
            case _:
                return self.fail()

    def end_without_update(self) -> None:
        """End a body without an update or an error: the state stays at its step."""
        if isinstance(self.state, Computing):
            self.state = Idle(self.state.step)

    def fail(self) -> Aborted:
        """End a body that failed, or that ended too late for a commit."""
        step = self.step
        match self.state:
            case Updating():
                self.state = Stopped(step, NO_STATE)
            case Computing() | Ready() | Idle():
                self.state = Stopped(step, step)
            case _:
                pass
        return Aborted(step)

    def halt(self, generation: Generation) -> Halted:
        """Give up the generation: no step may begin any more."""
        if self.halted is None or generation > self.halted:
            self.halted = generation
        self._stop_before = None
        return Halted(self.state_at)

    def replace(self) -> bool:
        """Allow newer, complete state to replace this worker's own; False if that must not be replaced."""
        if self.halted is None or not isinstance(self.state, Stopped | Idle):
            return False
        self.state = Updating(self.state.step)
        return True

    def replaced(self, step: StepNo) -> None:
        """Note that this worker's state is now `state@step`."""
        self.state = Stopped(self.step, step)

    def resume(self, step: StepNo, *, sharded: bool = False) -> Resumed | Adopted:
        """Enter a new generation with `state@step`.

        Args:
            sharded: its ranks have different parts of the state.
        """
        was, self._sharded = self.state, sharded
        self.state, self.halted = Idle(step), None
        self._stop_before, self._passed = None, NO_STATE
        if isinstance(was, Stopped) and was.step == step - 1 and was.step >= 0:
            return Adopted(was.step)
        return Resumed(step)
