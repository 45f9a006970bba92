"""Divides updates into epochs, for any world. Pure."""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any


class _Sized:
    """The attributes of a loader that a `Trainer` needs before it trains."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length


@dataclass(frozen=True)
class Schedule:
    """The updates of a training.

    Attributes:
        microbatches: in an update.
        per_epoch: updates in an epoch; 0 if the number of samples is not known.
    """

    microbatches: int
    per_epoch: int

    @classmethod
    def of(cls, samples: int | None, *, batch_size: int, microbatches: int, drop_last: bool) -> "Schedule":
        """The schedule for a data set of `samples` samples; None: their number is not known."""
        if samples is None:
            return cls(microbatches, 0)
        full, rest = divmod(samples, batch_size * microbatches)
        return cls(microbatches, max(1, full + (rest > 0 and not drop_last)))

    def epoch_after(self, number: int, *, of: int) -> float:
        """Epochs completed after update `number`, from 0, of `of`; if the length is unknown, all are one epoch."""
        epoch, at = divmod(number, self.per_epoch or of)
        return epoch + (at + 1) / (self.per_epoch or of)

    def ends_epoch(self, number: int) -> bool:
        """True if update `number` is the last one of an epoch."""
        return bool(self.per_epoch) and (number + 1) % self.per_epoch == 0

    def stand_in(self, loader: Any, args: Any) -> Any:
        """A stand-in for one rank's loader in the stock trainer, for its length only."""
        if not self.per_epoch:
            return iter(())
        return _Sized(getattr(loader, "dataset", None), self.per_epoch * args.gradient_accumulation_steps)


def samples_of(loader: Any) -> int | None:
    """Number of samples in an epoch; None if it is not known."""
    holders = (getattr(loader, "sampler", None), getattr(loader, "dataset", None))
    return next((len(holder) for holder in holders if isinstance(holder, Sized)), None)
