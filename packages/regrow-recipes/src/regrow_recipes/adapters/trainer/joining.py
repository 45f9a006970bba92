"""Session of a script that never calls `regrow.init`."""

from typing import Any

import torch

from regrow.core.config import WorkerEnv
from regrow.core.errors import UsageError
from regrow.train.init import current_session, init
from regrow.train.session import Session


def joined(seed: int, *, changes_classes: bool = False) -> Session:
    """This process's session; it is made if there is none.

    Args:
        seed: of a new session.
        changes_classes: true if the caller changes the classes of a framework's objects.

    Raises:
        UsageError: `torch.distributed` is already initialized, or classes may not be changed.
    """
    env = WorkerEnv.read() if changes_classes else None
    if env is not None and not env.spec.rewrites:
        raise UsageError(
            "this adapter changes the classes of its framework's objects, which --no-script-rewrite forbids",
            hint="leave --no-script-rewrite out, or write the loop with session.steps",
        )
    session = current_session()
    if session is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UsageError(
            "torch.distributed was initialized before regrow could do so; the constructor of TrainingArguments "
            "initializes it",
            hint="import TrainingArguments (or SFTConfig, DPOConfig) from regrow_recipes.adapters too, or call "
            "regrow.init() first",
        )
    return session or init(seed=seed)


def joining(arguments: Any) -> Any:
    """A subclass of a `TrainingArguments` class that joins the job before accelerate initializes the process group.

    Args:
        arguments: the framework's class.
    """

    def join_first(self: Any) -> None:
        joined(self.seed)
        arguments.__post_init__(self)

    def reduce(self: Any, _: Any) -> Any:
        # A checkpoint's training_args.bin must be readable without regrow.
        return object.__new__, (arguments,), vars(self)

    made = type(arguments.__name__, (arguments,), {"__post_init__": join_first, "__reduce_ex__": reduce})
    made.__doc__ = arguments.__doc__
    return made
