"""regrow: training that runs straight through failures.

`init` joins the job (or trains alone), `Session.protect` names what must survive, `Session.steps` runs the steps,
`restartable` marks functions that call collectives between steps. `DataLoader` and `cached` make loaders whose batches
are made once per node.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.core.errors import RegrowError
    from regrow.data.dataloader import DataLoader, cached
    from regrow.step.policy import Policy
    from regrow.train.hooks.scale_events import ScaleEvent
    from regrow.train.init import init
    from regrow.train.restartable import restartable
    from regrow.train.session import Session
    from regrow.train.step import Step

__version__ = "0.1.0"
__all__ = [
    "DataLoader",
    "Policy",
    "RegrowError",
    "ScaleEvent",
    "Session",
    "Step",
    "__version__",
    "cached",
    "init",
    "restartable",
]

_HOMES = {
    "DataLoader": "regrow.data.dataloader",
    "cached": "regrow.data.dataloader",
    "init": "regrow.train.init",
    "Session": "regrow.train.session",
    "Step": "regrow.train.step",
    "ScaleEvent": "regrow.train.hooks.scale_events",
    "Policy": "regrow.step.policy",
    "RegrowError": "regrow.core.errors",
    "restartable": "regrow.train.restartable",
}


def __getattr__(name: str) -> Any:
    # Loaded lazily: the coordinator, the agent and the command line import this package without torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'regrow' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
