"""The micro-batches of a step, dealt out to replicas; the resulting gradient is that of the whole global batch."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from regrow.core.errors import UsageError
from regrow.core.messages.data import BatchRecord, OrderSpec
from regrow.data.loader import Caching, StepLoader
from regrow.data.micro import batch_size_of, samples_in
from regrow.data.order import global_batch_of
from regrow.data.seeding import seed_everything
from regrow.data.walks import ShareWalk
from regrow.step.dealing import MicroBatchCounts, MicroBatchRange, deal, refusal, total
from regrow.train.gradients.averaged import Gradients

_OUTSIDE = -1
"""Number used in place of a share to seed random numbers drawn before the first and after the last micro-batch."""
_MISSING = -math.inf
_REHEARSED = 2
"""Micro-batches in a rehearsal: one without and one with a reduction, if there are two."""


class StepInProgress(Protocol):
    """Interface of the running step for its micro-batches."""

    @property
    def rehearsed(self) -> bool:
        """True in a rehearsal, for which a part of the step is enough."""

    def log(self, **metrics: torch.Tensor | float) -> None:
        """Log numbers of the whole step."""

    def receive(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """Receive numbers of a part of this rank's work."""

    def read(self, what: str, batch: Any) -> None:
        """Note that a part of this rank's data has been read."""


class MicroBatch:
    """One micro-batch: its data, and its part in the step's gradient.

    Attributes:
        index: number of this micro-batch in the step, from 0; the same in all worlds.
        last: True for this rank's last one, whose backward reduces the gradients.
        batch: the data.
    """

    def __init__(self, owner: "MicroBatches", index: int, batch: Any, *, last: bool) -> None:
        self.index, self.batch, self.last = index, batch, last
        self.done = False
        self._owner = owner

    def __iter__(self) -> NoReturn:
        raise UsageError("a micro-batch cannot be unpacked, only its data can", hint="write `x, y = micro.batch`")

    def backward(self, loss: torch.Tensor, *, weight: int | None = None) -> None:
        """Add this micro-batch's gradient; after the last, `grad` is the gradient of the mean over the global batch.

        Args:
            loss: a scalar, the mean over `weight` samples or tokens.
            weight: an integer, the number of samples (the default: the first dimension of the first tensor in the
                batch), or of tokens, over which the loss is the mean.

        Raises:
            UsageError: called twice or out of order, or `loss` is not a scalar, or `weight` is not a count.
        """
        self._owner._backward(self, loss, weight)  # noqa: SLF001 - users shall not call it

    def log(self, **metrics: torch.Tensor | float) -> None:
        """Log numbers of this micro-batch; the step logs their weighted means over the global batch, on every rank.

        Call it before `backward`, with the same names in every micro-batch.

        Args:
            metrics: floats, or tensors with one element.
        """
        self._owner._log(self, metrics)  # noqa: SLF001


class MicroBatches:
    """This rank's micro-batches of one step: iterate over all of them once, and call `backward` on each.

    Attributes:
        count: number of micro-batches of the step, of all replicas together.
        share: range of the micro-batches of this rank's replica.
    """

    def __init__(self, dealer: "Dealer", number: int, share: MicroBatchRange, place: int, shares: int) -> None:
        self.count, self.share = dealer.count_for(shares), share
        self._dealer, self._number = dealer, number
        self._place, self._shares = place, shares
        self._usual = dealer.usual(self.count)
        self._divides_by = 0
        self._step: StepInProgress | None = None
        self._open: MicroBatch | None = None
        self._begun = self._complete = False
        self.backward, self.all = "micro.backward(loss)", "step.microbatches"
        """Code of the script as messages quote it; an adapter sets other names."""
        self._weights: dict[int, int] = {}
        self._logged: dict[int, dict[str, torch.Tensor | float]] = {}

    def __len__(self) -> int:
        """Number of this rank's micro-batches."""
        return self.share.stop - self.share.start

    def enter(self, step: StepInProgress) -> None:
        """Prepare for the step's body, which begins."""
        self._step = step
        self._dealer.current = self
        if step.rehearsed:
            self.share = MicroBatchRange(self.share.start, min(self.share.start + _REHEARSED, self.share.stop))
        self._dealer.seed(self._number, _OUTSIDE)

    def leave(self) -> None:
        """Clean up after the step's body, which has ended with or without an error."""
        self._dealer.current = None
        self._dealer.gradients.abandon()
        self._open = self._step = None

    def __iter__(self) -> Iterator[MicroBatch]:
        """Each micro-batch of this rank. Raises `UsageError` if `backward` was not called on the one before it."""
        if self._step is None or self._begun:
            raise UsageError(
                "the micro-batches of a step were asked for " + ("twice" if self._begun else "outside its body"),
                hint=f"write `for micro in {self.all}:` once inside `with step`",
            )
        self._begun = True
        gradients, last = self._dealer.gradients, self.share.stop - 1
        self._divides_by = gradients.divides_by(self._shares)
        gradients.start(self.share)
        for index in range(*self.share):
            batch = self._dealer.fetch(self._number, self._at(index))
            self._dealer.seed(self._number, self._at(index))
            gradients.open(index, last=index == last)
            self._step.read(f"micro-batch {index}", batch)
            micro = self._open = MicroBatch(self, index, batch, last=index == last)
            yield micro
            self._check_done(micro)

    def check_complete(self) -> None:
        """Check before the update. Raises `UsageError` if the gradient is not that of the whole batch."""
        if self._open is not None:
            self._check_done(self._open)
        if not self._complete:
            raise UsageError(
                f"step {self._number} updates after {len(self._weights)} of its {len(self)} micro-batches here",
                hint=f"go through all of {self.all} before optimizer.step()",
            )

    def _check_done(self, micro: MicroBatch) -> None:
        if not micro.done:
            reported = f"micro-batch {micro.index} of step {self._number} was left without {self.backward}"
            raise UsageError(reported, hint="call it once for each, instead of loss.backward()")

    def _at(self, index: int) -> int:
        return index * self._dealer.unit + self._place

    # --- calls of a micro-batch --------------------------------------------------------------------------------

    def _log(self, micro: MicroBatch, metrics: dict[str, torch.Tensor | float]) -> None:
        if micro.done:
            raise UsageError(
                f"micro-batch {micro.index} logs after its backward, which may have sent its numbers to all ranks",
                hint="call micro.log() before micro.backward()",
            )
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UsageError(f"log({name}=...) was given a tensor of shape {tuple(value.shape)}", hint="one number")
            kept = value.detach() if isinstance(value, torch.Tensor) else float(value)
            self._logged.setdefault(micro.index, {})[name] = kept
            if self._step is not None:
                self._step.receive({f"{name} of micro-batch {micro.index}": kept})

    def _backward(self, micro: MicroBatch, loss: torch.Tensor, weight: int | None) -> None:
        if micro.done or micro is not self._open or self._step is None:
            raise UsageError(
                f"micro-batch {micro.index} of step {self._number} had its backward already, or is not the present one",
                hint=f"call {self.backward} once, before the next micro-batch is asked for",
            )
        if loss.numel() != 1:
            raise UsageError(f"the loss is a tensor of shape {tuple(loss.shape)}", hint="give the mean, a scalar")
        self._weights[micro.index] = _count(samples_in(micro.batch) if weight is None else weight)
        usual = self._shares_in_step * self._usual
        # Before the gradients: a rank that has given its gradients must know the numbers, as others may commit for it.
        weights = self._settle(self._step) if micro.last else usual
        if micro.last:
            self._dealer.gradients.expect(usual / weights)
        factor = self._weights[micro.index] * self._divides_by / usual
        (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
        micro.done = True
        self._dealer.gradients.close(micro.index)
        if micro.last:
            self._dealer.gradients.finish(usual / weights)
            self._complete = True
            self._dealer.seed(self._number, _OUTSIDE)

    @property
    def _shares_in_step(self) -> int:
        return self.count * self._dealer.unit

    # --- exchange with all ranks -------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        names = {tuple(sorted(self._logged.get(index, ()))) for index in self._weights}
        if len(names) > 1:
            raise UsageError(
                f"the micro-batches of step {self._number} log different names: {sorted(names)}",
                hint="log the same in each",
            )
        return list(names.pop())

    def _settle(self, step: StepInProgress) -> float:
        """Exchange weights and numbers of all micro-batches, log the step's means, and return the sum of the weights.

        One small all-reduce: a row of float64 for each share, so counts up to 2**53 are exact.
        """
        names = self._names()
        rows = [
            [float(weight), *(float(self._logged[index][name]) for name in names)]
            for index, weight in self._weights.items()
        ]
        table = torch.full((self._shares_in_step, 1 + len(names)), _MISSING, dtype=torch.float64)
        table[[self._at(index) for index in self._weights]] = torch.tensor(rows, dtype=torch.float64)
        if step.rehearsed:
            return self._shares_in_step * self._usual
        if self._shares > 1:
            # MAX, since several ranks may have the same micro-batch, as in tensor parallelism.
            dist.all_reduce(table, op=dist.ReduceOp.MAX)
        weights: list[float] = table[:, 0].tolist()
        weight = total(weights)
        if weight == 0:
            raise UsageError(f"no micro-batch of step {self._number} has any weight", hint="leave such a batch out")
        means = {}
        for at, name in enumerate(names):
            values: list[float] = table[:, 1 + at].tolist()
            means[name] = total([w * v if w else 0.0 for w, v in zip(weights, values, strict=True)]) / weight
        step.log(**means)
        return weight


def _count(weight: Any) -> int:
    number = weight.item() if isinstance(weight, torch.Tensor) and weight.numel() == 1 else weight
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise UsageError(f"weight={weight!r} is no count", hint="give how many samples or tokens the loss is a mean of")
    return number


class Dealer:
    """Deals the micro-batches of every step to the present replicas.

    Args:
        loader: the loader given to `session.steps`.
        seed: seed of the session.
        count: micro-batches of a step, or a table of their number by replicas: for loaders whose global batch does not
            depend on it.
        unit: ranks of a replica that read data of their own: each micro-batch has a share for each of them.
        gradients: adds up the gradients.
        even: reason why all replicas must have equally many micro-batches; None if they need not.
        recorded: whether digests of the data read are wanted.
        cache: the node's cache, for a loader that may be cached; None: micro-batches are made in this process.

    Raises:
        UsageError: `count` is less than 1, or too small for a number of replicas in its table, or the loader's global
            batch depends on it.
    """

    def __init__(
        self,
        loader: object,
        *,
        seed: int,
        count: int | Mapping[int, int],
        unit: int,
        gradients: Gradients,
        even: str | None = None,
        recorded: bool = True,
        cache: Caching | None = None,
    ) -> None:
        self.unit, self.gradients = unit, gradients
        self.current: MicroBatches | None = None
        self.reseed: Callable[[int, int, int], None] | None = None
        """Seeds the script's own generators for a micro-batch."""
        self._counts = MicroBatchCounts(count)
        self._script_loader = loader
        self._seed, self._even = seed, even
        self._loader = StepLoader(loader, seed=seed, cache=cache, recorded=recorded, micro=True)
        self._cut = self._counts.all[0] * unit
        """Number of shares of a step's global batch."""
        if self._counts.fixed is None:
            self._check_constant()
        self._shares: list[int] = []
        """Shares that this rank reads."""

    def _check_constant(self) -> None:
        constant = self.spec.global_batch
        if not constant:
            raise UsageError(
                "a loader whose global batch follows the number of micro-batches was given a table of these",
                hint="make a regrow.DataLoader with global_batch_size=, or give microbatches= one number",
            )
        for count in self._counts.all:
            global_batch_of(batch_size=0, global_batch=constant, shares=count * self.unit)

    @property
    def most(self) -> int:
        """Largest possible number of replicas: each needs a micro-batch."""
        return self._counts.most

    def refusal(self, replicas: int) -> str | None:
        """Reason why this number of replicas is not possible; None if it is."""
        count = self._counts.of(replicas)
        if self._even is not None and count % replicas:
            return f"{count} micro-batches are dealt unevenly to {replicas} replicas, and {self._even}"
        return refusal(count, replicas)

    def count_for(self, shares: int) -> int:
        """Number of micro-batches of a step in which `shares` ranks read data of their own."""
        return self._counts.of(shares // self.unit)

    def usual(self, count: int) -> int:
        """Usual number of samples in one of `count` micro-batches.

        Weights are relative to this number, so that gradients have their final scale already while they accumulate.
        """
        return batch_size_of(self._script_loader, count * self.unit)

    @property
    def spec(self) -> OrderSpec:
        """The order of samples, cut into one share for each rank that reads a part of a micro-batch."""
        return self._loader.spec

    def records(self, step: int) -> list[BatchRecord]:
        """Records of the micro-batches of a step that this rank has read until now."""
        return self._loader.records(step, [(share, self._cut) for share in self._shares])

    def batch(self, step: int, share: int, shares: int) -> MicroBatches:
        """This rank's micro-batches of a step; the first is fetched already.

        Args:
            share: number of this rank among those that read data of their own.
            shares: number of ranks that read data of their own.

        Raises:
            UsageError: there are too few micro-batches, or the ranks do not form whole replicas.
        """
        dealt, place = self._deal(share, shares)
        self.fetch(step, dealt.start * self.unit + place)
        return MicroBatches(self, step, dealt, place, shares)

    def _deal(self, share: int, shares: int) -> tuple[MicroBatchRange, int]:
        if shares % self.unit:
            raise UsageError(f"{shares} ranks make up no whole replicas of {self.unit}", hint="change their number")
        count, replicas = self.count_for(shares), shares // self.unit
        if (reason := self.refusal(replicas)) is not None:
            raise UsageError(reason, hint="change microbatches=, or the number of replicas")
        replica, place = divmod(share, self.unit)
        dealt = deal(count, replicas, replica)
        self._cut = count * self.unit
        self._shares = [index * self.unit + place for index in range(*dealt)]
        self._loader.follow(ShareWalk(tuple(self._shares)))
        return dealt, place

    def is_data(self) -> bool:
        """True if the batches are data: see `StepLoader.is_data`."""
        return self._loader.is_data()

    def prove(self, step: int, share: int, shares: int) -> str:
        """Read the last micro-batch a second time, and compare: see `StepLoader.prove`."""
        self._deal(share, shares)
        records = self._loader.records(step, [(share, self._cut) for share in self._shares])
        return self._loader.prove(step, records[-1].share, self._cut) if records else ""

    def seek(self, step: int, share: int, shares: int) -> None:
        """Prepare for a step, so that loader workers fetch it in time."""
        dealt, place = self._deal(share, shares)
        self._loader.seek(step, dealt.start * self.unit + place, self._cut)

    def close(self) -> None:
        """End loader workers and wait for them."""
        self._loader.close()

    def fetch(self, step: int, share: int) -> Any:
        """The data of one share of a step."""
        return self._loader.batch(step, share, self._cut)

    def seed(self, step: int, share: int) -> None:
        """Seed all random generators for a micro-batch."""
        seed_everything(self._seed, step, share)
        if self.reseed is not None:
            self.reseed(self._seed, step, share)

    def check_complete(self) -> None:
        """Check before an update. Raises `UsageError` if the gradient is not that of the whole batch."""
        if self.current is not None:
            self.current.check_complete()
