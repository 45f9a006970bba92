"""What the writer process does with its orders. Runs alone in a process of its own, so it may block."""

import os
import time
from collections.abc import Sequence

import torch

from regrow.core.messages.checkpoints import (
    AbandonCheckpoint,
    CheckpointWritten,
    FinishCheckpoint,
    PartsWritten,
    WriteCheckpoint,
    WriterFact,
    WriterOrder,
)
from regrow.hydration.copies.segment import Segment
from regrow.hydration.durable.snapshot import SegmentSource
from regrow.hydration.durable.storage import place
from regrow.hydration.durable.writer import abandon, finish, write_parts

torch.set_num_threads(1)


def work(url: str, order: WriterOrder, descriptors: Sequence[int]) -> WriterFact | None:
    """Carry out one order.

    Args:
        url: where checkpoints are kept.
        order: what is to be done.
        descriptors: of the segments with the snapshots of the ranks to be written; closed here.

    Raises:
        RegrowError, OSError: it could not be done; object stores also raise errors of their own.
    """
    match order:
        case WriteCheckpoint():
            began = time.monotonic()
            try:
                sources = [SegmentSource(Segment.attach(f"/proc/self/fd/{each}"), order.step) for each in descriptors]
            finally:
                for each in descriptors:
                    os.close(each)
            nbytes = write_parts(place(url), order.step, order.attempt, sources)
            taken = time.monotonic() - began
            return PartsWritten(order.node, order.attempt, order.step, order.ranks, nbytes, taken)
        case FinishCheckpoint():
            at = place(url)
            folder, nbytes = finish(at, order.step, order.attempt, order.ranks, order.keep)
            return CheckpointWritten(order.node, order.attempt, order.step, at.address(folder), nbytes)
        case AbandonCheckpoint():
            abandon(place(url), order.step, order.attempt)
            return None
