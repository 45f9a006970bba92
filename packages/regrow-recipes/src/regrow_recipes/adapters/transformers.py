"""Hugging Face's trainers under regrow: import them from here instead of from `transformers`.

    from regrow_recipes.adapters.transformers import Trainer, TrainingArguments

Nothing else changes in the script; `regrow run` starts it. `recoverable(MyTrainer)` does the same for a subclass, and
`class MyTrainer(Recoverable, transformers.Trainer)` is the same by hand. See docs/adopt.md.
"""

from typing import TYPE_CHECKING, Any

from regrow_recipes.adapters.private_names import framework
from regrow_recipes.adapters.trainer.joining import joining
from regrow_recipes.adapters.trainer.loop import Recoverable, recoverable

if TYPE_CHECKING:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

__all__ = [
    "Recoverable",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "recoverable",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    framework("accelerate", extra="trainer")
    theirs = getattr(framework("transformers", extra="trainer"), name)
    made = globals()[name] = recoverable(theirs) if name.endswith("Trainer") else joining(theirs)
    return made
