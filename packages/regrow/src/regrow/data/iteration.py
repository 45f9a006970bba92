"""Iteration of a torch `DataLoader`: torch's own, or an override of its class.

Torch's own iteration can start at any step. An override is used unchanged, to keep its additions; if the order behind
it is not aware of ranks, it iterates over this rank's part of that order.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from regrow.core.errors import UsageError
from regrow.data.sampling import Plan, plan_of

_ITERATION = ("__iter__", "_get_iterator", "_index_sampler")


def torch_iterates(loader: TorchLoader[Any]) -> bool:
    """True if the loader iterates as torch's own does, over a map-style data set, without overrides."""
    kind = type(loader)
    own = [name for name in _ITERATION if getattr(kind, name, None) is not getattr(TorchLoader, name, None)]
    return not own and "_get_iterator" not in vars(loader) and not isinstance(loader.dataset, IterableDataset)


class DealtBatches:
    """Replaces a loader's batch sampler that is not aware of ranks: yields this rank's batches of an epoch.

    Args:
        plan: the order of samples.
        original: the loader's own batch sampler, to which other attributes are forwarded.
    """

    def __init__(self, plan: Plan, original: Any) -> None:
        self._plan, self._original = plan, original
        self.rank, self.num_replicas = 0, 1
        self._epoch = 0
        self.asked = False
        """True once its batches were iterated."""

    def set_epoch(self, epoch: int) -> None:
        """Yield the batches of this epoch from now on."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._plan.epoch_at(self.rank, self.num_replicas)

    def __iter__(self) -> Iterator[list[Any]]:
        self.asked = True
        first = self._epoch * len(self)
        for step in range(first, first + len(self)):
            yield [index for _, index in self._plan.keys_at(step, self.rank, self.num_replicas)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_original" not in vars(self):
            raise AttributeError(name)
        return getattr(self._original, name)


def dealt_out(loader: TorchLoader[Any], *, seed: int) -> "tuple[TorchLoader[Any], DealtBatches] | None":
    """A copy of a loader with its own iteration that yields this rank's batches only, and its `DealtBatches`.

    None if the script controls the order: its sampler is aware of ranks, or the data set is not map-style.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        plan = plan_of(loader, seed=seed)
    except UsageError:
        return None
    if not plan.deals or plan.epoch_at(0, 1) < 1:
        return None
    copied, dealt = copy.copy(loader), DealtBatches(plan, loader.batch_sampler)
    vars(copied)["batch_sampler"] = dealt  # DataLoader.__setattr__ refuses this after construction
    return copied, dealt
