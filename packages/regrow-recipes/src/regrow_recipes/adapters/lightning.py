"""Lightning's `Trainer` under regrow: import it from here instead of from `lightning`.

    from regrow_recipes.adapters.lightning import Trainer

Nothing else changes in the script; `regrow run` starts it. `recoverable(MyTrainer)` does the same for a subclass. See
docs/adopt.md.
"""

from typing import TYPE_CHECKING, Any

import torch

from regrow.core.config import rank_variable
from regrow.core.errors import UsageError
from regrow.core.process.rewriting import change_class
from regrow_recipes.adapters import private_names
from regrow_recipes.adapters.fitting.loop import EpochsOfSteps
from regrow_recipes.adapters.trainer.joining import joined

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from regrow.train.microbatches import MicroBatch
    from regrow.train.session import Session

__all__ = ["Trainer", "recoverable"]

_REFUSED_CALLBACKS = {
    "BaseFinetuning": "changes during the training which parameters train",
    "GradientAccumulationScheduler": "changes the number of batches in an update",
    "StochasticWeightAveraging": "keeps its own copy of the weights",
    "Timer": "stops each rank by that rank's own clock",
    "WeightAveraging": "keeps its own copy of the weights",
}


class _Behind:
    """Base class that the mixin expects, for type checking only."""

    if TYPE_CHECKING:

        def __init__(self, **kwargs: Any) -> None: ...
        def fit(self, *args: Any, **kwargs: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...


class _Recoverable(_Behind):
    """A `Trainer` whose updates are steps of regrow.

    Args:
        seed: seed of the order of data and of all random numbers; default: the one given to `seed_everything`.
        devices: if omitted, all ranks of this node; likewise `num_nodes`.

    Raises:
        UsageError: an argument asks for something that cannot survive a fault.
    """

    session: "Session"

    def __init__(self, *, seed: int | None = None, **kwargs: Any) -> None:
        seed = int(rank_variable("PL_GLOBAL_SEED") or 0) if seed is None else seed
        self.session = joined(seed, changes_classes=True)
        if kwargs.get("devices", "auto") == "auto":
            kwargs["devices"] = int(rank_variable("LOCAL_WORLD_SIZE") or 1)
        if "num_nodes" not in kwargs:
            kwargs["num_nodes"] = int(rank_variable("GROUP_WORLD_SIZE") or 1)
        super().__init__(**kwargs)
        private_names.fit_loop(self, EpochsOfSteps)
        private_names.synchronized(self)
        private_names.unnoted_sanity_check(self)

    def fit(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Train as Lightning's `fit`, and continue after faults."""
        _refuse(self, model, kwargs.get("ckpt_path"))
        if self.session.newcomer:
            self.num_sanity_val_steps = 0
        plugin = self.strategy.precision_plugin
        if not isinstance(plugin, _ClosureFirst):
            change_class(plugin, type(type(plugin).__name__, (_ClosureFirst, type(plugin)), {}))
            self.strategy.precision_plugin = plugin
        super().fit(model, *args, **kwargs)


class _ClosureFirst:
    """A precision plugin that runs the closure before the optimizer's step, and whose backward pass is regrow's."""

    micro: "MicroBatch"

    def backward(self, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        """Run the present micro-batch's backward pass."""
        self.micro.backward(tensor)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """Step the optimizer; gradients are already computed and clipped."""
        loss = closure()
        private_names.after_closure(self, model, optimizer)
        optimizer.step(**kwargs)
        return loss


def _refuse(trainer: Any, model: Any, ckpt_path: object) -> None:
    refused = {
        "ckpt_path": (ckpt_path is not None, "`regrow run --checkpoint-dir ... --resume`"),
        "manual optimization": (not model.automatic_optimization, "a loop of its own: session.epochs"),
        "overfit_batches": (trainer.overfit_batches != 0, "limit_train_batches"),
        "reload_dataloaders_every_n_epochs": (trainer.reload_dataloaders_every_n_epochs != 0, "one loader"),
        "16-mixed": (trainer.scaler is not None, "bf16-mixed"),
        f"the strategy {type(trainer.strategy).__name__}": (
            type(trainer.strategy).__name__ not in ("DDPStrategy", "SingleDeviceStrategy"),
            "ddp",
        ),
        "an interval of validation in time or across epochs": (
            trainer.check_val_every_n_epoch is None or not isinstance(trainer.val_check_interval, int | float),
            "batches of an epoch",
        ),
    }
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _REFUSED_CALLBACKS:
                why = f"{type(callback).__name__}, which {_REFUSED_CALLBACKS[kind.__name__]}"
                refused[why] = (True, "a schedule, or a loop of its own")
    for name, (asked, instead) in refused.items():
        if asked:
            raise UsageError(f"a Lightning Trainer under regrow cannot have {name}", hint=f"use {instead}")


def recoverable(trainer: Any) -> Any:
    """A subclass of the trainer class that survives faults; a class that already does is returned unchanged."""
    if issubclass(trainer, _Recoverable):
        return trainer
    made = type(trainer.__name__, (_Recoverable, trainer), {"__module__": trainer.__module__})
    made.__doc__ = trainer.__doc__
    return made


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = recoverable(private_names.lightning().Trainer)
    return made
