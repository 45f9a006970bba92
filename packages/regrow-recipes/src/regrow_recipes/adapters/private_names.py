"""Names of frameworks that are not in their public API and are used here, with the versions on which they were seen.

transformers: `Trainer._inner_training_loop`, `_init_training_state`, `_prepare_for_training`, `_clip_grad_norm`,
`_get_grad_norm`, `_get_learning_rate`, `_get_num_items_in_batch`, `_track_num_input_tokens`,
`_maybe_log_save_evaluate`, `_evaluate`, `_finalize_training`, `_train_batch_size`, `_tr_loss`, `_total_loss_scalar`,
`_globalstep_last_logged`, `_initial_global_step`, `_initial_num_input_tokens_seen`, `_eval_dataloaders`;
`CallbackHandler.call_event`.
accelerate: `PartialState._shared_state` and its copy in `AcceleratorState`, `GradientState._set_sync_gradients`,
and its `dataloader_references`; `Accelerator._dataloaders`.
trl: `_metrics` and `_total_train_tokens` of a trainer.
lightning: the fit loop's class, `_data_source`, `_combined_loader`; the epoch loop's `_results`, `_build_kwargs`,
`_batches_that_stepped`; the automatic optimization's `_optimizer_step`, `_on_before_zero_grad`, `_optimizer_zero_grad`;
`trainer._logger_connector` with `_first_loop_iter` and its three dicts; the functions of `trainer.call`; a precision
plugin's `_after_closure`; `ModelCheckpoint`'s `_enable_version_counter` and its time of the last save.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from regrow.comm.groups import unnoted
from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line
from regrow.core.process.rewriting import change_class

SEEN = {"transformers": ("5.23.0",), "accelerate": ("1.15.0",), "trl": ("1.16.0",), "pytorch-lightning": ("2.6.6",)}
SEEN["lightning"] = SEEN["pytorch-lightning"]  # one source under two names
"""The versions of each framework on which its adapter was run, with kills."""
_log = logging.getLogger("regrow")


def framework(name: str, *, extra: str) -> Any:
    """Import a framework; an untested version is logged once.

    Raises:
        UsageError: it is not installed.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in SEEN:
            raise
        raise UsageError(
            f"regrow_recipes.adapters.{name} needs {error.name}, which is not installed",
            hint=install_line(extra, package="regrow-recipes"),
        ) from error
    _note_version(name)
    return module


@functools.cache
def _note_version(name: str) -> None:
    version = importlib.metadata.version(name)
    if version not in SEEN[name]:
        _log.warning(
            "regrow's adapter was tested with %s %s, and this is %s: the adapter uses private names, which any "
            "version may change",
            name,
            " and ".join(SEEN[name]),
            version,
        )


# --- accelerate ---------------------------------------------------------------------------------------------------


def set_place(*, rank: int, local_rank: int, world: int) -> bool:
    """Set accelerate's rank and world size; returns True if they have changed.

    accelerate stores the first values, and keeps a copy of them.
    """
    state = framework("accelerate", extra="trainer").state
    place = {"process_index": rank, "local_process_index": local_rank, "num_processes": world}
    news = False
    for shared in (state.PartialState._shared_state, state.AcceleratorState._shared_state):
        if shared:
            news |= any(shared.get(name) != value for name, value in place.items())
            shared.update(place)
    return news


def leave_loaders(accelerator: Any) -> None:
    """End all loaders: one that a fault interrupted has not ended itself."""
    accelerator.gradient_state.dataloader_references = [None]


def dealt_now(accelerator: Any, loader: Any) -> Any:
    """A loader with accelerate's division among the present ranks, without registering it."""
    leave_loaders(accelerator)
    known, accelerator._dataloaders = accelerator._dataloaders, []
    try:
        return accelerator.prepare_data_loader(loader)
    finally:
        accelerator._dataloaders = known


def reduce_gradients(accelerator: Any, on: bool) -> None:
    """Tell accelerate whether the next backward pass is the last one of a step."""
    accelerator.gradient_state._set_sync_gradients(on)


@contextlib.contextmanager
def unprepared(accelerator: Any) -> Iterator[None]:
    """Make `accelerator.prepare` return its arguments unchanged, so that loaders are not bound to a rank."""
    accelerator.prepare = lambda *given, **_: given[0] if len(given) == 1 else given
    try:
        yield
    finally:
        del accelerator.prepare


# --- trl ----------------------------------------------------------------------------------------------------------


_OWN_NUMBERS = frozenset({"step_time"})
"""Times that each rank measures itself."""


def gathered_numbers(trainer: Any) -> dict[str, Any]:
    """Figures that TRL's trainers sum up between two log lines, equal on all ranks; empty for others."""
    if not hasattr(trainer, "_metrics"):
        return {}
    metrics = {
        mode: {name: list(values) for name, values in kept.items() if name not in _OWN_NUMBERS}
        for mode, kept in trainer._metrics.items()
    }
    return {"metrics": metrics, "tokens": getattr(trainer, "_total_train_tokens", 0)}


def put_gathered_numbers(trainer: Any, numbers: dict[str, Any]) -> None:
    """Set figures that `gathered_numbers` returned."""
    if not numbers:
        return
    for mode, kept in numbers["metrics"].items():
        own = {name: values for name, values in trainer._metrics[mode].items() if name in _OWN_NUMBERS}
        trainer._metrics[mode] = defaultdict(list, {name: list(values) for name, values in kept.items()} | own)
    if hasattr(trainer, "_total_train_tokens"):
        trainer._total_train_tokens = numbers["tokens"]


# --- lightning ------------------------------------------------------------------------------------------------------

_SAVED_AT = ("current_score", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


def lightning() -> Any:
    """The Lightning package that the script uses, of the two names under which it is published.

    Raises:
        UsageError: neither is installed.
    """
    used = [name for name in ("lightning", "pytorch_lightning") if name in sys.modules]
    there = used or [name for name in ("lightning", "pytorch_lightning") if importlib.util.find_spec(name)]
    if not there:
        raise UsageError(
            "regrow_recipes.adapters.lightning needs Lightning",
            hint=install_line("lightning", package="regrow-recipes"),
        )
    _note_version(there[0].replace("_", "-"))
    return importlib.import_module("lightning.pytorch" if there[0] == "lightning" else there[0])


def fit_loop(trainer: Any, mixin: type) -> None:
    """Give a trainer a fit loop of its own class, with `mixin` as the first base."""
    theirs = trainer.fit_loop
    change_class(theirs, type("FitLoop", (mixin, type(theirs)), {}))


def train_loader(loop: Any) -> Any:
    """Training data of the script, its module or its data module."""
    return loop._data_source.dataloader()


def put_loader(loop: Any, loader: Any) -> None:
    """Give the loop this loader if it has none; regrow iterates over it in the loop's place."""
    if loop._combined_loader is None:
        combined = importlib.import_module(f"{_root(loop.trainer)}.utilities.combined_loader").CombinedLoader
        loop._combined_loader = combined(loader, "max_size_cycle")


def _root(trainer: Any) -> str:
    kinds = [kind.__module__ for kind in type(trainer).__mro__ if kind.__module__.endswith(".trainer.trainer")]
    return kinds[-1].removesuffix(".trainer.trainer")


def calls(trainer: Any) -> Any:
    """The module whose functions call hooks."""
    return importlib.import_module(f"{_root(trainer)}.trainer.call")


def hook(trainer: Any, name: str, *args: Any) -> Any:
    """Call a hook of all callbacks and of the module; returns the module's result."""
    call = calls(trainer)
    call._call_callback_hooks(trainer, name, *args)
    return call._call_lightning_module_hook(trainer, name, *args)


def strategy_hook(trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the strategy as Lightning does."""
    return calls(trainer)._call_strategy_hook(trainer, name, *args, **kwargs)


def on_device(trainer: Any, batch: Any) -> Any:
    """A batch as a training step receives it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


def step_arguments(trainer: Any, batch: Any, index: int) -> list[Any]:
    """Arguments of `training_step`."""
    return list(trainer.fit_loop.epoch_loop._build_kwargs({}, batch, index).values())


def zero_gradients(trainer: Any, index: int) -> None:
    """Call the hooks before a first backward pass, and zero the gradients."""
    automatic = trainer.fit_loop.epoch_loop.automatic_optimization
    optimizer = trainer.strategy.optimizers[0]
    automatic._on_before_zero_grad(optimizer)
    automatic._optimizer_zero_grad(index, optimizer)


def optimizer_step(trainer: Any, index: int, closure: Any) -> None:
    """Call the module's `optimizer_step`, which calls `precision_plugin.optimizer_step`."""
    trainer.fit_loop.epoch_loop.automatic_optimization._optimizer_step(index, closure)


def after_closure(plugin: Any, model: Any, optimizer: Any) -> None:
    """Call the hooks before an update, and clip the gradients."""
    plugin._after_closure(model, optimizer)


def batch_begins(trainer: Any, batch: Any) -> None:
    """Attribute the next logged values to a batch."""
    trainer._logger_connector.on_batch_start(batch)


def logged_in_step(trainer: Any) -> dict[str, Any]:
    """The training's metrics that have a value, as Lightning's collection stores them."""
    return {key: item for key, item in trainer.fit_loop.epoch_loop._results.items() if not item.has_reset}


def forget_logged(trainer: Any) -> None:
    """Clear the values of all training metrics."""
    trainer.fit_loop.epoch_loop._results.reset()


def put_logged(trainer: Any, key: str, *, last: float, total: float, weight: float) -> None:
    """Set a training metric: its value in the last step, and its weighted sum and weight over the epoch."""
    item = trainer.fit_loop.epoch_loop._results.get(key)
    if item is None:
        return
    item._forward_cache, item._computed = torch.tensor(last), torch.tensor(total / weight)
    item._update_count, item.has_reset = 1, False


def follow_batch(trainer: Any) -> None:
    """Attribute the next reported metrics to a step, until the epoch ends."""
    trainer._logger_connector._first_loop_iter = False


def report_step_metrics(trainer: Any) -> None:
    """Pass the step's metrics to callbacks and loggers."""
    trainer._logger_connector.on_batch_end()
    trainer.fit_loop.epoch_loop.batch_progress.increment_completed()
    trainer._logger_connector.update_train_step_metrics()


def unnoted_sanity_check(trainer: Any) -> None:
    """Exclude the validation before the training, which newcomers skip, from the calls that they repeat.

    The preparation of validations is excluded too: it runs in that validation, or as the training begins.
    """
    check, prepare = trainer._run_sanity_check, trainer.fit_loop.epoch_loop.val_loop.setup_data

    def checked() -> None:
        with unnoted():
            check()

    def prepared() -> None:
        with unnoted():
            prepare()

    trainer._run_sanity_check, trainer.fit_loop.epoch_loop.val_loop.setup_data = checked, prepared


def synchronized(trainer: Any) -> None:
    """From now on, average the values that a validation logs over all ranks."""
    results = trainer.fit_loop.epoch_loop.val_loop._results
    kind = type(results)

    def log(self: Any, fx: str, name: str, value: Any, **more: Any) -> None:
        kind.log(self, fx, name, value, **more | {"sync_dist": True, "rank_zero_only": False})

    change_class(results, type(kind.__name__, (kind,), {"log": log}))


def forget_validation(trainer: Any) -> None:
    """Clear the state of an abandoned validation."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop._results.reset()
    loop._logged_outputs = []
    metric = importlib.import_module("torchmetrics").Metric
    for module in trainer.lightning_module.modules():
        if isinstance(module, metric):
            module.reset()


def validation_samplers(trainer: Any) -> list[Any]:
    """The samplers of the validation's loaders, which store their rank."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if combined is None else [getattr(loader, "sampler", None) for loader in combined.flattened]


def fit_numbers(trainer: Any) -> dict[str, Any]:
    """Progress of the loops, and the last metrics, equal on all ranks."""
    connector, epochs = trainer._logger_connector, trainer.fit_loop.epoch_loop
    return {
        "progress": {name: each.state_dict() for name, each in _progress(trainer).items()},
        "stepped": epochs._batches_that_stepped,
        "metrics": {name: dict(getattr(connector, name)) for name in _METRICS},
    }


def put_fit_numbers(trainer: Any, numbers: dict[str, Any]) -> None:
    """Set the values that `fit_numbers` returned."""
    for name, each in _progress(trainer).items():
        each.load_state_dict(numbers["progress"][name])
    trainer.fit_loop.epoch_loop._batches_that_stepped = numbers["stepped"]
    for name in _METRICS:
        setattr(trainer._logger_connector, name, dict(numbers["metrics"][name]))


_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def _progress(trainer: Any) -> dict[str, Any]:
    epochs = trainer.fit_loop.epoch_loop
    return {
        "epoch": trainer.fit_loop.epoch_progress,
        "batch": epochs.batch_progress,
        "scheduler": epochs.scheduler_progress,
        "optimizer": epochs.automatic_optimization.optim_progress,
        "validation": epochs.val_loop.batch_progress,
    }


def write_over(trainer: Any) -> None:
    """Make a repeated checkpoint overwrite the first instead of getting a new name."""
    for callback in trainer.checkpoint_callbacks:
        callback._enable_version_counter = False


def saved_at(callback: Any) -> dict[str, Any]:
    """A `ModelCheckpoint`'s record of its saves, besides its state; empty for others."""
    return {name: getattr(callback, name) for name in _SAVED_AT if hasattr(callback, name)}
