"""Selects the samples of a step: a function of seed and step whose cost depends on the batch size, not on the data.

A sample's *address* is (epoch, index), in a mixture (epoch of the source, (source, index)). `OrderSpec` holds all that
an order depends on; `keys_of` gives the addresses that a share of a step reads, `samples_digest` their digest for a
record. So the spec alone determines the samples that a run must have read, without the data. Pure.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index as as_index
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash

from regrow.core.errors import UsageError
from regrow.core.messages.data import OrderSpec
from regrow.data.mixture import MixtureOrder, Weighting
from regrow.data.shuffle import MAX_SIZE, shuffled

__all__ = [
    "KEEP",
    "Address",
    "GlobalOrder",
    "Order",
    "dealt",
    "global_batch_of",
    "keys_of",
    "order_of",
    "padded",
    "samples_digest",
    "shuffled",
    "slice_for",
    "steps_per_epoch",
]

ORDERED = "ordered"
MIXTURE = "mixture"
OPAQUE = "opaque"

KEEP = "keep"
"""The last batch of an epoch is shorter than the others."""
DROP = "drop"
"""Samples that do not fill a batch are left out of the epoch."""
WRAP = "wrap"
"""Batches continue into the next epoch, so all are full."""
REMAINDERS = (KEEP, DROP, WRAP)

_SEED_MASK = (1 << 64) - 1
_SIGN = 1 << 63

Address = tuple[int, Any]
"""(epoch, index) of a sample; with the seed, it determines the random numbers of its transforms."""

Item = TypeVar("Item")


def slice_for(items: Sequence[Item], rank: int, world: int) -> list[Item]:
    """The slice of `items` for `rank` of `world`: every world-th item, beginning with item `rank`.

    The slices of all ranks are disjoint and cover `items`, as in torch's `DistributedSampler`.
    """
    _check_place(rank, world)
    return list(items[rank::world])


def padded(items: Sequence[Item], world: int) -> list[Item]:
    """`items`, extended by repeating the first ones until `world` ranks have equal, nonempty shares.

    Needed only for the last batch of an epoch: data-parallel training weights all ranks' gradients equally, and a rank
    without a sample could not take part in the reduction. Raises `UsageError` if `items` is empty.
    """
    if not items:
        raise UsageError("a global batch is empty", hint="the sampler must give at least one sample an epoch")
    missing = -len(items) % world
    return [*items, *(items[i % len(items)] for i in range(missing))]


def dealt(batch: Sequence[Item], share: int, shares: int, *, constant: bool) -> list[Item]:
    """The part of a global batch that `share` of `shares` reads.

    `constant`: the global batch is the same for any number of shares, so the shares' sizes may differ by one; samples
    of a short batch are repeated only if a share would be empty. Otherwise all shares are made equal, by `padded`.
    """
    if not constant or len(batch) < shares:
        batch = padded(batch, shares)
    return slice_for(batch, share, shares)


def global_batch_of(*, batch_size: int, global_batch: int, shares: int) -> int:
    """Number of samples of a step, of all shares together. Raises `UsageError` if a share would always be empty."""
    if global_batch and global_batch < shares:
        raise UsageError(
            f"the global batch of {global_batch} samples is less than the {shares} shares that read it",
            hint=f"make global_batch_size at least {shares}, or run on at most {global_batch} ranks",
        )
    return global_batch or batch_size * shares


@dataclass(frozen=True)
class GlobalOrder:
    """The samples of every step, for all ranks together.

    size: samples in the data set. global_batch: samples per step, of all ranks together. An epoch is one pass over the
    data set, each sample once. If `global_batch` does not divide `size`, an epoch's last batch is shorter, or is left
    out (`drop_last`), or is filled from the next epoch (`wrap`). Raises `UsageError` if no batch can be made.
    """

    size: int
    global_batch: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    wrap: bool = False

    def __post_init__(self) -> None:
        """Check that there is at least one batch."""
        if not 0 < self.size <= MAX_SIZE:
            raise UsageError(
                f"an order over {self.size} samples was asked for",
                hint="give session.steps a data set with a len() from 1 to 2**62",
            )
        if self.global_batch < 1:
            raise UsageError(f"the global batch is {self.global_batch} samples", hint="make batch_size at least 1")
        if self.drop_last and self.size < self.global_batch:
            raise UsageError(
                f"the data set has {self.size} samples, less than one global batch of {self.global_batch}, "
                "and drop_last leaves that batch out",
                hint="set drop_last=False, or make batch_size smaller",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the data set; 0 if epochs do not end with a step (`wrap`)."""
        if self.wrap:
            return 0
        if self.drop_last:
            return self.size // self.global_batch
        return -(-self.size // self.global_batch)

    def addresses(self, step: int) -> list[Address]:
        """(epoch, index) of each sample of `step`, of all ranks together, in order; takes time O(batch)."""
        if step < 0:
            raise UsageError(f"there is no step {step}", hint="steps are numbered from 0")
        if not self.wrap:
            epoch, place = divmod(step, self.steps_per_epoch)
            first = place * self.global_batch
            return self._part(epoch, first, min(first + self.global_batch, self.size))
        epoch, first = divmod(step * self.global_batch, self.size)
        found: list[Address] = []
        while len(found) < self.global_batch:
            last = min(first + self.global_batch - len(found), self.size)
            found += self._part(epoch, first, last)
            epoch, first = epoch + 1, 0
        return found

    def indices(self, step: int) -> list[int]:
        """The indices of `addresses`, without the epochs."""
        return [index for _, index in self.addresses(step)]

    def _part(self, epoch: int, first: int, last: int) -> list[Address]:
        if not self.shuffle:
            return [(epoch, index) for index in range(first, last)]
        order: list[int] = shuffled(
            np.arange(first, last, dtype=np.uint64), size=self.size, seed=self.seed, epoch=epoch
        ).tolist()
        return [(epoch, index) for index in order]


class Order(Protocol):
    """Interface of an order: the samples of every step, of all shares together."""

    def addresses(self, step: int) -> list[Address]:
        """The addresses of the samples of `step`, in order."""
        ...


def spec_seed(seed: int) -> int:
    """A seed in the form in which an `OrderSpec` stores it: modulo 2**64."""
    return seed & _SEED_MASK


def order_of(spec: OrderSpec, shares: int) -> Order:
    """The order that `spec` describes, for this number of shares.

    Raises `UsageError` if there is no such order, or it is the loader's own (`opaque`), which cannot be recomputed.
    """
    return _order_of(msgspec.msgpack.encode(spec), shares)


@lru_cache(maxsize=16)
def _order_of(encoded: bytes, shares: int) -> Order:
    spec = msgspec.msgpack.decode(encoded, type=OrderSpec)
    if spec.kind not in (ORDERED, MIXTURE):
        raise UsageError(
            "the loader has an order of its own, which cannot be recomputed",
            hint="leave out sampler and batch_sampler: then the order is a function of the seed",
        )
    if not spec.sources:
        raise UsageError("an order of no data set was asked for", hint="its description is damaged")
    if spec.remainder not in REMAINDERS:
        raise UsageError(f"remainder={spec.remainder!r} is none of {', '.join(REMAINDERS)}")
    batch = global_batch_of(batch_size=spec.batch_size, global_batch=spec.global_batch, shares=shares)
    if spec.kind == ORDERED:
        return GlobalOrder(
            spec.sources[0].size,
            batch,
            spec.seed,
            shuffle=spec.shuffle,
            drop_last=spec.remainder == DROP,
            wrap=spec.remainder == WRAP,
        )
    weighting = Weighting.of([source.name for source in spec.sources], spec.weights)
    sizes = [source.size for source in spec.sources]
    return MixtureOrder(sizes, weighting, batch, seed=spec.seed, shuffle=spec.shuffle)


def keys_of(spec: OrderSpec, step: int, share: int, shares: int) -> list[Address]:
    """The addresses that `share` of `shares` reads at `step`, in order; in time proportional to the batch.

    All shares together read the step's global batch, `order_of(spec, shares).addresses(step)`; of the short last batch
    of an epoch, some samples may be read twice: see `dealt`. Raises as `order_of` does.
    """
    return dealt(order_of(spec, shares).addresses(step), share, shares, constant=spec.global_batch > 0)


def steps_per_epoch(spec: OrderSpec, shares: int) -> int:
    """Steps in one pass over the data set; 0 if epochs do not end with a step (`wrap`, mixtures).

    Raises as `order_of` does.
    """
    order = order_of(spec, shares)
    return order.steps_per_epoch if isinstance(order, GlobalOrder) else 0


def samples_digest(addresses: Sequence[Address]) -> str:
    """Digest of these samples in this order: xxh3_64 of their numbers as int64 (little endian), 16 hex digits."""
    numbers: list[int] = []
    for epoch, index in addresses:
        numbers.append(epoch)
        if isinstance(index, tuple):
            numbers.extend(_as_number(part) for part in index)
        else:
            numbers.append(_as_number(index))
    return xxhash.xxh3_64_hexdigest(struct.pack(f"<{len(numbers)}q", *numbers))


def _as_number(index: Any) -> int:
    """Convert an index to an int64. An index that is not a number, such as a file name, is hashed by its repr."""
    if type(index) is int and -_SIGN <= index < _SIGN:
        return index
    try:
        number = as_index(index)
    except TypeError:
        number = xxhash.xxh3_64_intdigest(repr(index).encode())
    return (number + _SIGN) % (_SIGN * 2) - _SIGN


def _check_place(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} is no place in a world of {world}", hint="ranks go from 0 to world - 1")
