"""Hugging Face's `Accelerator` under regrow: import it from here instead of from `accelerate`.

    from regrow_recipes.adapters.accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for step in accelerator.steps(loader, epochs=3):
        with step as batch:
            accelerator.backward(model(**batch).loss)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
        if not accelerator.ends_epoch(step):
            continue
        evaluate()

With `Accelerator(gradient_accumulation_steps=4)` a step has several batches: `with step as micros:`, and in it
`for batch in accelerator.batches(micros):`. Only the loops change: a step is one update. See docs/adopt.md.
"""

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from regrow.core.errors import UsageError
from regrow.core.process.rewriting import change_class
from regrow.data.dataloader import Cached
from regrow.data.epochs import pass_length
from regrow.train.restartable import declare
from regrow_recipes.adapters import private_names
from regrow_recipes.adapters.trainer.joining import joined
from regrow_recipes.adapters.trainer.schedule import Schedule, samples_of

if TYPE_CHECKING:
    from accelerate import Accelerator

    from regrow.train.microbatches import MicroBatch, MicroBatches
    from regrow.train.session import Session
    from regrow.train.step import Step

__all__ = ["Accelerator"]


class _Behind:
    """Base class that the mixin expects, for type checking only."""

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def prepare(self, *given: Any, **options: Any) -> Any: ...
        def backward(self, loss: torch.Tensor, **kwargs: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...


class _Recoverable(_Behind):
    """An `Accelerator` whose updates are steps of regrow.

    Args:
        seed: seed of the order of data and of all random numbers.
        gradient_accumulation_steps: micro-batches of an update for each initial rank.
    """

    session: "Session"
    _schedule: Schedule

    def __init__(self, *args: Any, seed: int = 0, gradient_accumulation_steps: int = 1, **kwargs: Any) -> None:
        self.session = joined(seed, changes_classes=True)
        # accelerate divides losses by this number; here the micro-batches take the mean over an update.
        super().__init__(*args, **kwargs)
        self._accumulates = gradient_accumulation_steps
        self._protected: list[Any] = []
        self._micro: MicroBatch | None = None
        self._step: Step | None = None
        if self.session.world_size > 1 and not self.use_distributed:
            raise UsageError(
                f"Accelerate treats each of the {self.session.world_size} ranks as a separate training",
                hint="on CPUs only, give Accelerator(cpu=True)",
            )

    def prepare(self, *given: Any, **options: Any) -> Any:
        """Prepare as accelerate does, and protect the objects, with the state of optimizers and schedulers.

        Loaders are not bound to a rank until they are used: `steps` deals out the data of one; an iteration over
        another, in an evaluation, reads the share of the worker's present rank.
        """
        made = [self._prepared(each, options) for each in given]
        return made[0] if len(made) == 1 else tuple(made)

    def _prepared(self, given: Any, options: dict[str, Any]) -> Any:
        if isinstance(given, LRScheduler):
            self._protected.append(given)
            if self.step_scheduler_with_optimizer and not self.split_batches:
                _as_often_as_accelerate(given, self.num_processes)
            return given
        if isinstance(given, DataLoader):
            return _dealt_later(given, self)
        made = super().prepare(given, **options)
        if isinstance(given, torch.nn.Module | torch.optim.Optimizer):
            self._protected.append(getattr(made, "optimizer", made))
        return made

    def protect(self, *objects: Any) -> None:
        """Protect objects besides the prepared ones: an average of weights, counters. Call it before `steps`."""
        self._protected += objects

    def steps(self, loader: Any, *, until: int | None = None, epochs: int | None = None) -> Iterator["Step"]:
        """The remaining updates. Without gradient accumulation, a step yields one batch.

        Args:
            loader: a plain `DataLoader`.
            until: total number of updates.
            epochs: alternatively, number of passes over the data; see `ends_epoch`.

        Raises:
            UsageError: neither is given, or the number of samples in a pass is not known.
        """
        declare()  # accelerate's own functions call collectives that are not in the script's text
        if self.scaler is not None:
            self._protected.append(self.scaler)
        self.session.protect(*self._protected)
        self.session.keep_world("the global batch of an Accelerator follows the number of ranks")
        loader = getattr(loader, "undealt", loader)
        microbatches = self._accumulates * self.session.world_size
        inner = loader.loader if isinstance(loader, Cached) else loader
        if self._accumulates == 1:
            shares = (self.session.rank, self.session.world_size)
            self._schedule = Schedule(microbatches, pass_length(loader, shares, seed=self.session.seed) or 0)
        else:
            self._schedule = Schedule.of(
                samples_of(inner),
                batch_size=getattr(inner, "batch_size", None) or 1,
                microbatches=microbatches,
                drop_last=bool(getattr(inner, "drop_last", False)),
            )
        if until is None:
            if epochs is None or not self._schedule.per_epoch:
                raise UsageError(
                    "the number of updates is unknown",
                    hint="give until=, or epochs= and a loader over a data set with a length",
                )
            until = epochs * self._schedule.per_epoch
        each: dict[str, Any] = {} if self._accumulates == 1 else {"microbatches": microbatches}
        for step in self.session.steps(loader, until=until, **each):
            self._set_place()
            self._step = step
            step.gives = _named_as_here if each else self._on_device
            yield step
        self._set_place()

    def ends_epoch(self, step: "Step") -> bool:
        """True if a step is committed and is the last update of a pass over the data."""
        return step.committed and self._schedule.ends_epoch(step.number)

    @property
    def epoch(self) -> int:
        """Number of the present step's pass over the data, from 0. It can change, so do not store it."""
        number = 0 if self._step is None else self._step.number
        return number // (self._schedule.per_epoch or number + 1)

    def _on_device(self, batch: Any) -> Any:
        from accelerate.utils import send_to_device

        private_names.reduce_gradients(self, True)
        return send_to_device(batch, self.device) if self.device_placement else batch

    def batches(self, micros: "MicroBatches") -> Iterator[Any]:
        """This rank's batches of an update, on its device; call `backward` once for each."""
        from accelerate.utils import send_to_device

        if self._accumulates == 1:
            yield micros
            return
        try:
            for micro in micros:
                self._micro = micro
                private_names.reduce_gradients(self, micro.last)
                yield send_to_device(micro.batch, self.device)
        finally:
            self._micro = None

    def backward(self, loss: torch.Tensor, *, weight: int | None = None, **_: Any) -> None:
        """Add the present batch's gradient, and log its loss.

        Args:
            loss: the mean over the elements that `weight` counts.
            weight: number of samples (the default) or tokens of the batch.

        Raises:
            UsageError: outside `batches`.
        """
        if self._accumulates == 1 and self._step is not None and self._step.inside:
            self._step.log(loss=loss)
            super().backward(loss if weight is None else loss * self._share_of(weight))
            return
        if self._micro is None:
            raise UsageError(
                "accelerator.backward was called outside a step",
                hint="call it in `with step as batch:`, or, where gradients are accumulated, in "
                "`for batch in accelerator.batches(micros):` inside `with step as micros:`",
            )
        self._micro.log(loss=loss)
        self._micro.backward(loss if self.scaler is None else self.scaler.scale(loss), weight=weight)

    def _share_of(self, weight: int) -> float:
        """Ratio of this rank's batch to an equal share of the global batch."""
        total = torch.tensor(float(weight), dtype=torch.float64, device=self.device)
        if self.session.world_size > 1:
            torch.distributed.all_reduce(total)
        return weight * self.session.world_size / float(total)

    def _set_place(self) -> None:
        session = self.session
        private_names.set_place(rank=session.rank, local_rank=session.local_rank, world=session.world_size)

    @property
    def process_index(self) -> int:
        """This worker's present rank."""
        return self.session.rank

    @property
    def local_process_index(self) -> int:
        """This worker's present rank on its node."""
        return self.session.local_rank

    @property
    def is_main_process(self) -> bool:
        """True if this is rank 0 at present."""
        return self.session.is_main


def _named_as_here(micros: "MicroBatches") -> "MicroBatches":
    micros.backward, micros.all = "accelerator.backward(loss)", "accelerator.batches(micros)"
    return micros


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    theirs = private_names.framework("accelerate", extra="trainer").Accelerator
    made = globals()[name] = type("Accelerator", (_Recoverable, theirs), {"__doc__": theirs.__doc__})
    return made


class _DealtLater(DataLoader[Any]):
    """A loader that is not bound to a rank; iteration reads this worker's present share, divided as by accelerate."""

    undealt: DataLoader[Any]
    owner: _Recoverable

    def __iter__(self) -> Any:
        return iter(private_names.dealt_now(self.owner, self.undealt))


def _dealt_later(loader: DataLoader[Any], owner: _Recoverable) -> DataLoader[Any]:
    if isinstance(loader, _DealtLater):
        return loader
    kind, shown = type(loader), copy.copy(loader)
    shown.__dict__.update(undealt=loader, owner=owner)
    change_class(shown, type(kind.__name__, (_DealtLater, kind), {"__module__": kind.__module__}))
    return shown


class _ForEachProcess(LRScheduler):
    """A scheduler that steps once for each process at an update, as accelerate's: scripts count undivided batches."""

    processes: int

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step as many times as there were processes at the start, but not past the last step."""
        last = getattr(self, "total_steps", None)
        for _ in range(self.processes):
            if last is None or self._step_count <= last:
                super().step(*args, **kwargs)


def _as_often_as_accelerate(scheduler: LRScheduler, processes: int) -> None:
    kind = type(scheduler)
    if processes > 1 and not isinstance(scheduler, _ForEachProcess):
        made = type(kind.__name__, (_ForEachProcess, kind), {"__module__": kind.__module__, "processes": processes})
        change_class(scheduler, made)
