"""Private names of TRL's generating trainers that the adapter uses; `private_names` has the versions of TRL.

GRPO and RLOO: `_step`, `_buffered_inputs`, `_metrics`, `_logs`, `_pending_extra_logs`, `_pending_metrics`,
`_current_train_step_time`; GRPO: `_last_world_entropy`, `_entropy_window_stats`. All: `SyncRefModelCallback`'s
`sync_target_model`.
"""

import inspect
import logging
from collections.abc import Iterable
from typing import Any

import torch

from regrow.core.errors import NotPlain, TooLarge, UsageError
from regrow.train.values.plain import ATOMS, PLAIN, PlainCopy, keep, put_back, same
from regrow_recipes.adapters.fingerprints import fingerprint

GENERATING = frozenset({"GRPOTrainer", "RLOOTrainer"})
_LISTS = ("prompt", "completion", "advantages")
_BY_NAME = ("rewards", "extra")
_COUNTERS = ("entropy_coef", "_last_world_entropy")
_log = logging.getLogger("regrow")

Completions = list[dict[str, Any]]
"""Inputs of the forward passes that one generation serves."""


def generates(trainer: Any) -> bool:
    """True for trainers that generate in their step, and keep the completions for several forward passes."""
    return any(kind.__name__ in GENERATING and kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)


def refuse_engines(args: Any) -> None:
    """Refuse engines whose generation a step could not repeat. Raises `UsageError`.

    Args:
        args: the configuration of any trainer.
    """
    if getattr(args, "use_vllm", False):
        raise UsageError(
            f"vLLM (vllm_mode={args.vllm_mode!r}) does not work under regrow: a step that runs again after a fault "
            f"would get different completions, and a replacement rank would have no engine",
            hint="set use_vllm=False: the trainer then generates with the model that it trains",
        )
    if getattr(args, "use_transformers_continuous_batching", False):
        raise UsageError(
            "use_transformers_continuous_batching does not work under regrow: it samples in a separate thread",
            hint="set it to False",
        )


def refuse_rollouts(trainer: Any) -> None:
    """Refuse a generating trainer's objects outside the protected state. Raises `UsageError`."""
    refused = {
        "rollout_func": (getattr(trainer, "rollout_func", None), "the trainer's own generation"),
        "environment_factory": (
            getattr(trainer, "environment_factories", None),
            "a loop of your own, in which session.protect(envs=...) carries environments (docs/adopt.md)",
        ),
    }
    for name, (asked, instead) in refused.items():
        if asked is not None:
            raise UsageError(f"{type(trainer).__name__} under regrow cannot have {name}", hint=f"use {instead}")


# --- completions ----------------------------------------------------------------------------------------------------


def completions(trainer: Any) -> Completions | None:
    """Completions of the last generation; None before the first."""
    found: Completions | None = trainer._buffered_inputs
    return found


def put_completions(trainer: Any, found: Completions | None) -> None:
    """Set the completions with which the trainer continues."""
    trainer._buffered_inputs = found


def sum_times(trainer: Any, count: int) -> None:
    """Sum the times of an update's `count` forward passes, as TRL reports them."""
    times = trainer._metrics["train"]["step_time"]
    times[-count:] = [sum(times[-count:])]


def progress(trainer: Any) -> dict[str, Any]:
    """Progress of the generations, equal on all ranks."""
    counters = {name: getattr(trainer, name) for name in _COUNTERS if hasattr(trainer, name)}
    return {"step": trainer._step, "counters": counters}


def put_progress(trainer: Any, received: dict[str, Any]) -> None:
    """Set the values that `progress` returned; clears what an abandoned body has left."""
    trainer._step = received["step"]
    for name, value in received["counters"].items():
        setattr(trainer, name, value)
    if hasattr(trainer, "_entropy_window_stats"):
        trainer._entropy_window_stats = None
    trainer._current_train_step_time = 0.0
    trainer._pending_extra_logs.clear()
    trainer._pending_metrics.clear()


def marks(trainer: Any) -> list[object]:
    """Objects that are replaced whenever completions are logged."""
    return [*trainer._logs["completion"], *trainer._logs["advantages"]]


def logged(trainer: Any) -> dict[str, Any]:
    """Completions of all ranks since their last table, as lists."""
    logs = trainer._logs
    named = {part: {name: list(values) for name, values in logs[part].items()} for part in _BY_NAME}
    return {part: list(logs[part]) for part in _LISTS} | named


def put_logged(trainer: Any, received: dict[str, Any]) -> None:
    """Set the completions that `logged` returned."""
    logs = trainer._logs
    for part in _LISTS:
        logs[part].clear()
        logs[part].extend(received[part])
    for part in _BY_NAME:
        logs[part].clear()
        for name, values in received[part].items():
            logs[part][name].extend(values)


# --- rewards ---------------------------------------------------------------------------------------------------------


class Judge:
    """State of a reward that is not a model: its `state_dict`, or else its changed numbers and texts.

    Attributes that never change may be a rank's own, such as a server's address. All other attributes stay on their
    rank: if all of them are plain, lists, dictionaries and sets are restored when a step runs again. `enter` warns
    that they are not sent to other ranks, and of tensors and objects that are not restored.
    """

    def __init__(self, reward: Any) -> None:
        self._reward, self._says = reward, hasattr(reward, "state_dict")
        self._first, self._built = self._attributes(), self._containers()
        self._entered: dict[tuple[str, int], dict[str, object]] = {}
        self._stood: set[tuple[str, int]] = set()
        """Entries of `_entered` that were not made by a rehearsal."""
        self._reported = False

    @classmethod
    def all_of(cls, trainer: Any) -> "list[Judge]":
        """The judges of a trainer's rewards."""
        given = (each.__self__ if inspect.ismethod(each) else each for each in trainer.reward_funcs)
        return [cls(each) for each in given if hasattr(each, "__dict__") and not isinstance(each, torch.nn.Module)]

    def state(self) -> dict[str, Any]:
        """The present state."""
        now = dict(self._reward.state_dict()) if self._says else self._attributes()
        return (
            now if self._says else {name: value for name, value in now.items() if self._first.get(name, ...) != value}
        )

    def put(self, received: dict[str, Any]) -> None:
        """Set the values that `state` returned."""
        if self._says:
            self._reward.load_state_dict(received)
            return
        for name in self._attributes().keys() - self._first.keys():
            delattr(self._reward, name)
        there = self._containers().keys()
        vars(self._reward).update({name: value for name, value in self._first.items() if name not in there} | received)

    def left(self) -> list[str]:
        """Names of changed containers, which are not sent to other processes."""
        now = {} if self._says else self._containers()
        changed = (name for name, kept in now.items() if name not in self._built or not same(kept, self._built[name]))
        return sorted(changed)

    def enter(self, place: str, number: int, *, left: Iterable[str] = (), rehearsal: bool = False) -> str:
        """Enter a step, or the time after it: save the containers, or restore them if it was entered before.

        `left`: containers missing from the state that this process has just received. Returns a sentence on their loss
        after a fault; empty: nothing is lost.
        """
        if self._says:
            return ""
        mine, now, key = vars(self._reward), self._containers(), (place, number)
        latest = list(self._entered)[-1:]
        kept = self._entered.get(key, self._entered[latest[0]] if latest else now)
        changed = {name for name in now if name not in kept or not same(now[name], kept[name])}
        follows = all(type(value) in PLAIN for value in mine.values()) and not any(type(now[n]) is str for n in changed)
        if changed and not self._reported:
            self._reported = True
            _tell_containers(self._name, changed, follows=follows)
        lost = "" if rehearsal else self._lost(left, () if follows else changed, key)
        self._stood = {each for each in self._stood if each in self._entered} | (set() if rehearsal else {key})
        if key not in self._entered:
            self._entered = {each: self._entered[each] for each in latest} | {key: now}
            return lost
        while next(reversed(self._entered)) != key:
            self._entered.popitem()
        if not follows:  # restoring only some attributes could make them inconsistent
            return lost
        for name in now.keys() - kept.keys():
            del mine[name]
            mine.update({name: self._first[name]} if name in self._first else {})
        mine.update({name: put_back(copy) for name, copy in kept.items() if isinstance(copy, PlainCopy)})
        return lost

    def _lost(self, left: Iterable[str], stays: Iterable[str], key: tuple[str, int]) -> str:
        names = ", ".join(sorted(stays if key in self._stood else left))
        return (
            names and f"the reward {self._name} continues after a fault with a different {names}: give it a state_dict"
        )

    @property
    def _name(self) -> str:
        return str(getattr(self._reward, "__name__", type(self._reward).__name__))

    def _containers(self) -> dict[str, object]:
        """A copy of each container attribute; a digest of large ones and of values that are not plain."""
        found: dict[str, object] = {}
        for name, value in list(vars(self._reward).items()):
            if type(value) not in ATOMS:
                try:
                    found[name] = keep(value)
                except (NotPlain, TooLarge):
                    found |= {name: digest} if (digest := fingerprint(value)) else {}
        return found

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._reward).items() if type(value) in ATOMS}


def _tell_containers(reward: str, names: set[str], *, follows: bool) -> None:
    _log.warning(
        "the reward %s changes %s; values other than numbers and strings are %s: give it a state_dict to carry them",
        reward,
        ", ".join(sorted(names)),
        "restored when a step runs again, but not sent to a replacement rank"
        if follows
        else "neither restored when a step runs again nor sent to a replacement rank, because some attribute of the "
        "reward holds more than 1,000 values or one that is not plain",
    )


# --- reference models that follow -----------------------------------------------------------------------------------


def following(trainer: Any) -> Any:
    """The callback that updates a reference model from the trained one; None: there is none."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "SyncRefModelCallback" and callback.ref_model is not None:
            callback.sync_target_model = _follow
            return callback
    return None


def _follow(model: torch.nn.Module, reference: torch.nn.Module, alpha: float) -> None:
    """Update the reference as TRL does, but without `.data`, whose writes cannot be detected."""
    with torch.no_grad():
        for followed, parameter in zip(reference.parameters(), model.parameters(), strict=True):
            followed.mul_(1.0 - alpha).add_(parameter, alpha=alpha)
