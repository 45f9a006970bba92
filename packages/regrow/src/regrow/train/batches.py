"""Batches that the steps of a session read at this rank's place, with a record of each."""

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
    """A script's loader, asked by step.

    Args:
        loader: gives a batch for a step, or what deals the micro-batches of one.
        seed: the session's.
        place: which share of the global batch is read here, of how many; asked anew each time.
        fetching: entered while the loader fetches a batch.
        reseed: seeds the generators of the script's own, from what all others are seeded from.
        began: the step of the job with which its training begins; steps here are the job's, the loader's its own.
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
        """In which order the samples come."""
        return self._loader.spec

    @property
    def dealer(self) -> Dealer | None:
        """Dealer of the micro-batches; None if steps have none."""
        return self._loader if isinstance(self._loader, Dealer) else None

    def batch(self, step: StepNo) -> Any:
        """The batch of `step`; what the data set raises passes through. Leaves the random generators in any state."""
        self._last = None
        with self._fetching():
            batch = self._loader.batch(step - self._began, *self._place())
        self._last = step
        return batch

    def prove(self, step: StepNo) -> str:
        """Read what was read for `step` last a second time, which must give the same. Empty, or a note for people.

        Raises `UsageError` where the loader gives something else; what the data set raises passes through.
        """
        with self._fetching():
            return self._loader.prove(step - self._began, *self._place())

    def record(self, step: StepNo) -> BatchRecord | None:
        """Record of the batch of `step`; None unless it was read last, and as one batch."""
        return self._loader.record if self._last == step and isinstance(self._loader, StepLoader) else None

    def parts(self, step: StepNo) -> list[BatchRecord]:
        """Records of the micro-batches of `step` that the body has read until now; empty if it has none."""
        return (
            self._loader.records(StepNo(step - self._began))
            if self._last == step and isinstance(self._loader, Dealer)
            else []
        )

    def reads(self, step: StepNo) -> list[BatchRecord]:
        """Records of the last reads for `step`, if its batches are data: contain tensors, arrays or texts."""
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
            return read  # an order of the loader's own
        named = ", ".join(str(address) for address in addresses[:_MOST_NAMED])
        more = f" and {len(addresses) - _MOST_NAMED} more" if len(addresses) > _MOST_NAMED else ""
        return f"{read}: samples (epoch, index) {named}{more}"

    def seed_body(self, step: StepNo) -> None:
        """Seed all random generators for the body of `step`."""
        step, share = StepNo(step - self._began), self._place()[0]
        seed_everything(self._seed, step, share)
        self._reseed(self._seed, step, share)

    def seek(self, step: StepNo) -> None:
        """Make ready for `step`."""
        self._loader.seek(step - self._began, *self._place())

    def close(self) -> None:
        """End loader workers and wait for them. May be called twice."""
        self._loader.close()
