"""All that is used of frameworks without being promised by them, and the versions on which it was seen.

transformers: `Trainer._inner_training_loop`, `_init_training_state`, `_prepare_for_training`, `_clip_grad_norm`,
`_get_grad_norm`, `_get_learning_rate`, `_get_num_items_in_batch`, `_track_num_input_tokens`,
`_maybe_log_save_evaluate`, `_evaluate`, `_finalize_training`, `_train_batch_size`, `_tr_loss`, `_total_loss_scalar`,
`_globalstep_last_logged`, `_initial_global_step`, `_initial_num_input_tokens_seen`, `_eval_dataloaders`;
`CallbackHandler.call_event`.
accelerate: `PartialState._shared_state` and its copy in `AcceleratorState`, `GradientState._set_sync_gradients`,
and its `dataloader_references`.
trl: `_metrics` and `_total_train_tokens` of a trainer.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from regrow.core.errors import UsageError

SEEN = {"transformers": ("5.23.0",), "accelerate": ("1.15.0",), "trl": ("1.16.0",)}
"""The versions of each framework on which its adapter was run, with kills."""
_log = logging.getLogger("regrow")


def framework(name: str, *, extra: str) -> Any:
    """A framework's module; a version of it on which nothing was run is told, once.

    Raises:
        UsageError: it is not installed.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in SEEN:
            raise
        raise UsageError(
            f"regrow.adapters.{name} needs {error.name}, which is not installed", hint=f"pip install 'regrow[{extra}]'"
        ) from error
    _tell_version(name)
    return module


@functools.cache
def _tell_version(name: str) -> None:
    version = importlib.metadata.version(name)
    if version not in SEEN[name]:
        _log.warning(
            "regrow's adapter was run on %s %s, and this is %s: it uses names that a version may change",
            name,
            " and ".join(SEEN[name]),
            version,
        )


# --- accelerate ---------------------------------------------------------------------------------------------------


def tell_place(*, rank: int, local_rank: int, world: int) -> bool:
    """Tell accelerate where this process stands now; whether that is news to it.

    It remembers what it was told first, and keeps a copy of that.
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
    """No loader is gone through now: one that was left in its middle, by a fault, has not said so."""
    accelerator.gradient_state.dataloader_references = [None]


def reduce_gradients(accelerator: Any, on: bool) -> None:
    """Whether accelerate shall take the next backward for the last one of a step."""
    accelerator.gradient_state._set_sync_gradients(on)


@contextlib.contextmanager
def unprepared(accelerator: Any) -> Iterator[None]:
    """Within this, `accelerator.prepare` gives back what it is given: loaders that know nothing of ranks."""
    accelerator.prepare = lambda *given, **_: given[0] if len(given) == 1 else given
    try:
        yield
    finally:
        del accelerator.prepare


# --- trl ----------------------------------------------------------------------------------------------------------


def gathered_numbers(trainer: Any) -> dict[str, Any]:
    """What TRL's trainers add up between two log lines, the same on all ranks; empty for others."""
    if not hasattr(trainer, "_metrics"):
        return {}
    metrics = {mode: {name: list(values) for name, values in kept.items()} for mode, kept in trainer._metrics.items()}
    return {"metrics": metrics, "tokens": getattr(trainer, "_total_train_tokens", 0)}


def put_gathered_numbers(trainer: Any, numbers: dict[str, Any]) -> None:
    """The reverse of `gathered_numbers`."""
    if not numbers:
        return
    for mode, kept in numbers["metrics"].items():
        trainer._metrics[mode] = defaultdict(list, {name: list(values) for name, values in kept.items()})
    if hasattr(trainer, "_total_train_tokens"):
        trainer._total_train_tokens = numbers["tokens"]
