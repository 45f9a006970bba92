"""State of a Lightning trainer from one step to the next, as protected state: equal on all ranks."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from regrow.core.errors import UsageError
from regrow_recipes.adapters import private_names
from regrow_recipes.adapters.fitting.callback_calls import stateful


@dataclass
class Logged:
    """A value that `training_step` logs: in the last step, and over this epoch.

    Attributes:
        last: the mean over the global batch.
        total: the weighted sum over the epoch's steps.
        weight: samples of these steps.
    """

    last: float = 0.0
    total: float = 0.0
    weight: float = 0.0


class FitBook:
    """Progress of a fit, with a `state_dict`: its loops, its metrics and its callbacks.

    Args:
        trainer: the Lightning trainer.
        base: the class of its callbacks.
    """

    def __init__(self, trainer: Any, base: type) -> None:
        self._trainer = trainer
        self._callbacks = {callback.state_key: callback for callback in trainer.callbacks if stateful(callback, base)}
        self.logged: dict[str, Logged] = {}

    def stepped(self, numbers: Mapping[str, float], weight: float) -> None:
        """Record an update, and the values logged in it."""
        for key, value in numbers.items():
            kept = self.logged.setdefault(key, Logged())
            kept.last = value
            kept.total += value * weight
            kept.weight += weight

    def publish(self) -> None:
        """Put these values into Lightning's collection, in place of this rank's own."""
        private_names.forget_logged(self._trainer)
        for key, kept in self.logged.items():
            private_names.put_logged(self._trainer, key, last=kept.last, total=kept.total, weight=kept.weight)

    def epoch_ended(self) -> None:
        """Start new sums."""
        self.logged = {}

    # --- as protected state ---

    def state_dict(self) -> dict[str, Any]:
        """The progress as one string, since its keys change from step to step, and metrics may appear late."""
        recorded = {
            "numbers": private_names.fit_numbers(self._trainer),
            "should_stop": self._trainer.should_stop,
            "logged": {key: asdict(kept) for key, kept in self.logged.items()},
            "callbacks": {
                key: {"state": each.state_dict(), "saved": private_names.saved_at(each)}
                for key, each in self._callbacks.items()
            },
        }
        return {"text": json.dumps(recorded, default=_encoded, sort_keys=True)}

    def load_state_dict(self, received: Mapping[str, Any]) -> None:
        """Restore the state of another rank, or an earlier one of this rank."""
        numbers = json.loads(received["text"], object_hook=_decoded)
        private_names.put_fit_numbers(self._trainer, numbers["numbers"])
        self._trainer.should_stop = numbers["should_stop"]
        self.logged = {key: Logged(**kept) for key, kept in numbers["logged"].items()}
        for key, kept in numbers["callbacks"].items():
            callback = self._callbacks[key]
            if "dirpath" in kept["state"]:
                callback.dirpath = kept["state"]["dirpath"]  # else a ModelCheckpoint restores nothing
            callback.load_state_dict(kept["state"])
            vars(callback).update(kept["saved"])


def _encoded(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {"tensor": value.detach().cpu().double().tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise UsageError(
        f"a callback's state holds a {type(value).__name__}, which cannot be sent to other ranks",
        hint="let its state_dict hold only numbers, strings, lists, dicts and tensors",
    )


def _decoded(value: dict[str, Any]) -> Any:
    if value.keys() == {"tensor", "dtype"}:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return value
