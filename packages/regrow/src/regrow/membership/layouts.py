"""Check that workers have built the same model."""

from regrow.core.ids import Rank
from regrow.membership import diagnosis as say
from regrow.membership.roster import WorkerRecord


class Layouts:
    """Digests of reduction layout and state names, which all workers for one place must share.

    Args:
        unit: ranks of one replica.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._known: dict[Rank, str] = {}

    def forget(self) -> None:
        """Accept any layout, because all workers are started anew."""
        self._known.clear()

    def place(self, rank: Rank | None) -> Rank:
        """A rank's place in its replica: ranks with the same place have the same part of the state."""
        rank = Rank(0) if rank is None else rank
        return rank if self._unit == 1 else Rank(rank % self._unit)

    def fits(self, worker: WorkerRecord) -> bool:
        """True if a worker has built the same model as those before it."""
        # Where ranks have different parts, a worker is compared with the rank for which it was built.
        key = self.place(worker.built_for) if worker.sharded else Rank(0)
        return self._known.setdefault(key, worker.layout) == worker.layout

    def differs(self, worker: WorkerRecord) -> str:
        """Message about a worker that has built another model than those before it."""
        text = say.layout_differs(worker.worker, worker.rank)
        if not worker.sharded or self._unit == 1:
            return text
        return f"{text}; or is a replica not {self._unit} ranks (--replica-ranks)?"
