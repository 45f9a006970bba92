"""`steps.<node>.jsonl`: the steps committed by each rank, written by the agent because it outlives the workers."""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from regrow.core.board import BatchShown
from regrow.core.config import record_limits
from regrow.core.ids import Generation, Instant, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.data import BatchRecord, OrderDeclared
from regrow.core.records import OrderStated, Record, StepCommitted
from regrow.core.rotation import RecordLimits, remove_part, rotate

_FORMS_KEPT = 64
"""Number of newest generations that are remembered; by the time more have followed, the end of a worker is known."""
_BLOCK = 1 << 16
KEPT_BYTES = 8 << 20
"""Most bytes of lines kept in memory while nothing can be written; beyond that the oldest lines are dropped."""
_log = logging.getLogger("regrow.agent")


class StepsFile:
    """Appends lines with a buffer. Its owner calls `flush` often and at the end, from one thread at a time.

    Only this agent writes the file. An incomplete last line, left by an agent that was killed, is removed first. A full
    file is set aside, and the oldest of those are removed with the oldest steps.
    """

    def __init__(self, path: Path, limits: RecordLimits | None = None) -> None:
        self._path = path
        self._limits = limits or record_limits()
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._kept = 0
        """Size, in bytes, of `_lines`."""
        self._dropped = 0
        self._failing = self._mended = False

    @property
    def waiting(self) -> bool:
        """True if there are lines to flush."""
        return bool(self._lines)

    def add(self, record: Record) -> None:
        """Write a record as a line, with the time of the wall clock, at the next flush."""
        body = msgspec.json.encode(record)
        if b"null" in body and isinstance(record, StepCommitted):
            # JSON cannot represent NaN and infinity; the reader accepts them as strings.
            body = msgspec.json.encode(_spelled_out(record))
        with self._lock:
            self._keep([body[:-1] + f',"time":{time.time():.6f}}}\n'.encode()])

    def _keep(self, lines: Iterable[bytes], *, first: bool = False) -> None:
        """Keep the newest lines that fit, and count those that are dropped. Call with the lock held."""
        lines = list(lines)
        (self._lines.extendleft(reversed(lines)) if first else self._lines.extend(lines))
        self._kept += sum(map(len, lines))
        while self._kept > KEPT_BYTES:
            self._kept -= len(self._lines.popleft())
            self._dropped += 1

    def flush(self) -> None:
        """Write the lines to the file. After a refusal (a full disk) the lines are kept, as far as there is room.

        The beginning and the end of a time of refusals are logged once each.
        """
        with self._lock:
            lines, self._lines, self._kept = self._lines, deque(), 0
        if not lines:
            return
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self._append(descriptor, b"".join(lines))
                full = 0 < self._limits.part <= os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._failing:
                room = KEPT_BYTES >> 20
                _log.warning("cannot write %s: %s; the newest %d MiB of it are kept", self._path, error, room)
            self._failing = True
            with self._lock:
                self._keep(lines, first=True)
            return
        if self._failing:
            self._failing = False
            with self._lock:
                dropped, self._dropped = self._dropped, 0
            _log.warning("%s is written again; %d lines of it are missing", self._path, dropped)
        if full:
            self._rotate()

    def _rotate(self) -> None:
        try:
            rotate(self._path, self._limits, remove_part)
        except OSError as error:
            _log.warning("cannot set %s aside, so it grows: %s", self._path, error)

    def _append(self, descriptor: int, text: bytes) -> None:
        end = os.fstat(descriptor).st_size
        if not self._mended:
            end = _end_of_lines(descriptor, end)
            os.ftruncate(descriptor, end)
            self._mended = True
        try:
            while text:
                text = text[os.write(descriptor, text) :]
        except OSError:
            os.ftruncate(descriptor, end)  # All lines are written again, so none of them may stay.
            raise


def _spelled_out(record: StepCommitted) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(record)
    metrics = {name: value if math.isfinite(value) else str(value) for name, value in record.metrics.items()}
    return fields | {"metrics": metrics}


def _end_of_lines(descriptor: int, size: int) -> int:
    """Offset after the last complete line of a file of `size` bytes."""
    while size > 0:
        start = max(0, size - _BLOCK)
        newline = os.pread(descriptor, size - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        size = start
    return 0


class LastSeen(NamedTuple):
    """Last information about a worker that has ended.

    `rank_in`: its rank in a generation. `staged`: the metrics of its newest steps, the newest last. `batch`: its last
    read. `committed`: the last step that it reported as committed, with the generation.
    """

    worker: WorkerId
    rank_in: Callable[[Generation], Rank]
    at: Instant
    staged: Sequence[facts.WorkerStaged] = ()
    batch: BatchShown | None = None
    committed: tuple[Generation, StepNo] | None = None

    def open_steps(self) -> "list[_OpenStep]":
        """The step in which the worker was, and earlier ones that it had committed without reporting them."""
        staged = {(each.generation, each.step): each for each in self.staged}
        read = {place: each.data for place, each in staged.items() if each.data is not None}
        if self.batch is not None:
            read[self.batch.generation, self.batch.step] = self.batch.batch
        newest = max(staged.keys() | read.keys(), default=None)
        untold = {place for place, each in staged.items() if each.untold}
        places = [place for place in sorted(untold | {newest}) if self._is_open(place)] if newest is not None else []
        return [self._open_step(place, staged.get(place), read.get(place)) for place in places]

    def _is_open(self, place: tuple[Generation, StepNo]) -> bool:
        return self.committed is None or self.committed < place

    def _open_step(
        self, place: tuple[Generation, StepNo], staged: facts.WorkerStaged | None, read: BatchRecord | None
    ) -> "_OpenStep":
        metrics, parts = ({}, list[BatchRecord]()) if staged is None else (staged.metrics, staged.parts)
        return _OpenStep(self.worker, self.rank_in(place[0]), self.at, *place, metrics, read, parts)


class _OpenStep(NamedTuple):
    worker: WorkerId
    rank: Rank
    died: Instant
    generation: Generation
    step: StepNo
    metrics: dict[str, float]
    data: BatchRecord | None
    parts: list[BatchRecord]


class CommittedSteps:
    """Records of committed steps; decides which steps of a dead worker count as committed.

    A replicated world needs no barrier: when one rank dies in its update, another may have committed the step, and
    then it counts for all. This is decided when the dead rank's generation is replaced: the new one starts after the
    step or with it. In the first case a line is written for the rank (`adopted`), with the metrics that it had staged
    and the record of its reads; in the second the step runs again, and there is no line. The end of a worker may become
    known before or after the start of the next generation. If no generation follows, the step counts if another worker
    of this node has committed it.
    """

    def __init__(self, file: StepsFile) -> None:
        self._file = file
        self._formed: dict[Generation, StepNo] = {}
        """Step with which each generation has started, the oldest first."""
        self._forgotten = Generation(-1)
        """The newest generation that was removed from `_formed`."""
        self._open_steps: list[_OpenStep] = []
        self._reached: dict[Generation, StepNo] = {}
        """Newest step that a worker of this node has committed, by generation."""

    def stated(self, fact: OrderDeclared, at: Instant) -> None:
        """Write a record of the order of a worker's samples, as the worker reports it."""
        self._file.add(OrderStated(at, fact.rank, fact.worker, fact.order))

    def committed(self, fact: facts.WorkerCommitted, rank: Rank) -> None:
        """Write a record of a worker's committed step."""
        if not fact.adopted:
            self._reached[fact.generation] = max(fact.step, self._reached.get(fact.generation, fact.step))
        self._file.add(
            StepCommitted(
                at=fact.at,
                step=fact.step,
                rank=rank,
                worker=fact.worker,
                generation=fact.generation,
                seconds=fact.seconds,
                metrics=fact.metrics,
                samples=fact.samples,
                adopted=fact.adopted,
                data=fact.data,
                parts=fact.parts,
                data_wait=fact.data_wait,
                stall=fact.stall,
            )
        )

    def died(self, last: LastSeen) -> None:
        """Take the last information about a worker that has ended; its open steps wait for the next generation."""
        left_open = [open_step for open_step in last.open_steps() if open_step.generation >= self._forgotten]
        if left_open:
            self._open_steps.extend(left_open)
            self._decide()

    def formed(self, generation: Generation, step: StepNo) -> None:
        """Decide open steps when a generation starts with `state@step`: earlier ones are committed, others are not."""
        self._formed[generation] = step
        self._decide()
        while len(self._formed) > _FORMS_KEPT:
            self._forgotten = min(self._formed)
            del self._formed[self._forgotten]
        self._reached = {number: at for number, at in self._reached.items() if number >= self._forgotten}

    def end(self) -> None:
        """Decide open steps when no generation follows: a step counts if another worker of this node committed it."""
        for open_step in self._open_steps:
            if self._reached.get(open_step.generation, -1) >= open_step.step:
                self._adopt(open_step)
        self._open_steps.clear()

    def _decide(self) -> None:
        for open_step in list(self._open_steps):
            newer = [generation for generation in self._formed if generation > open_step.generation]
            if newer:
                self._open_steps.remove(open_step)
                if self._formed[min(newer)] > open_step.step:
                    self._adopt(open_step)

    def _adopt(self, open_step: _OpenStep) -> None:
        self._file.add(
            StepCommitted(
                at=open_step.died,
                step=open_step.step,
                rank=open_step.rank,
                worker=open_step.worker,
                generation=open_step.generation,
                seconds=Seconds(0.0),
                metrics=open_step.metrics,
                adopted=True,
                data=open_step.data,
                parts=open_step.parts,
            )
        )
