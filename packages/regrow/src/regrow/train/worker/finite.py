"""`--check-for-nan`: before an update all ranks agree that the step's numbers are finite, or find the rank at fault.

A number that is not finite spreads to all ranks by a sum, and by the next forward. So each rank notes the number of
collectives that it had called in the body when its first such number appeared: in a loss that it logged, or in the
input of a sum. Gradients are checked when the optimizer is about to use them; if a gradient scaler skips the update
because they overflowed, that is no fault.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from regrow.comm import reductions
from regrow.comm.observers import CallObserver, CountedGroup
from regrow.core.errors import NotFinite, StepGivenUp, SumNotFinite
from regrow.core.ids import StepNo
from regrow.devices.accelerators import on_accelerator
from regrow.devices.stream_points import LateBytes

WATCHED = ("loss", "grad_norm", "gradnorm", "gradient_norm")
"""Logged numbers whose names contain one of these are checked."""
_NONE = 2**62
_GIVEN = {"allreduce": 0, "allreduce_coalesced": 0, "reduce": 0, "reduce_scatter": 1, "_reduce_scatter_base": 1}
_GIVEN |= dict.fromkeys(("reduce_scatter_single", "reduce_scatter_single_coalesced"), 1)
_GIVEN |= {"reduce_scatter_tensor_coalesced": 1}
"""Index of the argument that is this rank's input of a sum."""
_SUMS = {reductions.number(kind) for kind in (torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG)}


class Seen(NamedTuple):
    """Findings of one rank in a step, or their minimum over all ranks. `2**62`: no such number.

    `loss`, `given`: `collectives * world + rank` at the first number that is not finite; `gradients`: the rank, if its
    gradients before the update are not finite; `all_of_them`: 1 if those of all ranks are not finite.
    """

    loss: int = _NONE
    given: int = _NONE
    gradients: int = _NONE
    all_of_them: int = 0


class Blame(NamedTuple):
    """Rank whose number was the first that was not finite."""

    rank: int
    how: str
    """`own`: the rank had the number before others could have it; `memory`: its gradients differ from a sum that is the
    same on all other ranks; `sum`: all ranks have it, the origin is not known, and this rank reports it for all."""


def judge(least: Seen, *, world: int, sharded: bool) -> Blame | None:
    """Find the rank with the first number that is not finite; None if all are. The result is the same on all ranks.

    Inputs of a sum count only if they affected a loss or the gradients used: a scaler's overflow does not.
    """
    if least.loss == _NONE and least.gradients == _NONE:
        return None
    first = min(least.loss, least.given)
    if first != _NONE:
        return Blame(first % world, "own")
    # Replicas have the same sums: if one differs, its own memory is at fault.
    own = world == 1 or not (least.all_of_them or sharded)
    return Blame(least.gradients, "memory" if own else "sum")


class _Answers:
    """Results of many checks; a device's are copied together, in the device's order, and read later."""

    def __init__(self) -> None:
        self._asked: list[torch.Tensor | bool] = []
        self._begun: list[tuple[list[int], LateBytes]] = []
        self._next = 0

    def ask(self, flag: torch.Tensor | bool) -> int:
        """Add a flag, which has one element if it is a tensor; returns the index of its answer."""
        self._asked.append(flag)
        return len(self._asked) - 1

    def begin(self) -> None:
        """Let the devices copy the flags added since the last call."""
        places: dict[torch.device, list[int]] = {}
        for place in range(self._next, len(self._asked)):
            if isinstance(flag := self._asked[place], torch.Tensor):
                places.setdefault(flag.device, []).append(place)
        self._next = len(self._asked)
        for which in places.values():
            flags = [each.reshape(()) for place in which if isinstance(each := self._asked[place], torch.Tensor)]
            self._begun.append((which, LateBytes([torch.stack(flags).view(torch.uint8)])))

    def read(self) -> list[bool]:
        """Wait for all answers so far. Raises a device's error if it has failed."""
        self.begin()
        found = [each is True for each in self._asked]
        for which, data in self._begun:
            for place, answer in zip(which, data.read()[0], strict=True):
                found[place] = bool(answer)
        return found


class NumberCheck(CallObserver):
    """Checks the numbers of one worker's bodies.

    Args:
        least: returns the element-wise minimum of all ranks' tensors. Raises what collectives raise.
    """

    def __init__(self, least: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._least = least
        self._optimizers: list[torch.optim.Optimizer] = []
        self._within = False
        self._calls = 0
        self._clear()

    def _clear(self) -> None:
        self._answers = _Answers()
        self._given: list[tuple[int, str, int]] = []
        self._logged: dict[str, tuple[int, torch.Tensor | float]] = {}
        self._asked: dict[str, tuple[torch.Tensor | float, int]] = {}
        """Logged numbers whose check has begun, with the index of the answer."""
        self._gradients: list[int] = []

    def watch(self, objects: Iterable[object]) -> None:
        """Watch the optimizers among these protected objects."""
        self._optimizers += [each for each in objects if isinstance(each, torch.optim.Optimizer)]

    def begin(self) -> None:
        """Begin to check a body."""
        self._within, self._calls = True, 0
        self._clear()

    def logged(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """Note those of the logged numbers that are to be checked."""
        if not self._within:
            return
        for name, value in numbers.items():
            known = self._logged.get(name)
            if any(word in name.lower() for word in WATCHED) and (known is None or known[1] is not value):
                self._logged[name] = (self._calls, value)

    def starts(self, group: CountedGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the input of a collective that starts, if it is a sum: see `CallObserver.starts`."""
        if not self._within:
            return
        at, self._calls = self._calls, self._calls + 1
        place = _GIVEN.get(name)
        if place is None or not _sums(args, options):
            return
        for flag in map(_wrong, _parts(args[place])):
            if flag is not False:
                self._given.append((at, name, self._answers.ask(flag)))

    def look(self) -> None:
        """Begin the check of gradients that protected optimizers are about to use, after all work of the body."""
        if self._within and not self._gradients:
            self._gradients = [self._answers.ask(_wrong(part)) for part in self._used()]
            self._ask_logged()
            self._answers.begin()

    def _ask_logged(self) -> None:
        for name, (_, value) in self._logged.items():
            if name not in self._asked or self._asked[name][0] is not value:
                self._asked[name] = value, self._answers.ask(_not_finite(value))

    def _used(self) -> Iterable[torch.Tensor]:
        for optimizer in self._optimizers:
            if getattr(optimizer, "grad_scale", None) is not None:
                continue  # a fused optimizer skips the update itself if its scaler has found an overflow
            for group in optimizer.param_groups:
                yield from (each for p in group["params"] if p.grad is not None for each in _parts(p.grad))

    def agree(self, step: StepNo, *, rank: int, world: int, sharded: bool) -> None:
        """Agree with all ranks at the update of the step; after this, or after an error, the body is not checked.

        Raises `NotFinite` on the rank that had the first such number, `StepGivenUp` on the others, and what
        collectives raise.
        """
        self._within = False
        self._ask_logged()
        wrong = self._answers.read()
        bad = [(at, name, value) for name, (at, value) in self._logged.items() if wrong[self._asked[name][1]]]
        loss = min(((at, f"{name} is {float(value)}") for at, name, value in bad), default=None)
        given = min(((at, name) for at, name, place in self._given if wrong[place]), default=None)
        gradients = any(wrong[place] for place in self._gradients)
        mine = Seen(
            _NONE if loss is None else loss[0] * world + rank,
            _NONE if given is None else given[0] * world + rank,
            rank if gradients else _NONE,
            int(gradients),
        )
        least = mine
        if world > 1:
            least = Seen(*(int(each) for each in self._least(torch.tensor(mine, dtype=torch.int64)).tolist()))
        blame = judge(least, world=world, sharded=sharded)
        if blame is None:
            return
        if blame.rank != rank:
            raise StepGivenUp(f"step {step} was given up: a number of rank {blame.rank} was not finite")
        what = {
            "memory": "its gradients are not finite" + (", those of the other ranks are" if world > 1 else ""),
            "sum": "the sum of the gradients is not finite, though no rank's part of it was seen to be so",
        }.get(blame.how, "")
        if blame.how == "own" and loss is not None and (given is None or loss[0] <= given[0]):
            what = loss[1]
        elif given is not None and blame.how == "own":
            what = f"its gradient is not finite as it gives it to {given[1]}"
        raise (SumNotFinite if blame.how == "sum" else NotFinite)(f"rank {rank}, step {step}: {what}")


def _wrong(part: torch.Tensor) -> torch.Tensor | bool:
    """True if some number is not finite; for a device's tensor, a tensor that says so, to avoid waiting for it."""
    if part.device.type != "cpu":
        return _wrong_there(part)
    # One pass without a copy: a sum of numbers that are not all finite is not finite; it may also just overflow.
    return not bool(torch.isfinite(part.sum())) and not bool(torch.isfinite(part).all())


def _wrong_there(part: torch.Tensor) -> torch.Tensor:
    # Only a finite number times zero is zero: half as many launches as `isfinite`.
    return (part.detach() * 0).ne(0).any()


def _not_finite(value: torch.Tensor | float) -> torch.Tensor | bool:
    """True if a number is not finite; for a device's tensor, a tensor that says so, to avoid waiting for it."""
    if type(value) is torch.Tensor and on_accelerator(value):
        return _wrong_there(value)
    return not bool(torch.isfinite(torch.as_tensor(value)).all())


def _sums(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    given = next((each for each in (*args, *options.values()) if hasattr(each, "reduceOp")), None)
    return given is None or reductions.number(given.reduceOp) in _SUMS


def _parts(given: Any) -> Iterable[torch.Tensor]:
    """The floating-point tensors in an argument, or their local parts."""
    if isinstance(given, list | tuple):
        for each in given:
            yield from _parts(each)
    elif isinstance(given, torch.Tensor) and not given.is_sparse and given.is_floating_point():
        whole: Any = given.detach()
        yield whole.to_local() if hasattr(whole, "to_local") else whole
