"""TRL's trainers under regrow: import them and their configurations from here instead of from `trl`.

    from regrow_recipes.adapters.trl import SFTConfig, SFTTrainer

`recoverable` of `regrow_recipes.adapters.transformers` does the same for a subclass. The world size is fixed, since
these trainers gather figures of all ranks in each micro-batch. See docs/adopt.md.
"""

from typing import TYPE_CHECKING, Any

from regrow_recipes.adapters.private_names import framework
from regrow_recipes.adapters.trainer.joining import joining
from regrow_recipes.adapters.trainer.loop import recoverable

if TYPE_CHECKING:
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "SFTConfig",
    "SFTTrainer",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for needed in ("accelerate", "transformers"):
        framework(needed, extra="trl")
    theirs = getattr(framework("trl", extra="trl"), name)
    made = globals()[name] = recoverable(theirs) if name.endswith("Trainer") else joining(theirs)
    return made
