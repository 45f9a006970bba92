"""Runs a batch from its options to its output: reads the input, opens the journal, runs the head, writes the output."""

import asyncio
import gc
import hashlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from regrow.core.errors import UsageError
from regrow.core.exit_codes import ERRORS_NOT_THEIRS, OK
from regrow.core.ids import Seconds
from regrow.core.process.tasks import TaskScope
from regrow_batch import control
from regrow_batch.account.metrics import exposition
from regrow_batch.account.prices import Prices
from regrow_batch.again import send_again
from regrow_batch.attendance import Attendance
from regrow_batch.head import BatchHead, HeadPolicy
from regrow_batch.journal import Journal
from regrow_batch.metrics_endpoint import serve_metrics
from regrow_batch.places import BatchStopped, exists, local_path, partial_of, size_of
from regrow_batch.pool import Pool, PoolPolicy, PoolWorker
from regrow_batch.progress import LIVE_S, BatchProgress
from regrow_batch.records import JournalHead
from regrow_batch.report import BatchReport, OutputCount, draw, sentences, this_run, workers_of
from regrow_batch.rows import RowReading
from regrow_batch.scanning import DONE, OPEN, Feed, Scan, hold_to, scan
from regrow_batch.sending import HttpSender
from regrow_batch.servers.spawned import SpawnedWorkers
from regrow_batch.tables.files import hold_apart
from regrow_batch.tables.inputs import source_of
from regrow_batch.tables.making import EMBEDDINGS, RowMaking
from regrow_batch.tables.outputs import Output
from regrow_batch.tally import Tally

DRAWN_FROM_S: Seconds = 5.0
"""A shorter run gets no picture: it would show nothing."""
_REPORT, _PICTURE = ".summary.json", ".summary.png"


@dataclass(frozen=True)
class BatchOptions:
    """Arguments of a batch.

    Attributes:
        input, output: paths or URLs.
        reading: how rows are read.
        workers: addresses with their caps; 0: the pool's.
        workers_file: a file that lists workers, and is watched.
        spawn, spawn_count: a command that starts a worker, and how many to start.
        listen: the address at which workers on other machines may register.
        token: the token that they must send there.
        pool: limits and waits of the pool.
        head: limits and retries of the head.
        key: the API key that is sent to workers.
        strict: whether an invalid line, or a repeated one, stops the job before it begins.
        quiet: whether progress is not shown.
        state: a folder for journals of outputs that are URLs.
        shape: how records become rows, and results a table.
        journal: where the journal is; empty: see `journal_path`.
        prices: of tokens; None: no cost is reported.
        metrics: the address that Prometheus may scrape.
        again: reasons of the error rows that are sent again; none: no row is.
    """

    input: str
    output: str
    reading: RowReading
    state: Path
    workers: dict[str, int] = field(default_factory=dict)
    workers_file: Path | None = None
    spawn: str = ""
    spawn_count: int = 1
    listen: tuple[str, int] | None = None
    token: str = ""
    pool: PoolPolicy = field(default_factory=PoolPolicy)
    head: HeadPolicy = field(default_factory=HeadPolicy)
    key: str = ""
    strict: bool = False
    quiet: bool = False
    shape: "TableOptions" = field(default_factory=lambda: TableOptions())
    journal: str = ""
    prices: Prices | None = None
    metrics: tuple[str, int] | None = None
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableOptions:
    """Parameters of turning records into rows, and results into a table.

    Attributes:
        making: how a record becomes a row.
        split: of a data set.
        columns: of the output, as `columns.chosen` reads them; empty: the usual ones of its kind.
    """

    making: RowMaking = field(default_factory=RowMaking)
    split: str = "train"
    columns: str = ""


def journal_path(output: str, state: Path, journal: str = "") -> Path:
    """Journal of an output: `journal` if given, else a file beside the output; for a URL, a file in `state`."""
    if journal:
        return Path(journal)
    path = local_path(output)
    if path is not None:
        return path.with_name(f"{path.name}.journal")
    return state / f"{hashlib.sha256(output.encode()).hexdigest()[:24]}.journal"


def endpoint_path(output: str, state: Path) -> Path:
    """File in which a running head publishes its address."""
    return journal_path(output, state).with_suffix(".control")


def files_written(output: str, state: Path, journal: str = "") -> list[Path]:
    """All files on this machine that a batch writes."""
    path, kept = local_path(output), journal_path(output, state, journal)
    beside = [kept, kept.with_suffix(_REPORT), kept.with_suffix(_PICTURE), endpoint_path(output, state)]
    return beside if path is None else [path, partial_of(path.resolve()), *beside]


def fingerprint(found: Scan, reading: RowReading) -> dict[str, str]:
    """Inputs on which the results depend, by the names that the user knows."""
    return {
        "the input": f"{found.size} bytes with the digest {found.digest[:16]}",
        "--model": reading.model,
        "--endpoint": reading.url,
        "--end-loops": "given" if reading.ends_loops else "",
        **found.source.description(),
    }


def run_batch(options: BatchOptions, show: "Callable[[Pool, Tally], BatchProgress]") -> int:
    """Run a batch to its end, and return the exit code. Raises `UsageError`, and `BatchStopped` if it may be run again.

    Args:
        options: the arguments.
        show: makes the progress display.
    """
    path = journal_path(options.output, options.state, options.journal)
    hold_apart(options.input, files_written(options.output, options.state, options.journal))
    found = scan(source_of(options.input, options.shape.making, split=options.shape.split))
    if options.strict and found.complaints:
        count = found.malformed + found.repeated
        raise UsageError(f"{count:,} lines are no rows, or repeat one: {'; '.join(found.complaints)}")
    output = Output(options.output, found.source, options.shape.columns, embeddings=options.reading.url == EMBEDDINGS)
    if local_path(options.output) is None:
        endpoint_path(options.output, options.state).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists() and exists(options.output):
        raise UsageError(
            f"{options.output} is there already, and no journal belongs to it", hint="choose another -o, or remove it"
        )
    journal = Journal.open(path, fingerprint(found, options.reading))
    try:
        return _with_journal(options, found, journal, output, show)
    finally:
        journal.close()


def _with_journal(
    options: BatchOptions, found: Scan, journal: Journal, output: Output, show: "Callable[[Pool, Tally], BatchProgress]"
) -> int:
    pool = Pool(options.pool)
    if journal.head.rows and not exists(options.output):
        raise UsageError(
            f"{options.output} is missing, though {journal.path} records that it was written",
            hint="remove the journal to begin anew",
        )
    hold_as_written(journal.head, options.output)
    again = send_again(journal, options.output, options.again) if options.again else Counter[str]()
    if journal.head.rows:
        said, code = _as_before(journal.head, options.output)
        show(pool, Tally(found.rows)).say(said)
        return code
    tally = what_is_done(found, journal)
    with show(pool, tally) as progress:
        for reason, count in again.most_common():
            progress.say(f"sent again: {count:,} rows with the error {reason}")
        for complaint in found.complaints:
            progress.say(f"left out: {complaint}")
        if (more := found.malformed + found.repeated - len(found.complaints)) > 0:
            progress.say(f"left out: {more:,} lines more")
        if journal.torn:
            progress.say(f"{journal.path} has {journal.torn:,} torn lines: those rows are sent again")
        if tally.before:
            progress.say(f"{tally.before:,} of {tally.rows:,} rows are in {journal.path}; the others are sent")
        if tally.left:
            asyncio.run(_run_head(options, found, journal, pool, tally, progress))
    report = end_batch(options, output, found, journal, tally, [*pool.workers.values(), *pool.departed])
    for sentence in [*sentences(report), *keep_report(options, journal.path, report)]:
        progress.say(sentence)
    return _code(report.unproven_rows)


def hold_as_written(head: JournalHead, output: str) -> None:
    """Raise `UsageError` where a written output has changed its size: it may be cut off, or be another batch's."""
    size = size_of(output)
    if head.size and size != head.size:
        raise UsageError(
            f"{output} has {size:,} bytes, and had {head.size:,} when it was written",
            hint="put it back; or remove it and its journal to begin anew",
        )


def _as_before(head: JournalHead, output: str) -> tuple[str, int]:
    """Message about a batch that is already done, and the exit code."""
    said = f"{head.rows:,} rows are in {output} already"
    if head.unproven:
        said += f"; {head.unproven:,} error rows are not known to be their own fault: --retry-errors sends them again"
    return said, _code(head.unproven)


def _code(unproven: int) -> int:
    """0 only if each row was answered, or refused by its own fault."""
    return ERRORS_NOT_THEIRS if unproven else OK


def what_is_done(found: Scan, journal: Journal) -> Tally:
    """Mark the rows that have results, and count them."""
    count = OutputCount()
    for number, _, result in journal.rows():
        if number < len(found.states) and found.states[number] == OPEN:
            found.states[number] = DONE
            count.take(result)
    return Tally(
        found.rows, before=found.done, began=time.monotonic(), errors=count.errors, degenerate=count.degenerate
    )  # fmt: skip


async def _run_head(
    options: BatchOptions, found: Scan, journal: Journal, pool: Pool, tally: Tally, progress: BatchProgress
) -> None:
    """Run the head together with its companion tasks."""
    async with HttpSender.open(timeout=options.head.timeout, key=options.key) as sender:
        feed = Feed(found, options.reading)
        head = BatchHead(
            feed, found.states, pool=pool, sender=sender, journal=journal, tally=tally, policy=options.head
        )  # fmt: skip
        attendance = Attendance(pool, grace=options.head.grace, changed=head.changed, say=progress.say)
        for url, cap in options.workers.items():
            attendance.join(url, cap)
        if options.workers_file is not None:
            attendance.look(options.workers_file)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, head.stop)
        if options.workers_file is not None:
            loop.add_signal_handler(signal.SIGHUP, attendance.look_again, options.workers_file)
        endpoint = endpoint_path(options.output, options.state)
        async with control.serve(endpoint, pool, attendance, listen=options.listen, token=options.token) as url:
            beside = [_refresh(progress), attendance.watch_leases()]
            if options.workers_file is not None:
                beside.append(attendance.watch(options.workers_file))
            if options.metrics is not None:
                said = partial(exposition, pool, tally, prices=options.prices)
                beside.append(serve_metrics(options.metrics, lambda: said(now=time.monotonic()), progress.say))
            if options.listen is not None:
                progress.say(f"workers of other machines may announce themselves at {url}")
            if options.spawn:
                head_at = url if options.listen is not None else _named(options.output)
                spawned = SpawnedWorkers(
                    options.spawn,
                    options.spawn_count,
                    attendance,
                    head=head_at,
                    logs=journal.path.with_suffix(".servers"),
                    grace=options.head.grace,
                    say=progress.say,
                )
                beside.append(spawned.run())
            _collect_seldom()
            async with TaskScope() as scope:  # a companion ends before the head only by an error, which ends the batch
                for each in beside:
                    scope.start(each)
                await head.run()


def _named(output: str) -> str:
    """The output's path or URL, valid in another working directory too."""
    path = local_path(output)
    return output if path is None else str(path.absolute())


def _collect_seldom() -> None:
    """Collect garbage seldom: answers are many short objects with few cycles; the default costs a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


async def _refresh(progress: BatchProgress) -> None:
    while True:
        progress.show()
        await asyncio.sleep(LIVE_S)


# --- the end -----------------------------------------------------------------------------------------------------


def end_batch(
    options: BatchOptions, output: Output, found: Scan, journal: Journal, tally: Tally, workers: list[PoolWorker]
) -> BatchReport:
    """Make the output from the journal, and the report of both."""
    seconds, rate, tokens = this_run(tally, time.monotonic())
    count = OutputCount()
    written = output.write(
        _whole(journal, found), count.take, lambda number, line: hold_to(found, number, number + 1, line.strip())
    )
    journal.end(written, count.unproven, keep=not output.has_lines, size=size_of(output.place))
    return BatchReport(
        output=output.place,
        rows=written,
        error_rows=count.errors,
        degenerate_rows=count.degenerate,
        ended_early=tally.ended,
        tokens=count.tokens.answer,
        malformed_lines=found.malformed,
        repeated_lines=found.repeated,
        complaints=found.complaints,
        seconds=seconds,
        rows_this_run=tally.done,
        rows_per_s=rate,
        tokens_per_s=tokens,
        retries=dict(tally.retries),
        workers=workers_of(workers, options.prices),
        bucket_s=tally.width,
        buckets=tally.buckets,
        serving=tally.workers,
        unproven_rows=count.unproven,
        errors=count.reasons,
        spent=count.tokens,
        models=dict(count.models),
        penalties=dict(count.penalties),
        finished=dict(tally.finished),
        cost=options.prices.of(count.tokens) if options.prices is not None else None,
    )


def _whole(journal: Journal, found: Scan) -> Iterator[tuple[int, bytes]]:
    """The result of each row. Raises `BatchStopped` after the last one if some are missing: then no output is made."""
    written = 0
    for result in journal.results(len(found.states)):
        yield result
        written += 1
    if written != found.rows:
        raise BatchStopped(
            f"{journal.path} has {written:,} of {found.rows:,} rows: it was changed from outside",
            hint="run the same command again",
        )


def kept_report(journal: Journal, output: str) -> BatchReport:
    """The report of a batch that is already done. Raises `UsageError` if it is no longer beside the journal."""
    path = journal.path.with_suffix(_REPORT)
    try:
        return msgspec.json.decode(path.read_bytes(), type=BatchReport)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"{output} is written, and its summary {path} cannot be read: {error}", hint="read the output itself"
        ) from error


def keep_report(options: BatchOptions, journal: Path, report: BatchReport) -> list[str]:
    """Write the report and its picture beside the journal; returns a sentence for each that could not be written."""
    try:
        journal.with_suffix(_REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        if report.seconds >= DRAWN_FROM_S:
            journal.with_suffix(_PICTURE).write_bytes(draw(report))
    except UsageError:
        return []  # matplotlib is optional
    except OSError as error:
        return [f"the summary beside {journal} cannot be written: {error.strerror}"]
    return []
