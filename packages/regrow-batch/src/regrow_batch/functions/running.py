"""Runs a Python function over rows: each row has one result, written to a journal as soon as it exists."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from regrow.core.config import state_home
from regrow.core.errors import UsageError
from regrow.core.process.tasks import TaskScope, shared
from regrow_batch.attendance import Attendance
from regrow_batch.functions.calls import CallFailed, CallFeed, CallLine, CallResults, Calls
from regrow_batch.head import BatchHead, HeadPolicy
from regrow_batch.job import (
    BatchOptions,
    end_batch,
    files_written,
    hold_as_written,
    journal_path,
    keep_report,
    kept_report,
    what_is_done,
)
from regrow_batch.journal import SYNC_S, Journal
from regrow_batch.members import address
from regrow_batch.places import exists
from regrow_batch.pool import Pool, PoolPolicy
from regrow_batch.report import BatchReport, sentences
from regrow_batch.rows import RowReading
from regrow_batch.scanning import DONE, OPEN, Scan, hold_to, scan
from regrow_batch.sending import HttpSender
from regrow_batch.tables.files import Table, hold_apart
from regrow_batch.tables.inputs import Digest
from regrow_batch.tables.making import Record, RowMaking, name_of_record, plain, unmade_line
from regrow_batch.tables.outputs import Output
from regrow_batch.tally import Tally

RowFunction = Callable[[Calls, Record], Awaitable[Any]]
_LEAST_AT_ONCE = 64


@dataclass(frozen=True)
class FunctionRows:
    """Records that a function answers, as lines that identify the job.

    Attributes:
        place: name of the source for messages.
        read: reads the records from the first one on, in the same order each time.
        version: of the function.
        name: the column of names.
        is_read_again: the records are read a second time, and may have changed.
    """

    place: str
    read: Callable[[], Iterable[Record]]
    version: str = ""
    name: str = ""
    is_read_again: bool = False

    unit: ClassVar[str] = "record"

    def description(self) -> dict[str, str]:
        """Settings on which the results depend, beside the records."""
        return {"version": self.version} if self.version else {}

    def lines(self, digest: Digest) -> Iterator[bytes]:
        """Each record with its name, as a line."""
        for number, record in enumerate(self.read()):
            line = self.line(number, record)
            digest(line)
            yield line

    def line(self, number: int, record: Record) -> bytes:
        """The line of a record."""
        try:
            name = name_of_record(record, number, RowMaking(name=self.name))
            return msgspec.json.encode({"custom_id": name, "record": plain(record)})
        except ValueError as error:
            return unmade_line("", str(error))


def run(rows: Iterable[Record] | str | Path, function: RowFunction, **options: Any) -> BatchReport:
    """As `arun`, for programs without an event loop."""
    return asyncio.run(arun(rows, function, **options))


async def arun(
    rows: Iterable[Record] | str | Path,
    function: RowFunction,
    *,
    output: str,
    workers: Sequence[str] | Path,
    model: str = "",
    version: str = "",
    columns: str = "",
    journal: str = "",
    id_column: str = "",
    key: str = "",
    pool: PoolPolicy | None = None,
    policy: HeadPolicy | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> BatchReport:
    """Answer each row with a function, and write one result a row. Run it again to resume after an interruption.

    The function is called with `Calls` and the row, for many rows at once. Its return value, which must fit in JSON, is
    the row's result. A `CallFailed` that it raises makes an error row; any other exception ends the batch, and the
    results so far are kept.

    Args:
        rows: mappings; or the path or URL of a table, as for `regrow batch run`.
        function: `async def answer(calls, row)`.
        output: a path or URL; `.parquet` becomes Parquet.
        workers: addresses of servers; or a file that lists them, which is watched.
        model: used for calls that name none.
        version: of the function; results of another version are not resumed.
        columns: of the output; see `regrow batch run --columns`. `result` is what the function returned, as JSON.
        journal: file of the results until all exist; default: beside the output.
        id_column: column of the rows' names; default: `custom_id`, `id`, or their numbers.
        key: API key of the servers.
        pool: limits and waits of the pool.
        policy: limits and retries of the calls.
        say: prints sentences for the user.

    Raises `UsageError`, `BatchStopped` if it may be run again, and the function's exceptions.
    """
    state = state_home() / "batches"
    path = journal_path(output, state, journal)
    is_place = isinstance(rows, str | Path)
    source = FunctionRows(str(rows) if is_place else "rows", _reader(rows), version, id_column, is_place)
    hold_apart(source.place if is_place else "rows://", files_written(output, state, journal))
    found = await asyncio.to_thread(scan, source)
    given = BatchOptions(
        input=source.place,
        output=output,
        reading=RowReading(),
        state=state,
        pool=pool or PoolPolicy(),
        head=policy or HeadPolicy(),
        key=key,
        journal=journal,
    )
    writing = Output(output, source, columns)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists() and exists(output):
        raise UsageError(f"{output} is there already, and no journal belongs to it", hint="choose another output")
    print_of = {"the input": f"{found.size} bytes with the digest {found.digest[:16]}", "--model": model}
    kept = Journal.open(path, print_of | source.description())
    try:
        if kept.head.rows and exists(output):
            hold_as_written(kept.head, output)
            return kept_report(kept, output)
        tally, spent = what_is_done(found, kept), Pool(given.pool)
        if tally.left:
            await _Running(given, source, found, kept, tally, spent).run(function, workers, model, say)
        report = end_batch(given, writing, found, kept, tally, [*spent.workers.values(), *spent.departed])
        for sentence in [*sentences(report), *keep_report(given, kept.path, report)]:
            say(sentence)
        return report
    finally:
        kept.close()


def _reader(rows: Iterable[Record] | str | Path) -> Callable[[], Iterable[Record]]:
    if isinstance(rows, str | Path):
        return Table(str(rows)).records
    held: list[Record] = list(rows)
    return lambda: held


class _Running:
    """One run over the rows that remain."""

    def __init__(
        self, options: BatchOptions, source: FunctionRows, found: Scan, journal: Journal, tally: Tally, pool: Pool
    ) -> None:
        self._options, self._source, self._found = options, source, found
        self._journal, self._tally, self._pool = journal, tally, pool

    async def run(
        self, function: RowFunction, workers: Sequence[str] | Path, model: str, say: Callable[[str], None]
    ) -> None:
        """Run until each row has its result. Raises `BatchStopped`, and the function's exceptions."""
        self._function = function
        line = self._line = CallLine(model)
        calls = Tally(rows=0, began=time.monotonic())
        async with HttpSender.open(timeout=self._options.head.timeout, key=self._options.key) as sender:
            head = BatchHead(
                CallFeed(line),
                line.states,
                pool=self._pool,
                sender=sender,
                journal=CallResults(line, self._journal.path),
                tally=calls,
                policy=self._options.head,
            )
            attendance = Attendance(self._pool, grace=self._options.head.grace, changed=head.changed, say=say)
            if isinstance(workers, Path):
                attendance.look(workers)
            else:
                for url in workers:
                    attendance.join(address(url, "workers"))
            async with TaskScope() as scope:
                if isinstance(workers, Path):
                    scope.start(attendance.watch(workers))
                scope.start(self._wake(head))
                scope.start(self._sync_often())
                scope.start(self._rows())
                await head.run()
        self._journal.flush()
        self._tally.tokens.add(calls.tokens)
        self._tally.retries.update(calls.retries)

    async def _wake(self, head: BatchHead) -> None:
        """Wake the head for each new call."""
        while True:
            await self._line.wanted.wait()
            self._line.wanted.clear()
            head.changed()

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(self._journal.sync)

    async def _rows(self) -> None:
        """Start rows as others end; the first exception of the function cancels them all."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            for number, record in enumerate(self._source.read()):
                if self._source.is_read_again:
                    hold_to(self._found, number, number + 1, self._source.line(number, record))
                if self._found.states[number] == OPEN:
                    while len(under_way) >= max(_LEAST_AT_ONCE, 2 * self._pool.room):
                        await self._one_ends(under_way)
                    under_way.add(shared(self._row(number, record)))
            while under_way:
                await self._one_ends(under_way)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
        self._line.close()

    @staticmethod
    async def _one_ends(under_way: set[asyncio.Task[None]]) -> None:
        """Wait until at least one has ended. Raises its exception."""
        ended, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        under_way -= ended
        for task in ended:
            task.result()

    async def _row(self, number: int, record: Record) -> None:
        calls = Calls(self._line)
        line: dict[str, Any] = {"id": f"batch_req_{number}", "custom_id": self._name(record, number), "response": None}
        try:
            line |= {"error": None, "result": plain(await self._function(calls, record))}
        except CallFailed as failure:
            line["error"] = {"code": failure.code, "message": failure.cause, "fault": failure.fault}
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the batch ends
            # Re-raised, it would end this task silently, and the batch would wait for the row forever.
            raise UsageError(
                f"the function was cancelled at {line['custom_id']!r}",
                hint="a task that it awaited was cancelled: catch asyncio.CancelledError there",
            ) from error
        line["spent"] = calls.spent
        self._found.states[number] = DONE
        self._journal.append(number, msgspec.json.encode(line))
        self._journal.flush()
        self._tally.result(time.monotonic(), error=line["error"] is not None)

    def _name(self, record: Record, number: int) -> str:
        return name_of_record(record, number, RowMaking(name=self._source.name))
