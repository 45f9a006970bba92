"""Packed corpora for tests, made without `regrow data pack`."""

from pathlib import Path

import numpy as np

from regrow.data.packing.corpus import Recipe
from regrow.data.packing.writing import write_corpus


def tiny_corpus(folder: Path, tokens: int, *, dtype: str = "uint16", shard_bytes: int = 1000) -> Path:
    """Make a corpus of `tokens` random tokens below 256, in documents of up to 30, in small shards."""
    draw = np.random.default_rng(5)
    recipe = Recipe(
        tokenizer="random",
        tokenizer_digest="",
        column="text",
        append_eos=None,
        dtype=dtype,
        shard_bytes=shard_bytes,
        inputs=[],
    )
    lengths = draw.integers(1, 30, tokens)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), tokens)]
    lengths = np.append(lengths, tokens - lengths.sum())
    folder.mkdir()
    write_corpus(folder, recipe, [(draw.integers(0, 256, tokens), lengths)])
    return folder
