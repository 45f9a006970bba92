"""HyperPod's Python names: a script that imports them from here runs under `regrow run`.

    from regrow_recipes.compat.hyperpod import CacheResumeMMAPConfig, HPWrapper, MMAPDataModule, wait_rank

The script runs as with its own loop: after a fault all workers start again, until the loop uses `session.steps`. Each
name logs one line that names its replacement. See docs/hyperpod.md.
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
    "HPWrapper": "runs the function once; its steps survive faults if they come from session.steps (docs/adopt.md)",
    "CudaHealthCheck": "does nothing: regrow run checks machines, with --health-check and its built-in checks",
    "HPAgentK8sAPIFactory": "does nothing: regrow's own agent reports faults to workers",
    "CheckpointManager": "saves nothing: state comes from peers; on disk by regrow run --checkpoint-dir",
    "PEFTCheckpointManager": "saves nothing: state comes from peers; frozen weights are kept once, separately",
    "CheckpointlessAbortManager": "aborts nothing: regrow itself aborts the collectives of a fault",
    "CheckpointlessFinalizeCleanup": "cleans up nothing: regrow itself destroys the process groups of a fault",
    "MMAPDataModule": "is regrow's CachedDataModule: batches are made once per node, and mapped by its ranks",
    "CacheResumeMMAPConfig": "has no effect: its cache_dir is `regrow run --data-cache DIR` here, its lengths are "
    "--data-cache-bytes, and a resume at any step needs no state of the loader",
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
    """A class that accepts the constructor's fields and does nothing; its other uses are refused with a reason.

    Args:
        fields: those of HyperPod's class.
    """

    def __init__(self, **fields: object) -> None:
        _note(type(self).__name__)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)  # looked up by Python itself: copy, pickle
        _refuse(f"{type(self).__name__}.{name}", _INSTEAD[type(self).__name__])


class CudaHealthCheck(_Inert):
    """Unused: `regrow run` checks the machines: docs/health.md."""


class HPAgentK8sAPIFactory(_Inert):
    """Unused: regrow's agent watches the workers."""


class CheckpointManager(_Inert):
    """Unused: state comes from peers; durable checkpoints are `regrow run --checkpoint-dir`: docs/state.md."""


class PEFTCheckpointManager(CheckpointManager):
    """Unused, as `CheckpointManager`; frozen weights are kept once without it."""


class CheckpointlessFinalizeCleanup(_Inert):
    """Unused: regrow takes down process groups."""


class CheckpointlessAbortManager(_Inert):
    """Unused: collectives of an abandoned generation end by themselves."""

    @classmethod
    def get_default_checkpointless_abort(cls) -> "CheckpointlessAbortManager":
        """Value for `HPWrapper(abort=...)`."""
        return cls()


class HPCallWrapper:
    """Type of the wrapped function's argument `caller`: a name for annotations, without attributes."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(f"caller.{name}", "a step that must run again does so inside session.steps: docs/adopt.md")


class HPWrapper:
    """A decorator that runs the function once, and passes a `caller` if the function takes one.

    It does not run the function again: a loop of `session.steps` inside the function survives faults.

    Args:
        health_check: accepted and unused, as are the following.
        hp_api_factory: HyperPod's source of fault reports.
        abort_timeout: seconds.
        checkpoint_manager: HyperPod's saving of checkpoints.
        abort: HyperPod's way to end collectives.
        finalize: run by HyperPod before the function runs again. A callable of the script is refused.
        others: other fields of HyperPod are refused by name.

    Raises:
        UsageError: a field is not known here, or would have run the script's code.
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
                    "give state that must survive a fault to session.protect, and health checks to regrow run "
                    "--health-check",
                )
        _note("HPWrapper")

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Wrap the function, and pass a `caller` if it has such a parameter."""
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
    """Fields of HyperPod's cache. All but encryption only affect speed.

    Attributes:
        cache_dir: folder of HyperPod's cache; here `regrow run --data-cache DIR`.
        prefetch_length: batches read ahead.
        val_prefetch_length: the same for validation.
        lookback_length: past batches that are kept.
        checkpoint_frequency: interval at which HyperPod saves its position.
        model_parallel_group: ranks that share batches; here the ranks with the same share of the data.
        enable_batch_encryption: refused.

    Raises:
        UsageError: encryption of batches is requested.
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
    """The data module, with loaders that use regrow's cache.

    Args:
        data_module: a `LightningDataModule` of the script.
        mmap_config: accepted.
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
    """True if the script must save and end because the world changes: always False here.

    Args:
        sig: accepted and unused.
    """
    _note("elastic_event_detected")
    return False


# --- NeMo -----------------------------------------------------------------------------------------------------------


class _Absent:
    """A class that cannot be constructed."""

    _cure = "write the loop as session.steps over an FSDP2 or HSDP model (docs/adopt.md), or train with a recipe"

    def __init__(self, *args: object, **fields: object) -> None:
        _refuse(type(self).__name__, self._cure)


class CheckpointlessMegatronStrategy(_Absent):
    """NeMo's strategy with a second copy of the optimizer's state; raises `UsageError`."""

    _cure = (
        "regrow does not run NeMo: replicas of FSDP2 (HSDP) hold the state twice, or `regrow run --buddy-every K` "
        "copies it; regrow recipes from-hyperpod converts HyperPod's recipe"
    )


class CheckpointlessCallback(_Absent):
    """NeMo's callback; raises `UsageError`."""

    _cure = "leave it out: regrow_recipes.adapters.lightning, or session.steps, does its work"


class CheckpointlessCompatibleConnector(_Absent):
    """NeMo's checkpoint connector; raises `UsageError`."""

    _cure = "leave it out: state comes from peers, and from disk by regrow run --checkpoint-dir DIR --resume"
