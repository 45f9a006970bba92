"""`steps.<node>.jsonl`: which rank committed which step, written by the agent because it outlives the workers."""

import logging
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from regrow.core.events import StepCommitted
from regrow.core.ids import Generation, Instant, Rank, Seconds, StepNo
from regrow.core.messages import WorkerCommitted, WorkerStaged

_FORMS_KEPT = 64
"""A worker's end is known at the latest so many generations after the one that replaced its own."""
_log = logging.getLogger("regrow.agent")


class StepsFile:
    """Appends lines, buffered: who owns it calls `flush` at short intervals and at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[bytes] = []

    @property
    def waiting(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._lines)

    def add(self, record: StepCommitted) -> None:
        """Write a line, with the wall clock, at the next flush."""
        body = msgspec.json.encode(record)
        self._lines.append(body[:-1] + f',"time":{time.time():.6f}}}\n'.encode())

    def flush(self) -> None:
        """Hand the lines to the operating system. What it refuses (a full disk) is kept for the next time."""
        if not self._lines:
            return
        try:
            with self._path.open("ab") as file:
                file.write(b"".join(self._lines))
        except OSError as error:
            _log.warning("cannot write %s: %s", self._path, error)
            return
        self._lines.clear()


class _Heritage(NamedTuple):
    rank: Rank
    staged: WorkerStaged
    died: Instant


class Ledger:
    """Committed steps, and those that a dead worker had computed but not committed.

    A replicated world needs no barrier: when one rank dies in its update, another may have committed the step, and
    then it counts for all. Whether it does is decided when the dead rank's generation is replaced: the new one starts
    after the step, or with it. The staged metrics are written in the first case (`adopted`), and dropped in the second,
    in which the step runs again. That a worker has died may be known before or after what replaces its generation.
    """

    def __init__(self, file: StepsFile) -> None:
        self._file = file
        self._formed: dict[Generation, StepNo] = {}
        """The state that each generation started with, oldest first."""
        self._forgotten = Generation(-1)
        """The newest generation that is not in `_formed` any more."""
        self._heritage: list[_Heritage] = []

    def committed(self, fact: WorkerCommitted, rank: Rank) -> None:
        """A worker committed a step."""
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
            )
        )

    def died(self, staged: WorkerStaged | None, committed: StepNo | None, rank: Rank, at: Instant) -> None:
        """A worker ended. `staged`: the metrics it showed last; `committed`: the last step that it committed."""
        if staged is None or (committed is not None and committed >= staged.step):
            return
        if staged.generation >= self._forgotten:
            self._heritage.append(_Heritage(rank, staged, at))
            self._settle()

    def formed(self, generation: Generation, step: StepNo) -> None:
        """A new membership goes on from `state@step`: older steps are committed, `step` and later ones are not."""
        self._formed[generation] = step
        self._settle()
        while len(self._formed) > _FORMS_KEPT:
            self._forgotten = min(self._formed)
            del self._formed[self._forgotten]

    def _settle(self) -> None:
        for heir in list(self._heritage):
            newer = [generation for generation in self._formed if generation > heir.staged.generation]
            if newer:
                self._heritage.remove(heir)
                if self._formed[min(newer)] > heir.staged.step:
                    self._adopt(heir)

    def _adopt(self, heir: _Heritage) -> None:
        staged = heir.staged
        self._file.add(
            StepCommitted(
                at=heir.died,
                step=staged.step,
                rank=heir.rank,
                worker=staged.worker,
                generation=staged.generation,
                seconds=Seconds(0.0),
                metrics=staged.metrics,
                adopted=True,
            )
        )
