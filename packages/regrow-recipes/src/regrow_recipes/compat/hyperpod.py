"""HyperPod's Python names: import them from here, and a script that was written for it runs under `regrow run`.

    from regrow_recipes.compat.hyperpod import CacheResumeMMAPConfig, HPWrapper, MMAPDataModule, wait_rank

It runs as its plain loop does: after a fault all workers start again, until its loop goes through `session.steps`. Each
name tells in one line of the log what takes its place. See docs/hyperpod.md.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from regrow.core.errors import UsageError

if TYPE_CHECKING:
    from regrow.data.lightning import CachedDataModule

__all__ = [
    "CacheResumeMMAPConfig",
    "CheckpointManager",
    "CheckpointlessAbortManager",
    "CheckpointlessCallback",
    "CheckpointlessCompatibleConnector",
    "CheckpointlessFinalizeCleanup",
    "CheckpointlessMegatronStrategy",
    "CudaHealthCheck",
    "HPAgentK8sAPIFactory",
    "HPCallWrapper",
    "HPWrapper",
    "MMAPDataModule",
    "PEFTCheckpointManager",
    "elastic_event_detected",
    "wait_rank",
]

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("regrow")

_INSTEAD = {
    "wait_rank": "returns at once: a standby has no rank to wait for, and asks session.rank when it is needed",
    "HPWrapper": "runs the function once; its steps go through faults where they are session.steps (docs/adopt.md)",
    "CudaHealthCheck": "does nothing: regrow run examines machines, by --health-check and what it has built in",
    "HPAgentK8sAPIFactory": "does nothing: regrow's own agent reports faults to workers",
    "CheckpointManager": "saves nothing: state comes from peers; on disk by regrow run --checkpoint-dir",
    "PEFTCheckpointManager": "saves nothing: state comes from peers; frozen weights are kept once, by themselves",
    "CheckpointlessAbortManager": "aborts nothing: regrow gives up a fault's collectives by itself",
    "CheckpointlessFinalizeCleanup": "cleans up nothing: regrow takes a fault's process groups down by itself",
    "MMAPDataModule": "is regrow's CachedDataModule: batches are made once a node, and mapped by its ranks",
    "CacheResumeMMAPConfig": "has no effect: its cache_dir is `regrow run --data-cache DIR` here, its lengths are "
    "--data-cache-bytes, and any step is reached without a state",
    "elastic_event_detected": "is always False: a job changes its size without saving and starting again; "
    "session.on_scale(hook) reports it",
}


@functools.cache
def _note(name: str) -> None:
    _log.warning("HyperPod's %s %s", name, _INSTEAD[name])


def _refuse(what: str, cure: str) -> NoReturn:
    raise UsageError(f"HyperPod's {what} has no counterpart in regrow", hint=cure)


# --- the wrapper ----------------------------------------------------------------------------------------------------


class _Inert:
    """Class that is constructed as theirs is, with any fields, and does nothing; its uses are refused with a reason.

    Args:
        fields: as theirs has them.
    """

    def __init__(self, **fields: object) -> None:
        _note(type(self).__name__)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)  # of Python itself: copy, pickle
        _refuse(f"{type(self).__name__}.{name}", _INSTEAD[type(self).__name__])


class CudaHealthCheck(_Inert):
    """Machines are examined by `regrow run`: docs/health.md."""


class HPAgentK8sAPIFactory(_Inert):
    """Workers are watched by regrow's agent."""


class CheckpointManager(_Inert):
    """State comes from peers; durable checkpoints are `regrow run --checkpoint-dir`: docs/state.md."""


class PEFTCheckpointManager(CheckpointManager):
    """The same for adapters; frozen weights are kept once whoever asks for it."""


class CheckpointlessFinalizeCleanup(_Inert):
    """Process groups are taken down by regrow."""


class CheckpointlessAbortManager(_Inert):
    """Collectives of a generation that is given up end by themselves."""

    @classmethod
    def get_default_checkpointless_abort(cls) -> "CheckpointlessAbortManager":
        """Value for `HPWrapper(abort=...)`."""
        return cls()


class HPCallWrapper:
    """Type of the argument `caller` of the wrapped function: a name for annotations, with no attributes."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(f"caller.{name}", "a step that must run again does so inside session.steps: docs/adopt.md")


class HPWrapper:
    """A decorator that runs the function, once, with a `caller` where it takes one.

    Nothing is run again by it: what goes through a fault is a loop of `session.steps` inside the function.

    Args:
        health_check: taken, not used; as are all others.
        hp_api_factory: how theirs hears of faults.
        abort_timeout: seconds.
        checkpoint_manager: what theirs would save by.
        abort: how theirs ends collectives.
        finalize: what theirs does before the function runs again. A callable of the script's own is refused.
        others: further fields of theirs are refused by name.

    Raises:
        UsageError: a field is not known here, or would have run code of the script's.
    """

    def __init__(
        self,
        *,
        health_check: object = None,
        hp_api_factory: object = None,
        abort_timeout: float | None = None,
        checkpoint_manager: object = None,
        abort: object = None,
        finalize: object = None,
        **others: object,
    ) -> None:
        if others:
            _refuse(f"HPWrapper({', '.join(sorted(others))}=...)", "leave it out")
        given = {"health_check": health_check, "checkpoint_manager": checkpoint_manager, "abort": abort}
        for name, value in (given | {"finalize": finalize}).items():
            if value is not None and not isinstance(value, _Inert):
                _refuse(
                    f"HPWrapper({name}=...) with code of your own",
                    "what must be right again after a fault is given to session.protect; "
                    "examinations to regrow run --health-check",
                )
        _note("HPWrapper")

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function, which is given a `caller` where it has such a parameter."""
        takes_caller = "caller" in inspect.signature(function).parameters

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if takes_caller:
                kwargs.setdefault("caller", HPCallWrapper())
            return function(*args, **kwargs)

        return run


def wait_rank() -> None:
    """Return at once."""
    _note("wait_rank")


# --- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheResumeMMAPConfig:
    """Fields of their cache. Only encryption is more than a matter of speed.

    Attributes:
        cache_dir: where theirs keeps batches; here `regrow run --data-cache DIR`.
        prefetch_length: batches ahead.
        val_prefetch_length: the same in validation.
        lookback_length: batches behind.
        checkpoint_frequency: how often theirs writes down where it is.
        model_parallel_group: who shares batches; here whoever has the same share of the data.
        enable_batch_encryption: refused.

    Raises:
        UsageError: batches should be encrypted.
    """

    cache_dir: str | None = None
    prefetch_length: int = 10
    val_prefetch_length: int = 10
    lookback_length: int = 10
    checkpoint_frequency: int | None = None
    model_parallel_group: object = None
    enable_batch_encryption: bool = False

    def __post_init__(self) -> None:
        if self.enable_batch_encryption:
            _refuse(
                "CacheResumeMMAPConfig(enable_batch_encryption=True)",
                "batches are in files that only this user may read: encrypt the file system, or give --data-cache off",
            )
        _note("CacheResumeMMAPConfig")


def MMAPDataModule(
    data_module: Any, mmap_config: CacheResumeMMAPConfig | None = None, **others: object
) -> "CachedDataModule":
    """The data module with loaders out of regrow's cache.

    Args:
        data_module: a `LightningDataModule` of the script's own.
        mmap_config: taken.
        others: refused by name.

    Raises:
        UsageError: `data_module` has no loaders, or a field is not known here.
    """
    if others:
        _refuse(f"MMAPDataModule({', '.join(sorted(others))}=...)", "leave it out")
    from regrow.data.lightning import CachedDataModule

    _note("MMAPDataModule")
    return CachedDataModule(data_module)


# --- elastic --------------------------------------------------------------------------------------------------------


def elastic_event_detected(sig: object = None) -> bool:
    """Tell whether the script must save and end because the world changes: never, here.

    Args:
        sig: taken, as theirs is.
    """
    _note("elastic_event_detected")
    return False


# --- NeMo -----------------------------------------------------------------------------------------------------------


class _Absent:
    """Class that cannot be made."""

    _cure = "write the loop as session.steps over an FSDP2 or HSDP model (docs/adopt.md), or train by a recipe"

    def __init__(self, *args: object, **fields: object) -> None:
        _refuse(type(self).__name__, self._cure)


class CheckpointlessMegatronStrategy(_Absent):
    """NeMo's strategy with the optimizer's state twice; raises `UsageError`."""

    _cure = (
        "NeMo is not run by regrow: FSDP2's replicas (HSDP) hold the state twice, or `regrow run --buddy-every K` "
        "copies it; regrow recipes from-hyperpod converts their recipe"
    )


class CheckpointlessCallback(_Absent):
    """NeMo's callback; raises `UsageError`."""

    _cure = "leave it out: regrow_recipes.adapters.lightning, or session.steps, sees to what it does"


class CheckpointlessCompatibleConnector(_Absent):
    """NeMo's way to checkpoints; raises `UsageError`."""

    _cure = "leave it out: state comes from peers, and from disk by regrow run --checkpoint-dir DIR --resume"
