"""A training script's whole view of regrow: its place in the world, `protect`, `steps`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from regrow.comm.torch_private.fsdp import shard_size
from regrow.core.early_reads import PlaceInWorld
from regrow.core.errors import UsageError
from regrow.core.ids import Rank
from regrow.core.messages.data import OrderDeclared
from regrow.data.epochs import pass_length
from regrow.data.loader import StepLoader
from regrow.step.policy import Policy
from regrow.train.batches import Batches
from regrow.train.dealers import dealer
from regrow.train.epochs import Epoch, Epochs
from regrow.train.first_reads import FirstReads
from regrow.train.gradients.wrappers import Modules
from regrow.train.hooks.regroups import RegroupHook
from regrow.train.hooks.scale_events import ScaleEvent
from regrow.train.loop import STEPS, StepLoop
from regrow.train.microbatches import Dealer
from regrow.train.policy import Scaled
from regrow.train.rehearsal.unprotected_optimizers import UnprotectedOptimizers
from regrow.train.script.callers import script_frames
from regrow.train.script.second_loops import refuse_second_loop
from regrow.train.sharing import Share
from regrow.train.state.protected import ProtectedState
from regrow.train.step import Step
from regrow.train.trainings import OneTraining, Trainings
from regrow.train.worker.participation import Participation


class Session:
    """One worker's part in the training. Made by `regrow.init()`.

    Args:
        worker: how this process takes part in a job.
        seed: source of the order of data and of all random numbers of the steps.
        invariant: whether the result must not depend on the number of replicas.
    """

    _loop_kind: ClassVar[type[StepLoop]] = StepLoop

    def __init__(self, worker: Participation, *, seed: int, invariant: bool = False) -> None:
        self._worker, self.seed, self.invariant = worker, seed, invariant
        self._loop = self._loop_kind(worker, seed=seed, invariant=invariant)
        self._context = self._loop.context
        self._scaled: Scaled | None = None
        self._trainings: Trainings | None = None

    @property
    def rank(self) -> int:
        """This worker's rank now. Read it each time: a standby gets its final rank only when it is needed."""
        self._worker.early.note(PlaceInWorld.RANK, "session.rank")
        return self._worker.rank

    @property
    def local_rank(self) -> int:
        """This worker's rank on its node."""
        self._worker.early.note(PlaceInWorld.LOCAL_RANK, "session.local_rank")
        return self._worker.local_rank

    @property
    def world_size(self) -> int:
        """Ranks in the world."""
        self._worker.early.note(PlaceInWorld.WORLD, "session.world_size")
        return self._worker.world

    @property
    def replicas(self) -> int:
        """Replicas in the world: groups of ranks that hold one full copy of the state and read one share of the data.

        Before `steps` is called, it is not known which ranks form a replica, and each counts as one.
        """
        return self._context.replicas

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        self._worker.early.note(PlaceInWorld.RANK, "session.is_main")
        return self._worker.rank == 0

    @property
    def newcomer(self) -> bool:
        """True if this worker joins a running training: it receives all of its state from its peers.

        Known as soon as there is a session. A newcomer's objects need shapes but no values, so weights need not be
        loaded: everything given to `protect` is overwritten before its first step.
        """
        return self._worker.newcomer

    @property
    def generation(self) -> int:
        """Number of the membership that this worker runs in."""
        return self._worker.generation

    def policy(self, policy: Policy) -> None:
        """Set the values that change with the number of replicas: the learning rate at each update, and `setting`.

        Raises:
            UsageError: nothing is protected yet, or there is a policy already.
        """
        if self._scaled is not None:
            raise UsageError("policy() was called a second time", hint="put everything into one policy")
        self._scaled = Scaled(policy, self._context.protected().optimizers(), lambda: self.replicas)

    def on_scale(self, hook: Callable[[ScaleEvent], None]) -> None:
        """Call `hook(event)` whenever the world has changed its size, on every rank, at the same step boundary.

        It runs before the next step, when the new world is formed and newcomers have their state. It is also called in
        a worker that leaves (`event.leaving`). A hook must not call collectives. It costs nothing in ordinary steps.
        """
        self._context.hooks.add(hook)

    def on_regroup(
        self, *, before: RegroupHook | None = None, after: RegroupHook | None = None, within: float = 60.0
    ) -> None:
        """Set hooks to rebuild resources that a library has built on the groups, whenever groups are formed again.

        Groups of `torch.distributed` and wrappers on them (DDP, FSDP, device meshes) follow by themselves. Use hooks
        for connections, handles or memory that a library exchanges once (NVSHMEM, DeepEP, symmetric memory):

            def build(generation):
                global buffer
                buffer = library.Buffer(group)
            session.on_regroup(before=lambda generation: buffer.destroy(), after=build)

        If the groups are formed already, `on_regroup` calls `after` at once, so the script does not build by itself. In
        a newcomer they are not, so nothing is built before its first step: a rehearsed body does without
        (`step.rehearsal`). An undisturbed job calls neither again. After a fault, a move, or a change of the world's
        size, every surviving rank calls `before` once the old groups are given up, and each rank, newcomers too, calls
        `after` before any step, when the new groups are formed and it has its state. Hooks are called in order,
        `before` in reverse. All ranks alike may call collectives in `after`; in `before` they are refused. Neither may
        make or destroy groups, or change protected state. Random numbers that they draw do not affect later ones.

        An error of `before` is reported, and the job goes on. An error of `after` makes all ranks form their groups
        again; the same error once more at the same step ends the job, like an error of a body.

        Args:
            before: releases the resources; called with the number of the groups' generation.
            after: builds them; called with the number of the groups' generation, which no other groups of the job have.
            within: seconds that a hook may take; a longer call is reported, and the rank may count as hanging.

        Raises:
            UsageError: neither is given, or called after `steps`.
        """
        if before is None and after is None:
            raise UsageError("on_regroup() was given nothing to call", hint="give before=, after= or both")
        if self._loop.started:
            raise UsageError("on_regroup() was called after steps()", hint="call it before: newcomers need it too")
        self._context.regroups.add(before, after, within=within)

    def keep_world(self, reason: str) -> None:
        """Keep the world's size: requests for another one are refused with `reason`. Call it before `steps`."""
        self._context.kept = reason

    def setting(self, name: str) -> Any:
        """A named value of the policy for the present replicas: read it in every step. Raises `UsageError`."""
        if self._scaled is None:
            raise UsageError(f"there is no policy to have a setting {name!r}", hint="call session.policy(...)")
        return self._scaled.setting(name)

    def trainings(self, names: Sequence[str]) -> Iterator[OneTraining]:
        """Several trainings in one script, one after the other: folds, seeds, a sweep, a teacher and its student.

            for training in session.trainings([f"fold-{k}" for k in range(5)]):
                ...                         # builds, protects, goes through `session.steps`, as any script
                training.result = loss.item()

        Under `regrow run` each training has workers of its own, which run the script from its top and skip finished
        trainings: a body has only `session.results` of those. In each, steps begin at 0, and random numbers anew.

        Args:
            names: names of all trainings, the same whenever the script runs.

        Raises:
            UsageError: called twice or after `protect`; a name twice; one has no steps; there are durable checkpoints.
        """
        if self._trainings is not None or self._context.state is not None:
            raise UsageError(
                "session.trainings() was called twice, or after protect()",
                hint="name all trainings in one call; each protects what it trains, in its body",
            )
        self._trainings = Trainings(self._worker, names, self._next_loop, seed=self.seed)
        return self._trainings.run()

    @property
    def results(self) -> dict[str, Any]:
        """Results of the finished trainings of `trainings`, by name: rank 0's, which all ranks have."""
        return {} if self._trainings is None else self._trainings.results

    def _next_loop(self) -> StepLoop:
        if self._loop.started:
            self._loop = self._loop_kind(self._worker, seed=self.seed, invariant=self.invariant)
            self._context, self._scaled = self._loop.context, None
        return self._loop

    # --- the training ------------------------------------------------------------------------------------------

    def protect(self, *objects: Any, part: str = "", **named: Any) -> None:
        """Protect objects from faults: modules, optimizers, and all others with `state_dict` and `load_state_dict`.

        Also objects with `get_state` and `set_state`, and objects of Python classes, such as environments and replay
        buffers, with all that they hold. A second call may protect more, as another part: `protect(model)`, and
        `protect(optim=..., part=f"rank{r}")` for an optimizer of which each rank keeps a part.

        Args:
            objects: for example the model (wrapped by DDP, FSDP2, both or not at all), its optimizer, its scheduler.
            part: name of the part of the state that this rank has, if different parts have the same names: two middle
                stages of a pipeline, or the state of an optimizer that shards itself. Ranks with the same names,
                shapes, pieces and part count as replicas.
            named: more objects, under these names in the checkpoint.

        Raises:
            StateError: an object has no state that could be protected.
            UsageError: an object holds something whose state cannot be read; or called twice for the same part, after
                `policy`, or after `steps`.
        """
        context, loop, former = self._context, self._loop, self._context.state
        earlier = former.calls if former is not None else []
        if loop.started or any(call.part == part for call in earlier):
            raise UsageError(
                "protect() was called a second time for the same part, or after steps()",
                hint="name everything of a part in one call",
            )
        if self._scaled is not None:
            raise UsageError("protect() was called after policy()", hint="protect everything first")
        every = [*objects, *named.values()]
        if former is None:
            loop.modules = Modules(every, recovers=self._worker.rehearses)
        else:
            loop.modules.add(every)
        # After a forward FSDP's root module holds whole parameters instead of the shards that are to be protected.
        loop.modules.overwritten()
        state = ProtectedState(objects, named, part=part, earlier=earlier)
        if former is not None:
            former.close()
        known = {id(each) for each in former.optimizers()} if former is not None else set()
        for optimizer in state.optimizers():
            if id(optimizer) not in known:
                optimizer.register_step_pre_hook(_announces(loop))
                optimizer.register_step_post_hook(lambda optimizer, *_: loop.after_update(optimizer))
        context.state, context.objects = state, [*context.objects, *every]
        self._worker.body.watch(context.objects)
        if self._worker.rehearses and former is None:
            body = self._worker.body
            inside, goes_on = lambda: loop.restartables.running, lambda error: loop.counts and context.warn_of(error)
            UnprotectedOptimizers(context.protected, body=lambda: body.entered, training=inside, goes_on=goes_on)

    def digest(self) -> str:
        """A digest of all protected state, equal on two workers if and only if their state is bitwise equal."""
        return self._context.protected().digest()

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
            until: number of steps of the whole training.
            data: share of the global batch that this rank reads: the `DeviceMesh` of the data-parallel dimensions, or
                (share, number of shares). Ranks with the same share also draw the same random numbers. By default
                every rank has a share of its own, as DDP and FSDP expect; tensor and pipeline parallelism need `data`.
            microbatches: number of micro-batches in a step's global batch, in worlds of any size: they are dealt out to
                the replicas, and the body iterates over its own by `step.microbatches`. A batch of the loader is then
                a micro-batch (of each rank that FSDP shards over); a callable is `fn(step, share)`. Or a table
                {replicas: micro-batches}, where the row of the next smaller size counts: for a `regrow.DataLoader`
                with `global_batch_size=`, and not in world-invariant mode.

        Raises:
            UsageError: nothing is protected, or `until` is negative, or the loop's body is not inside `with step`, or
                there are too few micro-batches for the world, or none in world-invariant mode.
        """
        if until < 0:
            raise UsageError(f"until={until} is negative")
        self._begin(data)
        return self._walk(loader, until, microbatches)

    def epochs(
        self,
        loader: Any,
        epochs: int,
        *,
        length: int | None = None,
        data: "DeviceMesh | Share | None" = None,
        microbatches: int | Mapping[int, int] | None = None,
    ) -> Iterator[Epoch]:
        """As `steps`, for a training of `epochs` passes over the data: each item yields the steps of one epoch.

            for epoch in session.epochs(loader, 10):
                for step in epoch:
                    with step as batch: ...
                evaluate(model)             # what follows an epoch follows its last step

        A replaced rank begins in the present epoch (`epoch.number`). Each epoch must be iterated to its end.

        Args:
            loader: as for `steps`.
            epochs: number of epochs of the whole training.
            length: steps of an epoch; the default is one pass over the data, of all ranks together.
            data: as for `steps`.
            microbatches: as for `steps`.

        Raises:
            UsageError: as `steps`; or `epochs` is negative, or a pass over the data has no known number of steps.
        """
        if epochs < 0:
            raise UsageError(f"epochs={epochs} is negative")
        self._begin(data)
        if length is None:
            length = pass_length(loader, self._shares(microbatches), seed=self.seed, micro=microbatches is not None)
        if length is None or length < 1:
            raise UsageError(
                f"a pass over this {type(loader).__name__} has no known number of whole steps",
                hint="give the number of steps of an epoch: session.epochs(loader, epochs, length=...)",
            )
        self._loop.has_epochs = True
        walk = self._walk(loader, epochs * length, microbatches, length=length)
        turns = Epochs(self._loop, walk, length=length, until=self._tried(epochs * length)).run()
        self._loop.turns.add_iterator(turns)
        return turns

    def _begin(self, data: "DeviceMesh | Share | None") -> None:
        """Begin the one loop of the script."""
        if self._worker.rehearses and self._trainings is None:
            refuse_second_loop(script_frames(), self)
        self._loop.start(STEPS)
        self._context.read_share(data)

    def _tried(self, until: int) -> int:
        """Number of steps to run: `until`, or fewer if this is only a trial."""
        return min(until, self._worker.trial_steps or until)

    def _walk(
        self, loader: Any, promised: int, microbatches: int | Mapping[int, int] | None, *, length: int = 0
    ) -> Iterator[Step]:
        """The steps of a loop that has begun: `promised` in all, in epochs of `length` steps unless `length` is 0."""
        worker, context, until = self._worker, self._context, self._tried(promised)
        reader, reseed = self._reader(loader, until, microbatches), context.protected().reseed
        worker.reads_once, context.loader = isinstance(loader, Iterator), loader
        fetching = partial(worker.fetching, loader)
        context.batches = Batches(
            reader, seed=self.seed, place=context.place, reseed=reseed, fetching=fetching, began=worker.training.began
        )
        context.first_reads = FirstReads(worker, context.batches, loader, until=promised, length=length)
        worker.send(OrderDeclared(worker.worker_id, Rank(worker.rank), context.batches.order))
        steps = self._loop.run(until)
        self._loop.turns.add_iterator(steps)
        return steps

    def _shares(self, microbatches: int | Mapping[int, int] | None) -> Share:
        """Share of a step's global batch that this rank reads, and the number of shares."""
        if microbatches is None:
            return self._context.place()
        count = microbatches if isinstance(microbatches, int) else min(microbatches.values(), default=1)
        return 0, count * shard_size(self._loop.modules.sharded)

    def _reader(self, loader: Any, until: int, microbatches: int | Mapping[int, int] | None) -> StepLoader | Dealer:
        worker = self._worker
        # A cache identifies batches by their steps, and each training counts its own.
        cache = worker.cache(until) if self._trainings is None else None
        if microbatches is not None:
            return dealer(
                loader,
                self._context.protected(),
                self._loop.modules,
                seed=self.seed,
                count=microbatches,
                invariant=self.invariant,
                recorded=worker.records,
                cache=cache,
            )
        if self.invariant:
            raise UsageError("world-invariant mode needs micro-batches", hint="give session.steps(microbatches=...)")
        return StepLoader(loader, seed=self.seed, cache=cache, recorded=worker.records)


def _announces(loop: StepLoop) -> Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]:
    def hook(_: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = [*args[1:], *options.values()]  # torch's first argument is the optimizer itself
        loop.before_update(closure=any(callable(item) for item in given))

    return hook
