"""Batch inference: a head process that shares the rows of a file among OpenAI-compatible servers that come and go.

Pure modules: `rows` reads a line and writes a result; `pool` chooses the worker for a row and decides which workers are
trusted; `answers` reads an answer and `retries` judges a failed one; `streams` joins the parts of a streamed answer;
`records` encodes the journal; `members` parses a list of workers; `circles` detects answers that loop; `tally` counts
what has happened so far; `account` computes the cost.

Modules with input and output: `places` opens files, `scanning` reads the input, `journal` keeps results, `again` takes
error rows out of the journal, `sending` speaks HTTP, `judging/` decides which side is at fault, `head` runs the job,
`attendance` and `control` follow the membership of the pool (by a file; by HTTP), `servers/` starts or registers
workers, `progress` and `report` show the job. `job` ties them together. Imports no torch.

A row may be sent more than once. It has exactly one result, since the output is made from the first line that the
journal has for the row.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow_batch.functions.calls import CallFailed, Calls
    from regrow_batch.functions.running import arun, run
    from regrow_batch.job import BatchOptions, run_batch
    from regrow_batch.places import BatchStopped
    from regrow_batch.report import BatchReport
    from regrow_batch.servers.registered import RegisteredWorker, WorkerOptions

__all__ = [
    "BatchOptions",
    "BatchReport",
    "BatchStopped",
    "CallFailed",
    "Calls",
    "RegisteredWorker",
    "WorkerOptions",
    "arun",
    "run",
    "run_batch",
]

_HOMES = {
    "BatchOptions": "job",
    "BatchReport": "report",
    "BatchStopped": "places",
    "CallFailed": "functions.calls",
    "Calls": "functions.calls",
    "RegisteredWorker": "servers.registered",
    "WorkerOptions": "servers.registered",
    "arun": "functions.running",
    "run": "functions.running",
    "run_batch": "job",
}


def __getattr__(name: str) -> Any:
    # Lazy: the command line imports this package to show one line of help.
    name = {"BatchWords": "BatchOptions", "WorkerWords": "WorkerOptions"}.get(name, name)  # the former names
    if name not in _HOMES:
        raise AttributeError(f"module 'regrow_batch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"regrow_batch.{_HOMES[name]}"), name)
