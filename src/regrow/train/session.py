"""A training script's whole view of regrow: `init`, `protect`, `steps`."""

import atexit
import contextlib
import logging
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from regrow.agent.link import WorkerLink
from regrow.core.config import WorkerEnv
from regrow.core.errors import GenerationHalted, StateError, UsageError
from regrow.core.ids import Generation, Instant, Seconds, StepNo
from regrow.data.loader import StepLoader
from regrow.data.seeding import seed_everything
from regrow.step.policy import Policy
from regrow.train.alone import Alone
from regrow.train.dealers import dealer
from regrow.train.member import Member
from regrow.train.microbatches import Dealer
from regrow.train.modules import Modules
from regrow.train.policy import Scaled
from regrow.train.protect import ProtectedState
from regrow.train.regions import Regions
from regrow.train.sharing import Share, share_of
from regrow.train.step import Step

_log = logging.getLogger("regrow")
_STEPS = "steps()"


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
        invariant: whether the result must not depend on the number of replicas.
    """

    def __init__(self, member: Member | Alone, *, seed: int, invariant: bool = False) -> None:
        self.seed, self.invariant = seed, invariant
        self._member = member
        self._state: ProtectedState | None = None
        self._modules = Modules()
        self._share: Share | None = None
        self._loader: StepLoader | Dealer | None = None
        self._dealer: Dealer | None = None
        self._scaled: Scaled | None = None
        self._started = False
        self._attempts: dict[StepNo, int] = {}
        self._begun_at = 0.0
        self._unsent: _Unsent | None = None
        self._latest: Step | None = None
        self._looping = False
        self._echoing = contextlib.ExitStack()
        self._regions = Regions(self)

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
    def replicas(self) -> int:
        """Replicas in the world: groups of ranks that hold one full copy of the state and read one share of the data.

        Ranks that together make one replica are known from `steps` on; before it, each counts as one.
        """
        return self._place()[1] // (self._dealer.unit if self._dealer is not None else 1)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def generation(self) -> int:
        """The membership that this worker runs in."""
        return self._member.generation

    def protect(self, *objects: Any, part: str = "", **named: Any) -> None:
        """Name what must survive a fault: modules, optimizers, and whatever has `state_dict` and `load_state_dict`.

        Args:
            objects: for example the model (wrapped by DDP, FSDP2, both or not at all), its optimizer, its scheduler.
            part: what part of the model this rank has, where parts are called the same on different ranks: two middle
                stages of a pipeline, say. Ranks with the same names, shapes, pieces and part are taken for replicas.
            named: the same, under names of their own in the checkpoint.

        Raises:
            StateError: an object has nothing that could be protected.
            UsageError: called twice, or after the first step.
        """
        if self._state is not None or self._started:
            raise UsageError("protect() was called a second time, or after steps()", hint="name everything in one call")
        self._state = ProtectedState(objects, named, part=part)
        self._modules = Modules([*objects, *named.values()], recovers=self._member.rehearses)
        for optimizer in self._state.optimizers():
            optimizer.register_step_pre_hook(lambda *_: self._before_update())
            optimizer.register_step_post_hook(lambda *_: self._regions.after_update())

    def policy(self, policy: Policy) -> None:
        """What changes with the number of replicas: the learning rate at each update, and the values of `setting`.

        Raises:
            UsageError: nothing is protected yet, or there is a policy already.
        """
        if self._scaled is not None:
            raise UsageError("policy() was called a second time", hint="put everything into one policy")
        self._scaled = Scaled(policy, self._protected().optimizers(), lambda: self.replicas)

    def setting(self, name: str) -> Any:
        """A named value of the policy for the present number of replicas: ask in every step. Raises `UsageError`."""
        if self._scaled is None:
            raise UsageError(f"there is no policy to have a setting {name!r}", hint="call session.policy(...)")
        return self._scaled.setting(name)

    def digest(self) -> str:
        """A digest of all protected state, equal on two workers if and only if their state is bitwise equal."""
        return self._protected().digest()

    # --- the loop ----------------------------------------------------------------------------------------------

    def steps(
        self,
        loader: Any,
        *,
        until: int,
        data: "DeviceMesh | Share | None" = None,
        microbatches: int | None = None,
    ) -> Iterator[Step]:
        """The steps that are still to be run, up to number `until - 1`.

        Args:
            loader: a `DataLoader` over a map-style data set, a callable `fn(step)`, or an iterable of batches that is a
                function of the step.
            until: how many steps the training has in all.
            data: which share of the global batch this rank reads: the `DeviceMesh` of the data-parallel dimensions, or
                (share, number of shares). Ranks with the same share also draw the same random numbers. Without it
                every rank has a share of its own, as DDP and FSDP want it; tensor and pipeline parallel need it.
            microbatches: of how many micro-batches the global batch of a step consists, whatever the world: they are
                dealt out to the replicas, and the body goes through its own by `step.microbatches`. A batch of the
                loader is then a micro-batch (of each rank that FSDP shards over); a callable is `fn(step, share)`.

        Raises:
            UsageError: nothing is protected, or `until` is negative, or the loop's body is not inside `with step`, or
                there are too few micro-batches for the world, or none in world-invariant mode.
        """
        if until < 0:
            raise UsageError(f"until={until} is negative")
        self._start(_STEPS)
        self._share = share_of(data)
        self._loader = self._dealt(loader, microbatches)
        return self._run(until)

    def _dealt(self, loader: Any, microbatches: int | None) -> StepLoader | Dealer:
        if microbatches is None and not self.invariant:
            return StepLoader(loader, seed=self.seed)
        if microbatches is None:
            raise UsageError("world-invariant mode needs micro-batches", hint="give session.steps(microbatches=...)")
        self._dealer = dealer(
            loader, self._protected(), self._modules, seed=self.seed, count=microbatches, invariant=self.invariant
        )
        return self._dealer

    def _start(self, what: str) -> None:
        """The one loop of a job begins. Raises `UsageError` where there was one, or nothing is protected."""
        if self._started:
            raise UsageError(f"{what} is a second loop", hint="a job has one loop; let `until` cover it all")
        if self.invariant and what != _STEPS:
            raise UsageError(f"{what} has no micro-batches to be summed up", hint="leave invariant mode")
        self._started = self._protected() is not None

    def _arrive(self) -> None:
        """Built and warm: stand before the first step, or where the others are."""
        self._member.arrive(self._protected(), self._modules.buckets(), self._modules.buffered)

    def _run(self, until: int) -> Iterator[Step]:
        loader, member = self._data(), self._member
        if member.rehearses and until > 0:
            yield from self._rehearse()
        member.expect_after_steps(self._regions.declared())
        self._arrive()
        try:
            self._looping = True
            if not (yield from self._replay()):
                self._recover()
            while member.step < until or not self._ends():
                self._latest = self._prepare() if member.step < until else None
                if self._latest is not None:
                    yield self._latest
                    if not self._latest.entered:
                        raise UsageError(
                            "the body of the loop did not enter its step", hint="write `with step as batch:`"
                        )
        except GeneratorExit:
            # The script left the loop early. It may be unwinding an error, so the others are waited for at its exit.
            self._looping = False
            atexit.register(self._finish)
            raise
        finally:
            loader.close()

    def _replay(self) -> Generator[Step, None, bool]:
        """A newcomer, while the others are in a function between two steps: come there too, past a step they have done.

        Its body runs against echo groups; what it computes is overwritten when it ends. False: nothing of that.
        """
        if self._member.holds_initial_state:
            return False
        number, inside = self._member.await_position()
        if not inside or not number:
            return False
        before = StepNo(number - 1)
        self._echoing.enter_context(self._member.echo())
        batch = self._data().batch(before, *self._place())
        seed_everything(self.seed, before, self._place()[0])
        self._latest = Step(self, before, batch, rehearsal=True, replay=True)
        yield self._latest
        if self._latest.rehearsal:
            raise UsageError("the body of the loop did not enter its step", hint="write `with step as batch:`")
        return True

    def _prepare(self) -> Step | None:
        """Everything that must be right when a body starts; None when the generation is over."""
        self._send_commit()
        member, state = self._member, self._protected()
        if self._recover_if_halted():
            return None
        number = member.step
        self._settle()
        if not self._agrees():
            return None
        member.checkpoint(state)
        try:
            batch = member.fetch(number, lambda: self._data().batch(number, *self._place()))
        except Exception as error:
            if not self._failed(error):
                raise
            return None
        state.begin()
        if not member.begin(number):
            return None
        seed_everything(self.seed, number, self._place()[0])
        attempt = self._attempts.get(number, 0)
        self._attempts = {number: attempt + 1}
        self._begun_at = time.monotonic()
        return Step(self, number, batch, attempt=attempt)

    def _settle(self) -> None:
        """Before a forward: lay out buckets anew where a backward was cut off, without the others."""
        if self._modules.unsettled:
            with self._member.local():
                self._modules.settle()

    def _rehearse(self) -> Iterator[Step]:
        """Run the body once against echo groups, and undo it: what a first step costs is paid before it counts."""
        with self._rehearsing():
            batch = self._data().batch(0, *self._place())
            seed_everything(self.seed, 0, self._place()[0])
            step = Step(self, StepNo(0), batch, rehearsal=True)
            yield step
            if not step.entered:
                raise UsageError("the body of the loop did not enter its step", hint="write `with step as batch:`")
            if not self._member.rehearsed() and self._protected().parameters_changed():
                raise UsageError(
                    "the step's body changes protected parameters, but no protected optimizer did",
                    hint="protect the optimizer too, or call step.update() before the change",
                )
        self._data().seek(0, *self._place())

    @contextlib.contextmanager
    def _rehearsing(self) -> Iterator[None]:
        """Within this, collectives are answered locally; afterwards the state is as it was."""
        member, state = self._member, self._protected()
        kept = state.capture() if member.holds_initial_state else None
        state.begin()
        with member.echo():
            try:
                yield
            finally:
                self._modules.settle(all_of_them=True)
        if kept is not None:
            state.restore(kept)
        self._modules.overwritten()

    # --- the end of a body -------------------------------------------------------------------------------------

    def _before_update(self) -> None:
        if self._dealer is not None:
            self._dealer.check_complete()
        self._regions.before_update()
        self._member.before_update(self._modules.share_buffers)

    def _leave(self, step: Step, error: BaseException | None) -> bool:
        """The body has ended; whether its exception is absorbed."""
        if step.replay:
            self._echoing.close()
            if error is None:
                self._recover()
                # Another fault may have struck meanwhile: the others may stand elsewhere by now.
                step.rehearsal, step.committed = False, self._member.step == step.number + 1
                self._regions.expect(self._member.inside)
            return False
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
        self._regions.committed()
        self._unsent = _Unsent(step, now, now - self._begun_at, Generation(self.generation), adopted)

    def _failed(self, error: Exception, step: Step | None = None) -> bool:
        """An attempt ended with an error: report it if it is news, put back what it changed, go on when told to.

        False: outside a job, where there is nobody to tell; the error is the script's.
        """
        if not self._member.abort(error, self._protected()):
            return False
        self._modules.reset(error)
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
        self._modules.overwritten()
        if self._loader is not None:
            self._loader.seek(self._member.step, *self._place())
        self._regions.recovered(self._member.inside)

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

    def _place(self) -> "Share":
        """Which share of the global batch is read here, of how many."""
        return self._share or (self.rank, self.world_size)

    # --- small things ------------------------------------------------------------------------------------------

    @property
    def _runs_again(self) -> bool:
        """Whether the step whose body has just ended did not happen."""
        return self._latest is not None and not self._latest.committed

    @property
    def _between_steps(self) -> bool:
        """Whether steps are being run, and none of them now."""
        return self._looping and not (self._latest is not None and self._latest.inside)

    def _agrees(self, *, last: bool = False) -> bool:
        """Whether this rank's replicas have the same state, or were not asked; False: a new membership stands."""
        self._regions.passed()
        try:
            if self._member.compare(last=last):
                return True
        except Exception as error:
            if not self._failed(error):
                raise
            return False
        self._recover()
        return False

    def _ends(self) -> bool:
        """The last step is done: wait for the others; False: a new membership stands, perhaps at an earlier step."""
        self._looping = False
        self._send_commit()
        ended = not self._recover_if_halted() and self._agrees(last=True)
        if ended and not self._member.finish():
            self._recover()
            ended = False
        self._looping = not ended
        return ended

    def _finish(self) -> None:
        """As `_ends`, for a script that has left the loop: no step can be run any more."""
        self._looping = False
        self._send_commit()
        at = self._member.step
        while not self._member.finish():
            self._recover()
            if self._loader is None:
                continue
            self._agrees()  # newcomers do so before they come here
            if self._member.step < at:
                raise StateError(
                    f"the state went back to step {self._member.step}, but the script left its loop after {at} steps",
                    hint="let `until` end the loop",
                )

    def _protected(self) -> ProtectedState:
        if self._state is None:
            raise UsageError("nothing is protected", hint="call session.protect(model, optimizer, ...) before steps()")
        return self._state

    def _data(self) -> StepLoader | Dealer:
        if self._loader is None:
            raise UsageError("no loader yet", hint="call session.steps(loader, until=...)")
        return self._loader


def init(*, seed: int = 0, invariant: bool = False) -> Session:
    """Take part in the job that this process belongs to, or train alone where there is none.

    Makes the default process group (backend `regrow`), so that DDP and `torch.distributed` work, and seeds all random
    generators so that every rank builds the same model.

    Args:
        seed: what the order of data and all random numbers derive from.
        invariant: world-invariant mode: every committed loss and the final state are bitwise the same with any number
            of replicas, and through every change of it. Gradients are summed over the micro-batches in one fixed tree.
            Needs `session.steps(microbatches=...)`. Each rank computes with one thread.

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
    if invariant:
        torch.set_num_threads(1)
    return Session(member, seed=seed, invariant=invariant)
