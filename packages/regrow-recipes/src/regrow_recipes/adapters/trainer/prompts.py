"""Prompts of a generating trainer, in TRL's order: those of a group go to neighbouring ranks."""

from typing import Any

from regrow.core.errors import UsageError


class Prompts:
    """Batches of prompts by step and micro-batch, for `session.steps(microbatches=...)`.

    A step has `accumulated` micro-batches of each rank, ordered by rank. Micro-batch j of rank r of step n has the
    batch that the stock trainer gives rank r for its forward pass number n * accumulated + j.

    Args:
        loader: the trainer's own `DataLoader` over all prompts, not bound to a rank.
        accumulated: forward passes of a rank in an update.
        world: number of ranks.

    Raises:
        UsageError: the order is not TRL's, or there are too few prompts for one generation, or an update would have
            prompts of two epochs.
    """

    shares_overlap = True
    """A prompt's group may span ranks, which then read the same prompt, so the session does not warn about it."""

    def __init__(self, loader: Any, *, accumulated: int, world: int) -> None:
        self._loader, self._accumulated, self._world = loader, accumulated, world
        sampler: Any = getattr(loader, "sampler", None)
        if type(sampler).__name__ != "RepeatSampler":
            raise UsageError(
                f"the order of prompts comes from a {type(sampler).__name__}",
                hint="give a Dataset with a length, and keep the trainer's own sampler",
            )
        self._sampler = sampler
        self._start = sampler.generator.get_state() if sampler.shuffle else None
        self._forwards = len(sampler) // (loader.batch_size * world)
        if not self._forwards:
            raise UsageError(
                f"the data set has {sampler.num_samples} prompts, and a generation needs {sampler.batch_size}",
                hint="lower generation_batch_size or steps_per_generation, or give more prompts",
            )
        if self._forwards % accumulated:
            raise UsageError(
                f"an epoch has {self._forwards} forwards of a rank, and an update {accumulated}: an update would mix "
                f"prompts of two epochs",
                hint="make steps_per_generation a multiple of gradient_accumulation_steps",
            )
        self._epoch, self._order = -1, list[int]()

    def __call__(self, step: int, share: int) -> list[Any]:
        """The batch of micro-batch `share` of a step: rows of the data set, each repeated for its completions."""
        rank, at = divmod(share, self._accumulated)
        epoch, forward = divmod(step * self._accumulated + at, self._forwards)
        size = self._loader.batch_size
        begin = (forward * self._world + rank) * size
        rows = self._loader.dataset
        batch: list[Any] = self._loader.collate_fn([rows[row] for row in self._order_of(epoch)[begin : begin + size]])
        return batch

    def _order_of(self, epoch: int) -> list[int]:
        if epoch < self._epoch:
            self._epoch = -1
        if self._epoch < 0 and self._start is not None:
            self._sampler.generator.set_state(self._start)
        while self._epoch < epoch:
            self._order, self._epoch = list(self._sampler), self._epoch + 1
        return self._order
