"""The processes that make shards, and what becomes of them."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import TracebackType
from typing import Self

from regrow.core.errors import DataError, RegrowError
from regrow.core.ids import Seconds
from regrow.data.packing.corpus import Recipe, Shard
from regrow.data.packing.parts import Part
from regrow.data.packing.worker import Answer, At, Failed, serve

_LOOK: Seconds = 0.5
_END: Seconds = 5.0


_NOTHING = At(0, 0, 0)


@dataclass
class PoolWorker:
    """One worker process, and what it is at."""

    process: BaseProcess
    pipe: Connection
    part: Part | None = None
    at: At = _NOTHING


@dataclass
class WorkState:
    """What is done so far. `finished`: shards by number; `bytes` and `tokens` count those at work too."""

    finished: dict[int, Shard] = field(default_factory=dict)
    bytes: int = 0
    tokens: int = 0


class ShardPool:
    """So many processes that make shards in `folder`. They end with this process, whatever it dies of.

    They are started afresh, not forked, so that a tokenizer's threads are no matter.

    Args:
        count: processes.
        folder: the corpus.
        recipe: what it is made of.
        tokenizer: as the user named it.
        lock: a descriptor that each of them keeps open.
    """

    def __init__(self, count: int, folder: Path, recipe: Recipe, tokenizer: str, *, lock: int) -> None:
        self._count, self._lock = count, lock
        self._told = (folder, recipe, tokenizer)
        self._workers: list[PoolWorker] = []

    def __enter__(self) -> Self:
        spawning = multiprocessing.get_context("spawn")
        for _ in range(self._count):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=serve, args=(theirs, *self._told), daemon=True)
            process.start()
            theirs.close()  # so that its end is noticed
            if process.pid is not None:
                send_handle(ours, self._lock, process.pid)
            self._workers.append(PoolWorker(process, ours))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.pipe.close()
            if kind is not None:
                worker.process.kill()  # in the middle of a shard, which would be thrown away
        for worker in self._workers:
            worker.process.join(_END)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(_END)

    def work(self, parts: list[Part]) -> Iterator[WorkState]:
        """Make the shards of all parts; gives the state whenever it has changed, and at least twice a second.

        Raises `DataError` for a malformed input and `RegrowError` where a shard cannot be written or a process dies.
        """
        waiting, done = deque(parts), WorkState()
        for worker in self._workers:
            _give(worker, waiting)
        while any(worker.part is not None for worker in self._workers):
            busy = {worker.pipe: worker for worker in self._workers if worker.part is not None}
            for pipe in wait(list(busy), timeout=_LOOK):
                worker = busy[pipe]  # type: ignore[index]
                answer = _answer(worker)
                if isinstance(answer, At):
                    worker.at = answer
                    continue
                if worker.part is not None:
                    done.finished[worker.part.number] = answer
                    done.bytes += worker.part.weight
                    done.tokens += answer.tokens
                _give(worker, waiting)
            yield WorkState(
                done.finished,
                done.bytes + sum(worker.at.done for worker in self._workers),
                done.tokens + sum(worker.at.tokens for worker in self._workers),
            )


def _give(worker: PoolWorker, waiting: deque[Part]) -> None:
    worker.part, worker.at = (waiting.popleft() if waiting else None), _NOTHING
    if worker.part is None:
        return
    try:
        worker.pipe.send(worker.part)
    except (BrokenPipeError, ConnectionResetError):
        return  # what it said before it ended, or that it died, is read next


def _answer(worker: PoolWorker) -> At | Shard:
    try:
        answer: Answer = worker.pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        raise _died(worker) from error
    if isinstance(answer, Failed):
        if answer.full:
            raise RegrowError(f"a shard cannot be written: {answer.cause}", hint="make room, then run it again")
        raise DataError(answer.cause, hint=answer.hint)
    return answer


def _died(worker: PoolWorker) -> RegrowError:
    worker.process.join(_END)
    code = worker.process.exitcode
    what = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    where = f" while it packed {worker.part.source.name}" if worker.part is not None else ""
    hint = "was the machine out of memory? --workers takes less" if code == -signal.SIGKILL else "see its output above"
    return RegrowError(f"a worker died of {what}{where}", hint=hint)
