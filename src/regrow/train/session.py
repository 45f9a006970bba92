"""A training script's whole view of regrow: `init`, `protect`, `steps`."""

import atexit
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from regrow.agent.link import WorkerLink
from regrow.comm.ddp import buckets, replicas, reset_unfinished, settle_buckets, share_buffers, take_over_buffers
from regrow.core.config import WorkerEnv
from regrow.core.errors import GenerationHalted, UsageError
from regrow.core.ids import Generation, Instant, Seconds, StepNo
from regrow.data.loader import StepLoader
from regrow.data.seeding import seed_everything
from regrow.train.member import Alone, Member
from regrow.train.protect import ProtectedState
from regrow.train.step import Step

_log = logging.getLogger("regrow")


class _Unsent(NamedTuple):
    """A commit that the agent has not been told: a log after the body may still add to it."""

    step: Step
    at: Instant
    seconds: Seconds
    generation: Generation
    adopted: bool


class Session:
    """One worker's part in the training. Made by `regrow.init()`.

    Args:
        member: how this process takes part in a job; `Alone` outside one.
        seed: what the order of data and all random numbers of the steps derive from.
    """

    def __init__(self, member: Member | Alone, *, seed: int) -> None:
        self.seed = seed
        self._member = member
        self._state: ProtectedState | None = None
        self._replicas: list[DistributedDataParallel] = []
        self._buffered: list[DistributedDataParallel] = []
        self._loader: StepLoader | None = None
        self._unsettled: list[DistributedDataParallel] = []
        self._started = False
        self._attempts: dict[StepNo, int] = {}
        self._begun_at = 0.0
        self._unsent: _Unsent | None = None

    # --- what a script may ask ---------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank now. A standby takes its final rank only when it is needed: ask, do not remember."""
        return self._member.rank

    @property
    def local_rank(self) -> int:
        """This worker's rank on its node."""
        return self._member.local_rank

    @property
    def world_size(self) -> int:
        """Ranks in the world."""
        return self._member.world

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def generation(self) -> int:
        """The membership that this worker runs in."""
        return self._member.generation

    def protect(self, *objects: Any, **named: Any) -> None:
        """Name what must survive a fault: modules, optimizers, and whatever has `state_dict` and `load_state_dict`.

        Args:
            objects: for example the model (wrapped by DDP or not), its optimizer, its scheduler.
            named: the same, under names of their own in the checkpoint.

        Raises:
            StateError: an object has nothing that could be protected.
            UsageError: called twice, or after the first step.
        """
        if self._state is not None or self._started:
            raise UsageError("protect() was called a second time, or after steps()", hint="name everything in one call")
        self._state = ProtectedState(objects, named)
        self._replicas = replicas([*objects, *named.values()])
        if self._member.rehearses:
            self._buffered = take_over_buffers(self._replicas)
        for optimizer in self._state.optimizers():
            optimizer.register_step_pre_hook(lambda *_: self._before_update())

    def digest(self) -> str:
        """A digest of all protected state, equal on two workers if and only if their state is bitwise equal."""
        return self._protected().digest()

    # --- the loop ----------------------------------------------------------------------------------------------

    def steps(self, loader: Any, *, until: int) -> Iterator[Step]:
        """The steps that are still to be run, up to number `until - 1`.

        Args:
            loader: a `DataLoader` over a map-style data set, a callable `fn(step)`, or an iterable of batches that is a
                function of the step.
            until: how many steps the training has in all.

        Raises:
            UsageError: nothing is protected, or `until` is negative, or the loop's body is not inside `with step`.
        """
        if self._started:
            raise UsageError("steps() was called a second time", hint="a job has one loop; let `until` cover it all")
        if until < 0:
            raise UsageError(f"until={until} is negative")
        self._protected()
        self._started = True
        self._loader = StepLoader(loader, seed=self.seed)
        return self._run(until)

    def _run(self, until: int) -> Iterator[Step]:
        loader, state, member = self._data(), self._protected(), self._member
        if member.rehearses and until > 0:
            yield from self._rehearse()
        member.arrive(state, buckets(self._replicas))
        try:
            self._recover()
            while member.step < until:
                step = self._prepare()
                if step is not None:
                    yield step
                    if not step.entered:
                        raise UsageError(
                            "the body of the loop did not enter its step", hint="write `with step as batch:`"
                        )
            self._send_commit()
            self._finish()
        except GeneratorExit:
            # The script left the loop early. It may be unwinding an error, so the others are waited for at its exit.
            atexit.register(self._finish)
            raise
        finally:
            loader.close()

    def _prepare(self) -> Step | None:
        """Everything that must be right when a body starts; None when the generation is over."""
        self._send_commit()
        member, state = self._member, self._protected()
        if self._recover_if_halted():
            return None
        number = member.step
        if self._unsettled:
            with member.local():
                self._unsettled = settle_buckets(self._unsettled)
        member.checkpoint(state)
        try:
            batch = member.fetch(number, lambda: self._data().batch(number, self.rank, self.world_size))
        except Exception as error:
            if not self._failed(error):
                raise
            return None
        state.begin()
        if not member.begin(number):
            return None
        seed_everything(self.seed, number, self.rank)
        attempt = self._attempts.get(number, 0)
        self._attempts = {number: attempt + 1}
        self._begun_at = time.monotonic()
        return Step(self, number, batch, attempt=attempt)

    def _rehearse(self) -> Iterator[Step]:
        """Run the body once against echo groups, and undo it: what a first step costs is paid before it counts."""
        member, state = self._member, self._protected()
        kept = state.capture() if member.holds_initial_state else None
        state.begin()
        with member.echo():
            batch = self._data().batch(0, self.rank, self.world_size)
            seed_everything(self.seed, 0, self.rank)
            step = Step(self, StepNo(0), batch, rehearsal=True)
            yield step
            updated = member.rehearsed()
            if not step.entered:
                raise UsageError("the body of the loop did not enter its step", hint="write `with step as batch:`")
            if not updated and state.parameters_changed():
                raise UsageError(
                    "the step's body changes protected parameters, but no protected optimizer did",
                    hint="protect the optimizer too, or call step.update() before the change",
                )
            settle_buckets(self._replicas)
        if kept is not None:
            state.restore(kept)
        self._data().seek(0, self.rank, self.world_size)

    # --- the end of a body -------------------------------------------------------------------------------------

    def _before_update(self) -> None:
        self._member.before_update(lambda: share_buffers(self._buffered))

    def _leave(self, step: Step, error: BaseException | None) -> bool:
        """The body has ended; whether its exception is absorbed."""
        if step.rehearsal:
            return False
        if error is None:
            try:
                if self._member.commit():
                    self._committed(step)
                    self._recover_if_halted()
                    return False
                error = GenerationHalted(f"step {step.number} was given up")
            except RuntimeError as fault:  # a fault on demand, struck between update and commit
                error = fault
        if not isinstance(error, Exception):
            self._member.abandon()
            return False
        return self._failed(error, step)

    def _committed(self, step: Step, *, adopted: bool = False) -> None:
        now = time.monotonic()
        step.committed = True
        self._unsent = _Unsent(step, now, now - self._begun_at, Generation(self.generation), adopted)

    def _failed(self, error: Exception, step: Step | None = None) -> bool:
        """An attempt ended with an error: report it if it is news, put back what it changed, go on when told to.

        False: outside a job, where there is nobody to tell; the error is the script's.
        """
        if not self._member.abort(error, self._protected()):
            return False
        reset = reset_unfinished(self._replicas)
        self._unsettled += [module for module in reset if module not in self._unsettled]
        self._recover(step)
        return True

    def _recover_if_halted(self) -> bool:
        if not self._member.halted:
            return False
        self._recover()
        return True

    def _recover(self, step: Step | None = None) -> None:
        adopted = self._member.rejoin()
        if step is not None and adopted == step.number:
            # The others had all of this worker's gradients: the step has happened, though not here.
            self._committed(step, adopted=True)
        self._data().seek(self._member.step, self.rank, self.world_size)

    # --- the log -----------------------------------------------------------------------------------------------

    def _log(self, step: Step) -> None:
        if not step.committed and not any(
            isinstance(value, torch.Tensor) and value.is_cuda for value in step.staged.values()
        ):
            # Reading a CUDA tensor would stall the device in mid-step: those wait for the commit.
            self._member.stage(step.number, step.numbers())

    def _send_commit(self) -> None:
        if self._unsent is None:
            return
        unsent, self._unsent = self._unsent, None
        numbers = unsent.step.numbers()
        self._member.announce(
            unsent.step.number, unsent.generation, unsent.at, unsent.seconds, numbers, adopted=unsent.adopted
        )
        _log.info("step %d: %s", unsent.step.number, numbers)

    # --- small things ------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._send_commit()
        while not self._member.finish():
            self._recover()

    def _protected(self) -> ProtectedState:
        if self._state is None:
            raise UsageError("nothing is protected", hint="call session.protect(model, optimizer, ...) before steps()")
        return self._state

    def _data(self) -> StepLoader:
        if self._loader is None:
            raise UsageError("no loader yet", hint="call session.steps(loader, until=...)")
        return self._loader


def init(*, seed: int = 0) -> Session:
    """Take part in the job that this process belongs to, or train alone where there is none.

    Makes the default process group (backend `regrow`), so that DDP and `torch.distributed` work, and seeds all random
    generators so that every rank builds the same model.

    Args:
        seed: what the order of data and all random numbers derive from.

    Raises:
        UsageError: `torch.distributed` was initialized already, or init() was called twice.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UsageError(
            "torch.distributed is initialized already", hint="call regrow.init() instead of init_process_group()"
        )
    env = WorkerEnv.read()
    link = WorkerLink.current() if env is not None else None
    member = Member.open(link) if link is not None else Alone.open()
    seed_everything(seed)
    return Session(member, seed=seed)
