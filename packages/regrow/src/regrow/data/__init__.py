"""Selects the samples of each step, so that every sample is read exactly once, and loads them.

The global batch of step n is a function of (seed, n); each rank takes a slice of it. So there is no loader state to
save: `state@n` fixes the position, a retried step gets an identical batch, a newcomer starts at the others' step.

* `order` selects (pure) the samples of a step, and a share's slice of them. `shuffle` is the bijection by which it
  shuffles, `mixture` the order of several data sets by weight.
* `dataloader` and `mixed` are the classes for scripts: `DataLoader`, `cached`, `Mixture`.
* `seeding` seeds all random generators that a sample's code may use, as a function of integers.
* `loader` wraps the loader given to `session.steps` as `batch(step, share, shares)`, for steps and micro-batches;
  `inplace`, `sampling` with `mapstyle`, and `streams` implement it per kind of loader; `kept` keeps a batch for a
  retry.
* `cache` holds batches for all workers of a node; `sources` are data sets of files, by Hugging Face `datasets`;
  `packing` makes pre-tokenized corpora, `tokens` reads them.

This package can be imported without torch: readers of a run's records recompute its order with `order`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.data.dataloader import Cached, DataLoader, cached
    from regrow.data.mixed import Mixture
    from regrow.data.sources.sets import Arrow, JsonLines, Parquet
    from regrow.data.tokens import PackedTokens

__all__ = ["Arrow", "Cached", "DataLoader", "JsonLines", "Mixture", "PackedTokens", "Parquet", "cached"]

_HOMES = {
    "Cached": "regrow.data.dataloader",
    "DataLoader": "regrow.data.dataloader",
    "cached": "regrow.data.dataloader",
    "Mixture": "regrow.data.mixed",
    "Arrow": "regrow.data.sources.sets",
    "JsonLines": "regrow.data.sources.sets",
    "Parquet": "regrow.data.sources.sets",
    "PackedTokens": "regrow.data.tokens",
}


def __getattr__(name: str) -> Any:
    # Loaded lazily, because these need torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'regrow.data' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
