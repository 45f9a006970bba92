"""Executes the orders of the writer process, one by one. It has a process of its own, so it may block."""

import os
import time
from collections.abc import Sequence
from functools import partial

import torch

from regrow.core.messages.checkpoints import (
    AbandonCheckpoint,
    CheckpointPlace,
    CheckpointWritten,
    FinishCheckpoint,
    PartsWritten,
    WriteCheckpoint,
    WriterFact,
    WriterOrder,
)
from regrow.hydration.copies.segment import Segment
from regrow.hydration.durable.room import Room
from regrow.hydration.durable.snapshot import SegmentSource
from regrow.hydration.durable.storage import place
from regrow.hydration.durable.writer import abandon, finish, write_parts

torch.set_num_threads(1)


def work(where: CheckpointPlace, order: WriterOrder, descriptors: Sequence[int]) -> WriterFact | None:
    """Execute one order.

    Args:
        where: the place of the checkpoints, and their owner.
        order: the order.
        descriptors: descriptors of the segments with the snapshots of the ranks to be written; closed here.

    Raises:
        RegrowError, OSError: the order failed; object stores also raise errors of their own.
    """
    removed: list[str] = []
    match order:
        case WriteCheckpoint():
            began = time.monotonic()
            try:
                sources = [SegmentSource(Segment.attach(f"/proc/self/fd/{each}"), order.step) for each in descriptors]
            finally:
                for each in descriptors:
                    os.close(each)
            at = place(where.url, where.lineage)
            room = Room(at, sum(each.nbytes for each in sources), removed.append)
            write = partial(write_parts, at, order.step, order.attempt, sources)
            nbytes = room.within(write) if order.last else write()
            taken = time.monotonic() - began
            return PartsWritten(order.node, order.attempt, order.step, order.ranks, nbytes, taken, removed)
        case FinishCheckpoint():
            at = place(where.url, where.lineage)
            end = partial(finish, at, order.step, order.attempt, order.ranks, order.keep, refused=order.refused)
            done = Room(at, 0, removed.append).within(end) if order.last else end()
            return CheckpointWritten(
                order.node, order.attempt, order.step, at.address(done.folder), done.nbytes, done.unkept, removed
            )
        case AbandonCheckpoint():
            abandon(place(where.url, where.lineage), order.step, order.attempt)
            return None
