"""A training script's whole view of regrow: `protect`, `steps`."""

import atexit
import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from regrow.comm import meshes
from regrow.core.errors import GenerationHalted, StateError, UsageError
from regrow.core.ids import StepNo
from regrow.data.loader import StepLoader
from regrow.train.alone import Alone
from regrow.train.announcing import Announcing
from regrow.train.batches import Batches
from regrow.train.dealers import dealer
from regrow.train.member import Member
from regrow.train.microbatches import Dealer
from regrow.train.modules import Modules
from regrow.train.protect import ProtectedState
from regrow.train.regions import Regions
from regrow.train.sharing import Share, share_of
from regrow.train.standing import Standing
from regrow.train.step import Step
from regrow.train.verdicts import Dismissed

_STEPS = "steps()"


class Session(Standing):
    """One worker's part in the training. Made by `regrow.init()`.

    Args:
        member: how this process takes part in a job; `Alone` outside one.
        seed: what the order of data and all random numbers of the steps derive from.
        invariant: whether the result must not depend on the number of replicas.
    """

    def __init__(self, member: Member | Alone, *, seed: int, invariant: bool = False) -> None:
        super().__init__(member)
        self.seed, self.invariant = seed, invariant
        self._modules = Modules()
        self._started = False
        self._attempts: dict[StepNo, int] = {}
        self._begun_at = 0.0
        self._announcing = Announcing(member)
        self._latest: Step | None = None
        self._looping = self._left = False
        self._echoing = contextlib.ExitStack()
        self._regions = Regions(self)

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
        self._objects = [*objects, *named.values()]
        self._modules = Modules(self._objects, recovers=self._member.rehearses)
        for optimizer in self._state.optimizers():
            optimizer.register_step_pre_hook(lambda *_: self._before_update())
            optimizer.register_step_post_hook(lambda *_: self._regions.after_update())

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
        microbatches: int | Mapping[int, int] | None = None,
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
                Or a table {replicas: micro-batches}, of which the row of the next smaller size counts: for a
                `regrow.DataLoader` with `global_batch_size=`, and not in world-invariant mode.

        Raises:
            UsageError: nothing is protected, or `until` is negative, or the loop's body is not inside `with step`, or
                there are too few micro-batches for the world, or none in world-invariant mode.
        """
        if until < 0:
            raise UsageError(f"until={until} is negative")
        self._start(_STEPS)
        self._data_of, self._share = data, share_of(data)
        self._batches = Batches(self._reader(loader, until, microbatches), seed=self.seed, place=self._place)
        self._member.declare(self._batches.order)
        return self._run(until)

    def _reader(self, loader: Any, until: int, microbatches: int | Mapping[int, int] | None) -> StepLoader | Dealer:
        member = self._member
        if microbatches is not None:
            return dealer(
                loader,
                self._protected(),
                self._modules,
                seed=self.seed,
                count=microbatches,
                invariant=self.invariant,
                recorded=member.records,
            )
        if self.invariant:
            raise UsageError("world-invariant mode needs micro-batches", hint="give session.steps(microbatches=...)")
        return StepLoader(loader, seed=self.seed, cache=member.cache(until), recorded=member.records)

    def _start(self, what: str) -> None:
        """The one loop of a job begins. Raises `UsageError` where there was one, or nothing is protected."""
        if self._started:
            raise UsageError(f"{what} is a second loop", hint="a job has one loop; let `until` cover it all")
        if self.invariant and what != _STEPS:
            raise UsageError(f"{what} has no micro-batches to be summed up", hint="leave invariant mode")
        self._started = self._protected() is not None

    def _arrive(self) -> None:
        """Built and warm: stand before the first step, or where the others are."""
        modules, dealer = self._modules, self._dealer
        unit, world = self._member.unit, self.world_size
        across = [*modules.spanning, *meshes.follows(unit=unit, world=world)]
        self._member.let_follow(across, meshes.inside(unit=unit, world=world))
        self._member.arrive(
            self._protected(),
            modules.buckets(),
            modules.buffered,
            microbatches=dealer.most if dealer is not None else 0,
            fixed=self._fixed() if self._batches is not None else "the script has no session.steps",
        )

    def _run(self, until: int) -> Iterator[Step]:
        batches, member = self._data(), self._member
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
            if not self._left:
                atexit.register(self._finish)
            raise
        finally:
            batches.close()

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
        batch = self._data().batch(before)
        self._data().seed_body(before)
        self._latest = Step(self, before, batch, rehearsal=True, replay=True)
        yield self._latest
        if self._latest.rehearsal:
            raise UsageError("the body of the loop did not enter its step", hint="write `with step as batch:`")
        return True

    def _prepare(self) -> Step | None:
        """Everything that must be right when a body starts; None when the generation is over."""
        self._announcing.send()
        member, state, batches = self._member, self._protected(), self._data()
        if self._recover_if_halted():
            return None
        self._regions.passed()
        if not member.pass_boundary():
            self._recover()
            return None
        number = member.step
        self._settle()
        if not self._agrees():
            return None
        member.checkpoint()
        try:
            batch = member.fetch(number, lambda: batches.batch(number))
        except Exception as error:
            if not self._failed(error):
                raise
            return None
        member.show_read(number, batches.record(number))
        state.begin()
        if not member.begin(number):
            return None
        batches.seed_body(number)
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
            first = StepNo(0)
            batch = self._data().batch(first)
            self._data().seed_body(first)
            step = Step(self, first, batch, rehearsal=True)
            yield step
            if not step.entered:
                raise UsageError("the body of the loop did not enter its step", hint="write `with step as batch:`")
            if not self._member.rehearsed() and self._protected().parameters_changed():
                raise UsageError(
                    "the step's body changes protected parameters, but no protected optimizer did",
                    hint="protect the optimizer too, or call step.update() before the change",
                )
        self._data().seek(first)

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
        step.committed = True
        self._regions.committed()
        self._announcing.committed(step, self._begun_at, self._batches, adopted=adopted)

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
        try:
            adopted = self._member.rejoin()
        except Dismissed as leaving:
            # What a loop or a body that it unwinds still does is nothing to the others.
            self._left, self._looping = True, False
            self._announcing.send()
            self._hooks.tell(leaving.change, self._member.step, leaving=True)
            raise
        if step is not None and adopted == step.number:
            # The others had all of this worker's gradients: the step has happened, though not here.
            self._committed(step, adopted=True)
        self._modules.overwritten()
        self._follow_world()
        if self._batches is not None:
            self._batches.seek(self._member.step)
        self._hooks.tell(self._member.take_change(), self._member.step)
        self._regions.recovered(self._member.inside)

    # --- the log -----------------------------------------------------------------------------------------------

    def _log(self, step: Step) -> None:
        self._announcing.logged(step, self._batches)

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
        self._announcing.send()
        ended = not self._recover_if_halted() and self._agrees(last=True)
        if ended and not self._member.finish():
            self._recover()
            ended = False
        self._looping = not ended
        return ended

    def _finish(self) -> None:
        """As `_ends`, for a script that has left the loop: no step can be run any more."""
        self._looping, at = False, self._member.step
        self._announcing.send()
        while not self._member.finish():
            self._recover()
            if self._batches is None:
                continue
            self._agrees()  # newcomers do so before they come here
            if self._member.step < at:
                raise StateError(
                    f"the state went back to step {self._member.step}, but the script left its loop after {at}",
                    hint="let `until` end the loop",
                )
