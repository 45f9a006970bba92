"""The worker's part in durable checkpoints: a copy in shared memory on request, and reading checkpoints back.

`membership.checkpoints` decides when they are written; the agent's writer process writes them.
"""

import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from regrow.core.errors import CheckpointError, NoMemoryForCopy, UsageError
from regrow.core.ids import NO_STATE, Rank, StepNo, WorkerId
from regrow.core.messages.checkpoints import SnapshotForDisk
from regrow.core.messages.lineage import Lineage
from regrow.hydration.copies.segment import Segment
from regrow.hydration.durable.catalog import look
from regrow.hydration.durable.reader import load
from regrow.hydration.durable.snapshot import take
from regrow.hydration.durable.storage import place
from regrow.hydration.inventory import TensorEntry
from regrow.train.state.protected import ProtectedState

_log = logging.getLogger("regrow")


class Read(NamedTuple):
    """The step that was read: 0 if there is no checkpoint, `NO_STATE` if none of those there could be read.

    `refused`: the steps of newer checkpoints, and the reasons why they could not be read.
    """

    step: StepNo
    refused: dict[StepNo, str]


class DurableState:
    """Durable checkpoints of this worker's state.

    Args:
        worker: this worker.
        url: folder of the checkpoints: a path, or a URL that fsspec knows.
        lineage: identifies the training: checkpoints of others are not read.
        send: sends a fact to the agent.
    """

    def __init__(
        self, worker: WorkerId, url: str, lineage: Lineage, *, send: Callable[[SnapshotForDisk], None]
    ) -> None:
        self._worker, self._url, self._lineage, self._send = worker, url, lineage, send
        self._segment: Segment | None = None

    def snapshot(self, state: ProtectedState, asked: StepNo, step: StepNo, rank: Rank) -> None:
        """Put `state@step` into shared memory and report it. Training waits for the copy only.

        Args:
            state: must not change meanwhile.
            asked: the step that was ordered; this worker may have passed it.
            step: the step at which the state is.
            rank: the rank whose part this is.
        """
        state.state_at = step
        holding = state.layout()
        try:
            if self._segment is None:
                self._segment = Segment.create()
            nbytes = take(self._segment, state, step, rank, holding)
        except (NoMemoryForCopy, UsageError) as error:  # `UsageError`: a step has added an object that has no state
            short = isinstance(error, NoMemoryForCopy)
            reason = f"rank {rank} has no memory for a snapshot: {error}" if short else error.cause
            self._send(SnapshotForDisk(self._worker, rank, holding, asked, step, -1, 0, reason))
            return
        self._send(SnapshotForDisk(self._worker, rank, holding, asked, step, self._segment.descriptor, nbytes))

    def load(self, state: ProtectedState, rank: Rank, avoid: Collection[StepNo] = ()) -> Read:
        """Load this worker's part of the newest checkpoint that can be read, from the newest downwards.

        The checkpoint may have been written by a world of another size, or divided in another way. The coordinator
        checks that all ranks have read the same one.

        Args:
            state: the state to load into. After `NO_STATE` some of it may have been overwritten.
            rank: this worker's rank.
            avoid: steps that some rank could not read.

        Raises `StateError` if the script builds another model, `UsageError` if the place cannot be used.
        """
        at = place(self._url, self._lineage)
        refused: dict[StepNo, str] = {}
        for found in look(at).own(self._lineage):
            if found.step in avoid or found.step in refused:
                continue
            try:
                step = load(state, at, found.folder, holding=state.layout(), rank=rank, piece=_pieces(state))
            except CheckpointError as error:
                refused[found.step] = str(error)
                _log.warning("%s", error)
                continue
            _log.info("state@%d read from %s", step, at.address(found.folder))
            return Read(step, refused)
        return Read(NO_STATE if refused else StepNo(0), refused)


def _pieces(state: ProtectedState) -> Callable[[TensorEntry], TensorEntry]:
    """Returns a function that gives the piece of a checkpoint's tensor that this worker has."""
    find = state.finder()

    def piece(entry: TensorEntry) -> TensorEntry:
        own = find(entry.name)
        if own is None:
            return entry
        here = TensorEntry.of(entry.name, own)
        if (here.whole or here.shape) != (entry.whole or entry.shape):
            return entry  # an optimizer's number for a parameter, or a tensor that does not fit and will be refused
        itemsize = entry.nbytes // max(1, _elements(entry))
        return msgspec.structs.replace(here, dtype=entry.dtype, nbytes=_elements(here) * itemsize)

    return piece


def _elements(entry: TensorEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return count
