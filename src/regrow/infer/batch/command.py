"""`regrow batch`: inference over the rows of a file, with workers that come and go."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from regrow.core.config import read_key, state_home
from regrow.core.errors import UsageError
from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.flags import TIME

if TYPE_CHECKING:
    from regrow.infer.batch.job import BatchWords


_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option("-o", "--output", required=True, metavar="FILE|URL", help="Where the results go."),
    click.option("--workers", default="", metavar="URL,...", help="OpenAI-compatible servers."),
    click.option(
        "--workers-file", type=click.Path(path_type=Path), metavar="FILE", help="A list of them, which is watched."
    ),
    click.option("--spawn", default="", metavar="CMD", help="Starts a worker here; {port} stands for its port."),
    click.option("--spawn-count", type=click.IntRange(min=1), default=1, metavar="N", help="How many.  [1]"),
    click.option("--per-worker", type=click.IntRange(min=1), default=32, metavar="N", help="Rows at once.  [32]"),
    click.option("--model", default="", metavar="NAME", help="Ask for this model instead of each row's own."),
    click.option("--endpoint", default="", metavar="PATH", help="Send rows there instead of to each row's own url."),
    click.option("--end-loops", is_flag=True, help="Stream answers, and end those that run in circles."),
    click.option(
        "--affinity",
        type=click.IntRange(min=0),
        default=0,
        metavar="BYTES",
        help="Rows whose prompts begin with the same so many bytes prefer the same worker.  [0: none]",
    ),
    click.option("--timeout", type=TIME, default="10min", metavar="TIME", help="Of one attempt.  [10min]"),
    click.option("--attempts", type=click.IntRange(min=1), default=8, metavar="N", help="Of one row.  [8]"),
    click.option(
        "--patience", type=TIME, default="10min", metavar="TIME", help="Without any worker that serves.  [10min]"
    ),
    click.option(
        "--grace", type=TIME, default="30s", metavar="TIME", help="For rows under way, of who has to go.  [30s]"
    ),
    click.option("--api-key-file", default="", metavar="FILE", help="The key that workers want."),
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
@click.argument("source", metavar="IN.JSONL|URL")
@_run_options
def run(source: str, **words: Any) -> int:
    """Send each row of IN.JSONL to a worker, and write one result of each: OpenAI's batch format.

    Run the same command again to go on after whatever has ended it. Exit code 0: the output is whole (error rows are in
    it too). 75: run it again. 2: usage. SIGINT or SIGTERM lets rows under way end within --grace.
    """
    from rich.console import Console

    from regrow.infer.batch.job import run_batch
    from regrow.infer.batch.places import BatchStopped
    from regrow.infer.batch.progress import BatchProgress

    given = _words(source, words)
    console = Console(stderr=True)
    try:
        return run_batch(given, lambda pool, tally: BatchProgress(console, pool, tally, quiet=given.quiet))
    except BatchStopped as error:
        click.echo(f"regrow: {error}", err=True)
        return RUN_AGAIN


def _words(source: str, words: dict[str, Any]) -> "BatchWords":
    from regrow.infer.batch.head import HeadPolicy
    from regrow.infer.batch.job import BatchWords
    from regrow.infer.batch.members import read_words
    from regrow.infer.batch.pool import PoolPolicy
    from regrow.infer.batch.retries import RetryPolicy
    from regrow.infer.batch.rows import RowReading

    workers = read_words(words["workers"])
    if not words["timeout"] or not words["patience"]:
        raise UsageError("--timeout and --patience must be more than 0 seconds")
    if not workers and words["workers_file"] is None and not words["spawn"]:
        raise UsageError("there are no workers", hint="give --workers, --workers-file or --spawn")
    return BatchWords(
        input=source,
        output=words["output"],
        reading=RowReading(words["model"], words["endpoint"], words["end_loops"], words["affinity"]),
        state=state_home() / "batches",
        workers=workers,
        workers_file=words["workers_file"],
        spawn=words["spawn"],
        spawn_count=words["spawn_count"],
        pool=PoolPolicy(cap=words["per_worker"]),
        head=HeadPolicy(
            RetryPolicy(attempts=words["attempts"]),
            patience=words["patience"],
            timeout=words["timeout"],
            grace=words["grace"],
        ),
        key=read_key(words["api_key_file"]),
        strict=words["strict"],
        quiet=words["quiet"],
    )


@batch.command("workers")
@click.argument("output", metavar="OUTPUT")
@click.option("--add", default="", metavar="URL", help="Take this worker in, or back.")
@click.option("--cap", type=click.IntRange(min=1), default=None, metavar="N", help="Its rows at once.")
@click.option("--drain", default="", metavar="URL", help="Let this worker go once its rows are done.")
@click.option("--grace", type=TIME, metavar="TIME", help="How long they may take.  [the run's --grace]")
def workers(output: str, add: str, cap: int | None, drain: str, grace: float | None) -> None:
    """List the workers of the running batch that writes to OUTPUT; take one in, or let one go."""
    from regrow.infer.batch.control import WorkerWish, ask
    from regrow.infer.batch.job import door_path

    if add and drain:
        raise UsageError("one thing at a time", hint="give either --add or --drain")
    wish = WorkerWish(add or drain, leave=bool(drain), cap=cap or 0, grace=grace) if add or drain else None
    for worker in ask(door_path(output, state_home() / "batches"), wish):
        told = f": {worker.because}" if worker.because else ""
        load = f"{worker.rows}/{worker.cap} under way, {worker.done} done, {worker.retried} retried"
        click.echo(f"{worker.url}  {worker.standing}  {load}{told}")
