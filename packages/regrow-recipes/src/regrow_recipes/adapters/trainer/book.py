"""State of a `Trainer` from one step to the next, as protected state: equal on all ranks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regrow_recipes.adapters import private_names
from regrow_recipes.adapters.trainer.rollouts import Rollouts

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_FIELDS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
_OWN_TIME = ("_runtime", "_per_second", "_preparation_time", "step_time")
"""Suffixes of figures that each rank measures itself."""

Entry = dict[str, Any]
"""A line of the log history."""


@dataclass
class Sums:
    """Sums over the steps since the last log line, and figures of the last step."""

    loss: float = 0.0
    """The sum of the steps' mean losses since the last line."""
    all_losses: float = 0.0
    """The sum of the steps' mean losses before the last line."""
    logged_at: int = 0
    grad_norm: float | None = None
    learning_rate: float | None = None
    flos: int = 0
    """FLOPs since the last line, on all ranks."""


class Book:
    """A trainer's progress with `state_dict`: its state, its control, its callbacks' state and its sums.

    It excludes the main process's identity, which each rank knows itself, and times from a clock.

    Args:
        trainer: the trainer.
        stateful: the class of callbacks whose state is kept.
        rollouts: of a trainer that generates.
    """

    def __init__(self, trainer: Any, *, stateful: Any, rollouts: Rollouts | None = None) -> None:
        self._trainer, self._stateful, self._rollouts = trainer, stateful, rollouts
        self.sums = Sums()
        self._text: tuple[int, int, str] | None = None

    def stepped(self, loss: float | None, *, epoch: float, grad_norm: float | None, rate: float, flos: int) -> None:
        """Record an update.

        Args:
            loss: the mean over the global batch; None in a rehearsal, which is not counted.
            epoch: position at its end, in epochs.
            grad_norm: before clipping.
            rate: its learning rate.
            flos: of all ranks.
        """
        state, sums = self._trainer.state, self.sums
        finite = loss is not None and abs(loss) < float("inf")
        if loss is not None:
            keeps = finite or not self._trainer.args.logging_nan_inf_filter
            sums.loss += loss if keeps else sums.loss / (1 + state.global_step - sums.logged_at)
        sums.grad_norm, sums.learning_rate = grad_norm, rate
        sums.flos += flos
        state.global_step += 1
        state.epoch = epoch

    def take_loss(self) -> float:
        """The mean loss of the steps since the last line; starts a new sum."""
        sums, step = self.sums, int(self._trainer.state.global_step)
        mean = sums.loss / (step - sums.logged_at)
        sums.all_losses += sums.loss
        sums.loss, sums.logged_at = 0.0, step
        return mean

    # --- as protected state ---

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the log history as one text, since it only grows and is copied at each step."""
        trainer = self._trainer
        return {
            "sums": dict(vars(self.sums)),
            "state": {name: getattr(trainer.state, name) for name in _FIELDS},
            "control": {name: getattr(trainer.control, name) for name in _FLAGS},
            "callbacks": [
                dict(callback.state()["attributes"]) if isinstance(callback, self._stateful) else {}
                for callback in trainer.callback_handler.callbacks
            ],
            "gathered": private_names.gathered_numbers(trainer),
            "history": self._history(),
            "rollouts": {} if self._rollouts is None else self._rollouts.state_dict(),
        }

    def load_state_dict(self, received: Mapping[str, Any]) -> None:
        """Restore the state of another rank, or an earlier one of this rank."""
        trainer = self._trainer
        self.sums = Sums(**received["sums"])
        for name, value in received["state"].items():
            setattr(trainer.state, name, value)
        for name, value in received["control"].items():
            setattr(trainer.control, name, value)
        for callback, attributes in zip(trainer.callback_handler.callbacks, received["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)
        private_names.put_gathered_numbers(trainer, received["gathered"])
        if self._rollouts is not None:
            self._rollouts.load_state_dict(received["rollouts"])
        self._put_history(received["history"])

    def _history(self) -> str:
        lines = self._trainer.state.log_history
        if self._text is None or self._text[:2] != (id(lines), len(lines)):
            self._text = (id(lines), len(lines), json.dumps([shared(line) for line in lines]))
        return self._text[2]

    def _put_history(self, text: str) -> None:
        known = self._trainer.state.log_history
        self._trainer.state.log_history = merged(known, json.loads(text))
        self._text = None


def shared(line: Entry) -> Entry:
    """The entries of a line that are equal on all ranks."""
    return {name: value for name, value in line.items() if not name.endswith(_OWN_TIME)}


def merged(known: list[Entry], received: list[Entry]) -> list[Entry]:
    """The received lines, with this rank's own times in lines that it also has."""
    mine = [*known, *[None] * len(received)]
    return [own if own is not None and shared(own) == line else line for own, line in zip(mine, received, strict=False)]
