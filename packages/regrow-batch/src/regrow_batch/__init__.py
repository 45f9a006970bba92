"""Batch inference: a head process that shares the rows of a file among OpenAI-compatible servers that come and go.

What decides is pure: `rows` reads a line and writes a result, `pool` says which worker gets a row and whom to trust,
`answers` what an answer says and `retries` whose fault it may be that there is none, `streams` puts one together,
`records` which rows a journal has and whose it is, `members` what a list of workers says, `circles` which answers run
in circles, `tally` what has happened so far, `account` what it costs.

What carries out: `places` opens files, `scanning` reads the input once, `journal` keeps results, `again` takes error
rows out of it, `sending` speaks HTTP, `judging/` finds out whose fault it is, `head` runs the job, `attendance` and
`control` follow who belongs to the pool (a file; HTTP), `servers/` starts workers, or announces them to a head,
`progress` and `report` show it. `job` ties them together. Imports no torch.

A row may be sent more than once; it has exactly one result, since the output is made from the first line that the
journal has of it.
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
    name = {"BatchWords": "BatchOptions", "WorkerWords": "WorkerOptions"}.get(name, name)  # as they were called
    if name not in _HOMES:
        raise AttributeError(f"module 'regrow_batch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"regrow_batch.{_HOMES[name]}"), name)
