"""The worker's part in durable checkpoints: a copy in shared memory when it is asked for one, and reading them back.

When they are written is decided by `membership.checkpoints`; the agent's writer process writes them.
"""

import logging
from collections.abc import Callable

import msgspec

from regrow.core.ids import Rank, StepNo, WorkerId
from regrow.core.messages.checkpoints import SnapshotForDisk
from regrow.hydration.copies.segment import NoMemoryForCopy, Segment
from regrow.hydration.durable.reader import latest, load
from regrow.hydration.durable.snapshot import take
from regrow.hydration.durable.storage import place
from regrow.hydration.inventory import TensorEntry
from regrow.train.state.protected import ProtectedState

_log = logging.getLogger("regrow")


class DurableState:
    """Durable checkpoints of this worker's state.

    Args:
        worker: whose.
        url: where they are kept: a path, or a URL that fsspec knows.
        send: tells the agent.
    """

    def __init__(self, worker: WorkerId, url: str, *, send: Callable[[SnapshotForDisk], None]) -> None:
        self._worker, self._url, self._send = worker, url, send
        self._segment: Segment | None = None

    def snapshot(self, state: ProtectedState, asked: StepNo, step: StepNo, rank: Rank) -> None:
        """Put `state@step` into shared memory and say so. Training waits for the copy, and for nothing else.

        Args:
            state: stands still meanwhile.
            asked: the step that was ordered; this worker may have passed it.
            step: where the state stands.
            rank: whose part it will be.
        """
        state.state_at = step
        holding = state.layout()
        try:
            if self._segment is None:
                self._segment = Segment.create()
            nbytes = take(self._segment, state, step, rank, holding)
        except NoMemoryForCopy as error:
            reason = f"rank {rank} has no memory for a snapshot: {error}"
            self._send(SnapshotForDisk(self._worker, rank, holding, asked, step, -1, 0, reason))
            return
        self._send(SnapshotForDisk(self._worker, rank, holding, asked, step, self._segment.descriptor, nbytes))

    def load(self, state: ProtectedState, rank: Rank) -> StepNo:
        """Load this worker's part of the newest checkpoint; its step, or 0 where there is none.

        The checkpoint may have been written by a world of another size, or divided in another way.
        Raises `CheckpointError`, `StateError`, `UsageError`.
        """
        at = place(self._url)
        found = latest(at)
        if found is None:
            return StepNo(0)
        _, folder = found
        step = load(state, at, folder, holding=state.layout(), rank=rank, piece=_pieces(state))
        _log.info("state@%d read from %s", step, at.address(folder))
        return step


def _pieces(state: ProtectedState) -> Callable[[TensorEntry], TensorEntry]:
    """Says which piece of a tensor of a checkpoint this worker has."""
    find = state.finder()

    def piece(entry: TensorEntry) -> TensorEntry:
        own = find(entry.name)
        if own is None:
            return entry
        here = TensorEntry.of(entry.name, own)
        if (here.whole or here.shape) != (entry.whole or entry.shape):
            return entry  # an optimizer's number for a parameter, or what does not fit and will be refused
        itemsize = entry.nbytes // max(1, _elements(entry))
        return msgspec.structs.replace(here, dtype=entry.dtype, nbytes=_elements(here) * itemsize)

    return piece


def _elements(entry: TensorEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return count
