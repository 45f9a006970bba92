"""Batches that this rank reads for the steps of a session, with a record of each."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from regrow.core.errors import UsageError
from regrow.core.ids import StepNo
from regrow.core.messages.data import BatchRecord, OrderSpec
from regrow.data.loader import StepLoader
from regrow.data.order import keys_of
from regrow.data.seeding import seed_everything
from regrow.train.microbatches import Dealer
from regrow.train.sharing import Share

_MOST_NAMED = 16


class Batches:
    """Reads the batch of any step from a script's loader.

    Args:
        loader: gives the batch of a step, or deals its micro-batches.
        seed: seed of the session.
        place: called at each read; returns this rank's share of the global batch, and the number of shares.
        fetching: context in which the loader fetches a batch.
        reseed: seeds the script's own generators from the same numbers as the global ones.
        began: the job's step that is step 0 of the training; methods take the job's steps, the loader the training's.
    """

    def __init__(
        self,
        loader: StepLoader | Dealer,
        *,
        seed: int,
        place: Callable[[], Share],
        reseed: Callable[[int, int, int], None],
        fetching: Callable[[], AbstractContextManager[None]] = nullcontext,
        began: StepNo,
    ) -> None:
        self._loader = loader
        self._seed = seed
        self._place, self._reseed = place, reseed
        self._fetching, self._began = fetching, began
        self._last: StepNo | None = None

    @property
    def order(self) -> OrderSpec:
        """The order of the samples."""
        return self._loader.spec

    @property
    def dealer(self) -> Dealer | None:
        """Dealer of the micro-batches; None if steps have none."""
        return self._loader if isinstance(self._loader, Dealer) else None

    def batch(self, step: StepNo) -> Any:
        """The batch of `step`. Raises what the data set raises; leaves the random generators in an arbitrary state."""
        self._last = None
        with self._fetching():
            batch = self._loader.batch(step - self._began, *self._place())
        self._last = step
        return batch

    def prove(self, step: StepNo) -> str:
        """Read the last batch of `step` again and compare: a replacement rank must get the same samples.

        Returns a warning for the user if the samples are the same but their values differ; else "". Batches that cannot
        be read again or compared pass. Raises `UsageError` if the samples differ, and exceptions of the data set.
        """
        with self._fetching():
            return self._loader.prove(step - self._began, *self._place())

    def record(self, step: StepNo) -> BatchRecord | None:
        """Record of the batch of `step`; None unless it was read last, and as one batch."""
        return self._loader.record if self._last == step and isinstance(self._loader, StepLoader) else None

    def parts(self, step: StepNo) -> list[BatchRecord]:
        """Records of the micro-batches of `step` that the body has read until now; empty without micro-batches."""
        return (
            self._loader.records(StepNo(step - self._began))
            if self._last == step and isinstance(self._loader, Dealer)
            else []
        )

    def reads(self, step: StepNo) -> list[BatchRecord]:
        """Records of the last reads for `step`, if the batches are data, so contain tensors, arrays or texts."""
        if self._last != step or not self._loader.is_data():
            return []
        read = self.record(step)
        return [read] if read is not None else self.parts(step)

    def describe(self, step: StepNo) -> str:
        """Describe for people what this rank reads at `step`."""
        share, shares = self._place()
        read = f"it read share {share} of {shares} of step {step}"
        try:
            addresses = keys_of(self.order, StepNo(step - self._began), share, shares)
        except UsageError:
            return read  # the loader decides its own order
        named = ", ".join(str(address) for address in addresses[:_MOST_NAMED])
        more = f" and {len(addresses) - _MOST_NAMED} more" if len(addresses) > _MOST_NAMED else ""
        return f"{read}: samples (epoch, index) {named}{more}"

    def seed_body(self, step: StepNo) -> None:
        """Seed all random generators for the body of `step`."""
        step, share = StepNo(step - self._began), self._place()[0]
        seed_everything(self._seed, step, share)
        self._reseed(self._seed, step, share)

    def seek(self, step: StepNo) -> None:
        """Prepare the loader for `step`."""
        self._loader.seek(step - self._began, *self._place())

    def close(self) -> None:
        """End loader workers and wait for them. May be called twice."""
        self._loader.close()
