"""Every sample once: which samples a step reads, and how they reach the step.

The global batch of step n is a function of (seed, n); each rank takes a slice of it. So there is no loader state to
save: `state@n` fixes the position, a retried step gets an identical batch, a newcomer starts at the step of the others.

* `order` decides (pure): the samples of a step, and a share's slice of them. `shuffle` is the bijection that it
  shuffles by, `mixture` the order of several data sets by weight.
* `dataloader` and `mixed` are what a script writes: `DataLoader`, `cached`, `Mixture`.
* `seeding` makes everything random that a sample's code reads a function of integers.
* `loader` takes what a script gives to `session.steps` and answers `batch(step, share, shares)`, for steps and for
  micro-batches; `inplace`, `sampling` with `mapstyle`, and `streams` are the ways there; `kept` gives a batch a second
  time.
* `cache` holds batches for all workers of a node; `sources` are data sets of files, by Hugging Face `datasets`;
  `packing` makes pre-tokenized corpora, `tokens` reads them.

This package is imported without torch: what reads the records of a run works out its order by `order`.
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
    # Lazy, as these need torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'regrow.data' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
