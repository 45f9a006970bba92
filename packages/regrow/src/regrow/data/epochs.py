"""Number of steps in a pass over a script's loader."""

from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader as TorchLoader

from regrow.data.dataloader import Cached
from regrow.data.iteration import dealt_out, torch_iterates
from regrow.data.loader import Share
from regrow.data.sampling import plan_of, set_place


def pass_length(loader: Any, share: Share, *, seed: int, micro: bool = False) -> int | None:
    """Number of steps in one pass over the loader; None if that is unknown, or passes do not end with a step.

    Args:
        loader: a loader in any form that `StepLoader` accepts.
        share: (share of a step's global batch that is read here, number of shares).
        seed: the session's seed.
        micro: True if each batch of the loader is one share's, and the next batch the next share's.

    Raises:
        UsageError: the loader has no batches.
    """
    if isinstance(loader, Cached):
        loader = loader.loader
    if isinstance(loader, TorchLoader):
        if torch_iterates(loader):
            return plan_of(loader, seed=seed).epoch_at(*share) or None
        if not micro and (dealt := dealt_out(loader, seed=seed)) is not None:
            set_place(dealt[1], *share)
            return len(dealt[0])
    try:
        return len(loader) // (share[1] if micro else 1) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset without a len()
        return None
