"""`--check-for-nan`: before a step's update all ranks agree that its numbers are finite, or whose were not first.

A number that is not finite spreads: a sum over the ranks has it everywhere, and so has the next forward. So each rank
notes where it had the first of its own, by how many collectives it had called in the body by then: in a loss that it
logged, or in what it gave to a sum. Gradients are looked at as the optimizer is about to use them; where a gradient
scaler leaves the update out since they are too large, that is no fault.
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
"""Numbers whose names have one of these in them are looked at."""
_NONE = 2**62
_GIVEN = {"allreduce": 0, "allreduce_coalesced": 0, "reduce": 0, "reduce_scatter": 1, "_reduce_scatter_base": 1}
_GIVEN |= dict.fromkeys(("reduce_scatter_single", "reduce_scatter_single_coalesced"), 1)
_GIVEN |= {"reduce_scatter_tensor_coalesced": 1}
"""Index of the argument that this rank gives to a sum."""
_SUMS = {reductions.number(kind) for kind in (torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG)}


class Seen(NamedTuple):
    """Findings of one rank, or the least of all ranks, in a step. `2**62`: nothing.

    `loss`, `given`: `collectives * world + rank` at its first number that is not finite; `gradients`: the rank, if its
    gradients before the update are not finite; `all_of_them`: 1 if those of all ranks are not.
    """

    loss: int = _NONE
    given: int = _NONE
    gradients: int = _NONE
    all_of_them: int = 0


class Blame(NamedTuple):
    """Rank whose number was the first that was not finite."""

    rank: int
    how: str
    """`own`: it had the number before others could have; `memory`: its gradients after a sum that is the same on all
    ranks; `sum`: it speaks for all, and whose it was is not known."""


def judge(least: Seen, *, world: int, sharded: bool) -> Blame | None:
    """Find the rank with the first number that is not finite; None: nothing is wrong. The same result on all ranks.

    Inputs of a sum count only if they spoiled the result: a scaler's overflow does not.
    """
    if least.loss == _NONE and least.gradients == _NONE:
        return None
    first = min(least.loss, least.given)
    if first != _NONE:
        return Blame(first % world, "own")
    # Replicas have the same sums: where one differs it is its own memory.
    own = world == 1 or not (least.all_of_them or sharded)
    return Blame(least.gradients, "memory" if own else "sum")


class _Answers:
    """Answers to many questions; those of a device are copied together in its order, and read later."""

    def __init__(self) -> None:
        self._asked: list[torch.Tensor | bool] = []
        self._begun: list[tuple[list[int], LateBytes]] = []
        self._next = 0

    def ask(self, flag: torch.Tensor | bool) -> int:
        """The place of its answer; a tensor has one element."""
        self._asked.append(flag)
        return len(self._asked) - 1

    def begin(self) -> None:
        """Let the devices copy what was asked since the last call."""
        places: dict[torch.device, list[int]] = {}
        for place in range(self._next, len(self._asked)):
            if isinstance(flag := self._asked[place], torch.Tensor):
                places.setdefault(flag.device, []).append(place)
        self._next = len(self._asked)
        for which in places.values():
            flags = [each.reshape(()) for place in which if isinstance(each := self._asked[place], torch.Tensor)]
            self._begun.append((which, LateBytes([torch.stack(flags).view(torch.uint8)])))

    def read(self) -> list[bool]:
        """All answers so far, which are waited for. Raises a device's error if it has failed."""
        self.begin()
        found = [each is True for each in self._asked]
        for which, data in self._begun:
            for place, answer in zip(which, data.read()[0], strict=True):
                found[place] = bool(answer)
        return found


class NumberCheck(CallObserver):
    """Looks at the numbers of one worker's bodies.

    Args:
        least: the least of all ranks' tensors, element by element. Raises what collectives do.
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
        """Numbers that were logged, as far as they were asked for, with the place of the answer."""
        self._gradients: list[int] = []

    def watch(self, objects: Iterable[object]) -> None:
        """These are protected."""
        self._optimizers += [each for each in objects if isinstance(each, torch.optim.Optimizer)]

    def begin(self) -> None:
        """A body begins."""
        self._within, self._calls = True, 0
        self._clear()

    def logged(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """The script has logged these numbers of the step."""
        if not self._within:
            return
        for name, value in numbers.items():
            known = self._logged.get(name)
            if any(word in name.lower() for word in WATCHED) and (known is None or known[1] is not value):
                self._logged[name] = (self._calls, value)

    def starts(self, group: CountedGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """As `CallObserver.starts`."""
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
        """Protected optimizers are about to use their gradients: ask the devices, which is behind all of the body."""
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
                continue  # a fused one leaves the update out itself where its scaler has found an overflow
            for group in optimizer.param_groups:
                yield from (each for p in group["params"] if p.grad is not None for each in _parts(p.grad))

    def agree(self, step: StepNo, *, rank: int, world: int, sharded: bool) -> None:
        """All ranks have come to the update of the step; after this, or after an error, the body is not looked at.

        Raises `NotFinite` on the rank whose number was the first, `StepGivenUp` on the others, and what
        collectives do.
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
    # One pass without a copy: a sum with such a number in it is none either; one that overflows says nothing.
    return not bool(torch.isfinite(part.sum())) and not bool(torch.isfinite(part).all())


def _wrong_there(part: torch.Tensor) -> torch.Tensor:
    # Times zero only a finite number is zero: half as many launches as `isfinite`.
    return (part.detach() * 0).ne(0).any()


def _not_finite(value: torch.Tensor | float) -> torch.Tensor | bool:
    """As `_wrong`, of a number."""
    if type(value) is torch.Tensor and on_accelerator(value):
        return _wrong_there(value)
    return not bool(torch.isfinite(torch.as_tensor(value)).all())


def _sums(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    given = next((each for each in (*args, *options.values()) if hasattr(each, "reduceOp")), None)
    return given is None or reductions.number(given.reduceOp) in _SUMS


def _parts(given: Any) -> Iterable[torch.Tensor]:
    """The tensors of floats in an argument, as this rank has them."""
    if isinstance(given, list | tuple):
        for each in given:
            yield from _parts(each)
    elif isinstance(given, torch.Tensor) and not given.is_sparse and given.is_floating_point():
        whole: Any = given.detach()
        yield whole.to_local() if hasattr(whole, "to_local") else whole
