"""`regrow batch`: inference over the rows of a file, with workers that come and go."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from regrow.core.config import read_key, read_token, state_home
from regrow.core.errors import UsageError
from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.flags import TIME
from regrow.core.hosts import ANY, place_to_listen

NOT_THEIRS = "not-theirs"

if TYPE_CHECKING:
    from regrow_batch.job import BatchOptions, TableOptions


_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option("-o", "--output", required=True, metavar="FILE|URL", help="File or URL for the results."),
    click.option("--workers", default="", metavar="URL,...", help="OpenAI-compatible servers."),
    click.option(
        "--workers-file", type=click.Path(path_type=Path), metavar="FILE", help="A list of them, which is watched."
    ),
    click.option(
        "--spawn",
        default="",
        metavar="CMD",
        help="Starts a worker here; {port} stands for its port. Or, with {head}, one that announces itself.",
    ),
    click.option(
        "--spawn-count", type=click.IntRange(min=1), default=1, metavar="N", help="Number of these workers.  [1]"
    ),
    click.option(
        "--listen", default="", metavar="[HOST:]PORT", help="Workers of other machines may announce themselves there."
    ),
    click.option("--token-file", default="", metavar="FILE", help="Their secret; or REGROW_TOKEN."),
    click.option("--per-worker", type=click.IntRange(min=1), default=32, metavar="N", help="Rows at once.  [32]"),
    click.option("--model", default="", metavar="NAME", help="Ask for this model instead of each row's own."),
    click.option("--endpoint", default="", metavar="PATH", help="Send rows there instead of to each row's own url."),
    click.option("--end-loops", is_flag=True, help="Stream answers, and end those that run in circles."),
    click.option(
        "--affinity",
        type=click.IntRange(min=0),
        default=0,
        metavar="BYTES",
        help="Rows whose prompts have the same first BYTES prefer the same worker.  [0: none]",
    ),
    click.option("--timeout", type=TIME, default="10min", metavar="TIME", help="Time limit of one attempt.  [10min]"),
    click.option("--attempts", type=click.IntRange(min=1), default=8, metavar="N", help="Attempts for one row.  [8]"),
    click.option(
        "--patience", type=TIME, default="10min", metavar="TIME", help="Time limit without any serving worker.  [10min]"
    ),
    click.option(
        "--grace", type=TIME, default="30s", metavar="TIME", help="Time for a leaving worker to finish its rows.  [30s]"
    ),
    click.option("--api-key-file", default="", metavar="FILE", help="File of the API key that workers require."),
    click.option("--prompt-column", default="", metavar="NAME", help="The column of a table that has the prompts."),
    click.option("--messages-column", default="", metavar="NAME", help="The one that has lists of messages."),
    click.option(
        "--template",
        default="",
        metavar="FILE",
        help="A body in JSON, or a prompt, with {column} where a value goes.",
    ),
    click.option(
        "--id-column", default="", metavar="NAME", help="The column of names.  [custom_id, id, or row numbers]"
    ),
    click.option("--split", default="train", metavar="NAME", help="Split of a data set.  [train]"),
    click.option(
        "--columns",
        default="",
        metavar="NAME[=COLUMN],...",
        help="Columns of the output: of the input, and answer, error, …  [all, and the usual ones]",
    ),
    click.option(
        "--price", default="", metavar="KIND=PRICE,...", help="Price of a million tokens: prompt, cached, answer."
    ),
    click.option("--metrics", default="", metavar="[HOST:]PORT", help="Serve metrics for Prometheus there."),
    click.option("--journal", default="", metavar="FILE", help="File for results until all are there."),
    click.option(
        "--retry-errors",
        multiple=True,
        is_flag=False,
        flag_value=NOT_THEIRS,
        metavar="[REASON,...]",
        help="Send error rows again: those that may be no fault of theirs; those with these errors; or `every`.",
    ),
    click.option("--strict", is_flag=True, help="Do not begin if a line is no row, or repeats one."),
    click.option("--quiet", is_flag=True, help="Show no progress."),
)


def _run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group()
def batch() -> None:
    """Batch inference over servers that come and go."""


@batch.command("run")
@click.argument("source", metavar="IN|URL")
@_run_options
def run(source: str, **options: Any) -> int:
    """Send each row of IN to a worker, and write one result for each.

    IN: lines of OpenAI's batch format; or records in JSON Lines, Parquet, CSV, Arrow, a folder of these, or a data set
    (hf://OWNER/NAME), gzipped or not, with --prompt-column, --messages-column or --template. An output named .parquet
    becomes Parquet.

    Run the same command again to resume. Exit code 0: the output is complete, and each row was answered, or refused by
    its own fault. 77: it is complete, but has other error rows: --retry-errors sends them again. 75: run it again. 2:
    usage. SIGINT or SIGTERM lets rows under way end within --grace.
    """
    from rich.console import Console

    from regrow_batch.job import run_batch
    from regrow_batch.places import BatchStopped
    from regrow_batch.progress import BatchProgress

    given = _options(source, options)
    console = Console(stderr=True)
    try:
        return run_batch(given, lambda pool, tally: BatchProgress(console, pool, tally, quiet=given.quiet))
    except BatchStopped as error:
        click.echo(f"regrow: {error}", err=True)
        return RUN_AGAIN


def _options(source: str, options: dict[str, Any]) -> "BatchOptions":
    from regrow_batch.account.prices import Prices
    from regrow_batch.head import HeadPolicy
    from regrow_batch.job import BatchOptions
    from regrow_batch.members import read_workers
    from regrow_batch.pool import PoolPolicy
    from regrow_batch.retries import RetryPolicy
    from regrow_batch.rows import RowReading
    from regrow_batch.servers.spawned import HEAD, arguments_of

    workers = read_workers(options["workers"])
    if not options["timeout"] or not options["patience"]:
        raise UsageError("--timeout and --patience must be more than 0 seconds")
    listen = place_to_listen("--listen", options["listen"])
    token = _token(options["token_file"], needed=listen is not None)
    if not workers and options["workers_file"] is None and not options["spawn"] and listen is None:
        raise UsageError("there are no workers", hint="give --workers, --workers-file, --spawn or --listen")
    if options["spawn"]:
        arguments_of(options["spawn"])
        if HEAD in options["spawn"] and listen is not None and listen[0] in ANY:
            raise UsageError(
                f"--listen {options['listen']} has no address at which started workers reach the head",
                hint="write its address",
            )
    return BatchOptions(
        input=source,
        output=options["output"],
        reading=RowReading(options["model"], options["endpoint"], options["end_loops"], options["affinity"]),
        state=state_home() / "batches",
        workers=workers,
        workers_file=options["workers_file"],
        spawn=options["spawn"],
        spawn_count=options["spawn_count"],
        listen=listen,
        token=token,
        pool=PoolPolicy(cap=options["per_worker"]),
        head=HeadPolicy(
            RetryPolicy(attempts=options["attempts"]),
            patience=options["patience"],
            timeout=options["timeout"],
            grace=options["grace"],
        ),
        key=read_key(options["api_key_file"]),
        strict=options["strict"],
        quiet=options["quiet"],
        shape=_shape(options),
        journal=options["journal"],
        prices=Prices.read(options["price"]),
        metrics=place_to_listen("--metrics", options["metrics"]),
        again=tuple(part for word in options["retry_errors"] for part in word.split(",") if part),
    )


def _shape(options: dict[str, Any]) -> "TableOptions":
    from regrow_batch.job import TableOptions
    from regrow_batch.tables.making import CHAT, RowMaking

    given = [name for name in ("prompt_column", "messages_column", "template") if options[name]]
    if len(given) > 1:
        raise UsageError(
            "--prompt-column, --messages-column and --template each define the prompts", hint="give one of them"
        )
    making = RowMaking(
        prompt=options["prompt_column"],
        messages=options["messages_column"],
        template=_template(options["template"]) if options["template"] else None,
        name=options["id_column"],
        url=options["endpoint"] or CHAT,
    )
    return TableOptions(making, options["split"], options["columns"])


def _template(place: str) -> Any:
    from regrow_batch.places import open_to_read
    from regrow_batch.tables.making import read_template

    with open_to_read(place) as stream:
        try:
            return read_template(stream.read().decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"--template {place} is no text: {error}") from error


def _token(token_file: str, *, needed: bool) -> str:
    token = read_token(token_file)
    if needed and not token:
        raise UsageError("a worker of another machine must send a token", hint="add --token-file FILE")
    return token if needed else ""


@batch.command("worker", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--cap", type=click.IntRange(min=1), default=None, metavar="N", help="Its rows at once.")
@click.option("--grace", type=TIME, default="30s", metavar="TIME", help="From a signal to the end of CMD.  [30s]")
@click.option("--patience", type=TIME, default="10min", metavar="TIME", help="Time limit without a head.  [10min]")
@click.option("--port", type=click.IntRange(1, 65535), default=None, metavar="N", help="Port of the server.  [any]")
@click.option(
    "--advertise", default="", metavar="HOST", help="Address at which the head reaches this machine.  [by its route]"
)
@click.option("--token-file", default="", metavar="FILE", help="The head's secret; or REGROW_TOKEN.")
@click.argument("head", metavar="http://HEAD:PORT|OUTPUT")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="CMD...")
def worker(head: str, command: tuple[str, ...], **options: Any) -> int:
    """Run the server CMD as a worker of a batch, on machines that may join and leave at any time.

    HEAD is the address of the batch's --listen; or its output, on the same machine. {port} and {host} in CMD are
    replaced by the server's address. SIGTERM: it gets no more rows, and ends when its rows are done, or after
    --grace; a second SIGTERM ends it at once. Exit code 0: asked to leave, or all rows are done. 75: no head found.
    """
    import asyncio

    from regrow_batch.job import endpoint_path
    from regrow_batch.members import address
    from regrow_batch.servers.registered import RegisteredWorker, WorkerOptions

    remote = head.startswith(("http://", "https://"))
    given = WorkerOptions(
        head=address(head, "HEAD") if remote else "",
        endpoint=endpoint_path(head, state_home() / "batches"),
        command=command,
        token=_token(options["token_file"], needed=remote),
        port=options["port"] or 0,
        advertise=options["advertise"],
        cap=options["cap"] or 0,
        grace=options["grace"],
        patience=options["patience"],
    )

    async def attend() -> int:
        return await RegisteredWorker(given, lambda sentence: click.echo(f"regrow: {sentence}", err=True)).run()

    return asyncio.run(attend())


@batch.command("read")
@click.argument("output", metavar="OUTPUT")
@click.option("--journal", default="", metavar="FILE", help="The run's --journal.")
def read(output: str, journal: str) -> None:
    """Write the results so far to standard output, as lines, during the batch or after it.

    During the batch they are in the order of their completion; after it, in the input's order.
    """
    import sys

    from regrow_batch.reading import results_so_far

    with contextlib.suppress(BrokenPipeError):
        for result in results_so_far(output, state_home() / "batches", journal):
            sys.stdout.buffer.write(result + b"\n")
        sys.stdout.buffer.flush()


@batch.command("workers")
@click.argument("output", metavar="OUTPUT")
@click.option("--add", default="", metavar="URL", help="Take this worker in, or back.")
@click.option("--cap", type=click.IntRange(min=1), default=None, metavar="N", help="Its rows at once.")
@click.option("--drain", default="", metavar="URL", help="Let this worker go once its rows are done.")
@click.option("--grace", type=TIME, metavar="TIME", help="How long they may take.  [the run's --grace]")
def workers(output: str, add: str, cap: int | None, drain: str, grace: float | None) -> None:
    """List the workers of the running batch that writes to OUTPUT; add one, or drain one."""
    from regrow_batch.control import WorkerRequest, ask
    from regrow_batch.job import endpoint_path

    if add and drain:
        raise UsageError("one thing at a time", hint="give either --add or --drain")
    request = WorkerRequest(add or drain, leave=bool(drain), cap=cap or 0, grace=grace) if add or drain else None
    for worker in ask(endpoint_path(output, state_home() / "batches"), request):
        text = f": {worker.because}" if worker.because else ""
        load = f"{worker.rows}/{worker.cap} under way, {worker.done} done, {worker.retried} retried"
        click.echo(f"{worker.url}  {worker.standing}  {load}{text}")
