"""Check that ranks train equally long and read different shares, and that newcomers read the same batches. Pure."""

from typing import NamedTuple

from regrow.core.ids import Rank
from regrow.core.messages.data import BatchRecord, LoaderShown

Share = tuple[int, int]
"""Index of a share, and number of shares."""


class _Length(NamedTuple):
    """Length of a rank's training: its last step, and the steps of an epoch, 0 without epochs."""

    until: int
    length: int

    def text(self) -> str:
        if not self.length:
            return f"until step {self.until}"
        return f"{self.until // self.length} epochs of {self.length} steps"


class Loaders:
    """Loaders reported by workers since all workers were last started."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget everything, because all workers are started anew."""
        self._length: tuple[Rank | None, _Length] | None = None
        self._first: dict[Share, tuple[Rank | None, str]] = {}
        self._seconds: dict[int, dict[int, tuple[Rank | None, tuple[str, str]]]] = {}
        self._said = self._said_again = False

    def refusal(self, shown: LoaderShown, rank: Rank | None) -> str:
        """Reason why a worker cannot train together with earlier ones; empty: it can."""
        mine = _Length(shown.until, shown.length)
        if self._length is None:
            self._length = rank, mine
        whose, known = self._length
        if mine == known:
            return ""
        return (
            f"{_named(rank)} trains {mine.text()}, and {_named(whose)} {known.text()} ({shown.loader}): every rank "
            "must run the same steps, so give one number that all ranks know, session.epochs(..., length=) or "
            "session.steps(..., until=); ranks that have more data leave the rest out"
        )

    def notes(self, shown: LoaderShown, rank: Rank | None) -> list[str]:
        """Notes for people about the batches that a worker has read."""
        first = shown.reads[0] if shown.reads else []
        if len(shown.reads) > 1:
            return self._alike(shown, first, shown.reads[1], rank)
        other = next((known for each in first if (known := self._differs(each, rank)) is not None), None)
        if other is None or self._said_again:
            return []
        self._said_again = True
        return [
            f"{shown.loader} gives {_named(rank)}, which comes in now, another batch of step 0 than it gave "
            f"{_named(other[0])} in the same place: what it reads follows from more than the step (the clock, "
            "os.urandom, the process, files that have changed), so from here on it reads other samples than the rank "
            "that it replaces. Seed it by numbers that all processes know: the session's seed, the rank, the epoch"
        ]

    def _differs(self, read: BatchRecord, rank: Rank | None) -> tuple[Rank | None, str] | None:
        """Rank and digest of an earlier, different batch that was read for the same share; None: there is none."""
        if not read.digest:
            return None
        known = self._first.setdefault((read.share, read.shares), (rank, read.digest))
        return known if known[1] != read.digest else None

    def _alike(
        self, shown: LoaderShown, first: list[BatchRecord], second: list[BatchRecord], rank: Rank | None
    ) -> list[str]:
        """Notes about ranks whose shares differ but who read the same batches in two successive steps."""
        if self._said or not first or not second:
            return []
        mine, share, shares = (first[0].digest, second[0].digest), second[0].share, second[0].shares
        if not all(mine) or mine[0] == mine[1] or first[0].share != share or first[0].shares != shares:
            return []  # Equal batches in both steps show nothing about shares.
        reported = self._seconds.setdefault(shares, {})
        reported[share] = rank, mine
        alike = sorted(at for at, (_, digests) in reported.items() if digests == mine)
        if len(alike) < 2:
            return []
        self._said = True
        ranks = sorted(whose for at in alike if (whose := reported[at][0]) is not None)
        return [
            f"{' and '.join(f'rank {each}' for each in ranks)} have read the same batches in steps 0 and 1, though "
            f"each has a share of its own: {shown.loader} does not distinguish ranks, so the world trains as much as "
            "one rank. Give a sampler that knows ranks (DistributedSampler), split the iterable by session.rank, or "
            "leave the sampler out; where ranks read the same by design, say so: session.steps(..., data=)"
        ]


def _named(rank: Rank | None) -> str:
    return "a standby" if rank is None else f"rank {rank}"
