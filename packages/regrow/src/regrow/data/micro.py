"""Number of samples in a micro-batch, if it can be determined."""

from typing import Any

from regrow.core.errors import UsageError
from regrow.data.dataloader import Cached


def batch_size_of(loader: object, shares: int) -> int:
    """Usual number of samples in one of `shares` batches of a step; 1 if that is not known."""
    inner = loader.loader if isinstance(loader, Cached) else loader
    constant = getattr(inner, "global_batch_size", None)
    size = getattr(inner, "batch_size", None) if constant is None else -(-constant // shares)
    return size if isinstance(size, int) and size > 0 else 1


def samples_in(batch: Any) -> int:
    """Number of samples in a batch: the size of the first dimension of its first tensor.

    Raises:
        UsageError: it has no tensor with a dimension.
    """
    found = _first_length(batch)
    if found is None:
        raise UsageError(
            f"it cannot be seen how many samples a batch of type {type(batch).__name__} has",
            hint="give its weight: micro.backward(loss, weight=...)",
        )
    return found


def _first_length(item: Any) -> int | None:
    shape = getattr(item, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    parts = item.values() if hasattr(item, "values") else item if isinstance(item, list | tuple) else ()
    for part in parts:
        found = _first_length(part)
        if found is not None:
            return found
    return None
