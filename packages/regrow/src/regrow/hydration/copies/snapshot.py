"""The worker's side of copies: puts `state@n` into shared memory between two steps, as fast as memory can be copied.

Two segments are used in turn. The newest complete copy is never overwritten, so it survives a worker that dies while it
writes the next. The bytes are not checksummed here, where training waits: the agent does that during the next step.
"""

import logging
import threading
import time
from collections.abc import Callable

import msgspec
import torch

from regrow.core.errors import DeadlineExceeded, NoMemoryForCopy
from regrow.core.ids import Instant, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.copies import SnapshotTaken
from regrow.devices.accelerators import on_accelerator
from regrow.hydration.copies.segment import Segment, layout
from regrow.hydration.inventory import Inventory, StateSource
from regrow.hydration.memory import copy_from_devices
from regrow.hydration.shards import local

_SEGMENTS = 2
_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()


def fill(room: memoryview, source: StateSource, inventory: Inventory) -> None:
    """Copy all tensors of an inventory to their places by `segment.layout`, from any device and with any strides."""
    offsets, _ = layout(entry.nbytes for entry in inventory.entries)
    if not len(room):
        return
    space = torch.frombuffer(room, dtype=torch.uint8)
    there: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for entry, offset in zip(inventory.entries, offsets, strict=True):
            if entry.nbytes:
                tensor = local(source.tensor(entry.name)).detach()
                place = space[offset : offset + entry.nbytes]
                if on_accelerator(tensor):
                    there[entry.name] = place
                else:
                    place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        copy_from_devices(lambda name: local(source.tensor(name)), there)


class SnapshotKeeper:
    """Takes copies of a worker's state, and knows which of them its agent has stored.

    `take`, `wait_stored` and `rewind` are for the training thread; `stored` and `wake` for the control thread.

    Args:
        worker: id of the worker.
        send: sends a fact to the agent.
        warn: gets one text for people when there are no copies, with the reason; by default the log.
    """

    def __init__(
        self, worker: WorkerId, *, send: Callable[[SnapshotTaken], None], warn: Callable[[str], None] = _log.warning
    ) -> None:
        self._worker = worker
        self._send = send
        self._warn = warn
        self._segments: list[Segment] = []
        self._changed = threading.Condition()
        self._waiting: StepNo | None = None
        self._warned: set[str] = set()
        self._newest: StepNo | None = None
        self.took: Seconds = 0.0
        """Time by which the last `take` delayed the training."""

    @property
    def newest(self) -> StepNo | None:
        """The step of the newest copy; None if there is none."""
        return self._newest

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory in use."""
        return sum(segment.size for segment in self._segments)

    def take(
        self, source: StateSource, step: StepNo, rank: Rank, holding: str, *, asked: bool = False
    ) -> SnapshotTaken | None:
        """Copy `state@step`, which must not change meanwhile, and send the fact to the agent.

        Returns that fact; None if there is no memory for a copy, which is reported once: training goes on without it.
        Raises `StateError` if the state is at another step.
        """
        began = time.monotonic()
        inventory = source.inventory(step)
        _, payload = layout(entry.nbytes for entry in inventory.entries)
        try:
            segment = self._free_segment(step)
            room = segment.begin(rank, holding, _encoder.encode(inventory), payload)
        except NoMemoryForCopy as error:
            self._say("room", f"rank {rank} has no copy of its state in shared memory: {error}")
            return None
        fill(room, source, inventory)
        del room
        with self._changed:
            self._waiting = self._newest = step
        segment.publish(step)
        self.took = time.monotonic() - began
        fact = SnapshotTaken(self._worker, rank, holding, step, segment.descriptor, inventory.nbytes, asked)
        self._send(fact)
        return fact

    def stored(self, step: StepNo, error: str = "") -> None:
        """Note the agent's answer to a copy (`SnapshotStored`)."""
        if error:
            self._say("buddy", f"copies of the state stay on this node alone: {error}")
        else:
            self._warned.discard("buddy")
        with self._changed:
            if self._waiting is not None and step >= self._waiting:
                self._waiting = None
            self._changed.notify_all()

    def wait_stored(self, deadline: Instant, *, halted: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the newest copy is stored at its destination; returns at once if no copy is pending.

        Args:
            deadline: on the monotonic clock.
            halted: ends the wait when it returns True; checked whenever `wake` is called.

        Returns False when halted. Raises `DeadlineExceeded`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None or halted(), max(0.0, deadline - time.monotonic()))
            if self._waiting is None:
                return True
            if halted():
                return False
            raise DeadlineExceeded(
                f"the agent did not confirm in time that it has stored the copy of state@{self._waiting}",
                hint="is the node short of memory, or its agent stopped?",
            )

    def wake(self) -> None:
        """Have `wait_stored` check `halted` again."""
        with self._changed:
            self._changed.notify_all()

    def rewind(self, step: StepNo) -> None:
        """Void all copies of steps after `state@step`, from which training goes on; nobody waits for them any more."""
        with self._changed:
            for segment in self._segments:
                if segment.step > step:
                    segment.void()
            whole = [segment.step for segment in self._segments if segment.step >= 0]
            self._newest = StepNo(max(whole)) if whole else None
            if self._waiting is not None and self._waiting > step:
                self._waiting = None
            self._changed.notify_all()

    def close(self) -> None:
        """Release the memory; the agent keeps segments that it has opened."""
        with self._changed:
            self._segments.clear()
            self._newest = self._waiting = None
            self._changed.notify_all()

    def _free_segment(self, step: StepNo) -> Segment:
        """The segment to overwrite: one without a copy, or with this step or a later one; else the oldest."""
        void = [segment for segment in self._segments if not 0 <= segment.step < step]
        if void:
            return void[0]
        if len(self._segments) < _SEGMENTS:
            self._segments.append(Segment.create())
            return self._segments[-1]
        return min(self._segments, key=lambda segment: segment.step)

    def _say(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self._warn(text)
