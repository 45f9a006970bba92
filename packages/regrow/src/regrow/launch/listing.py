"""Jobs as lines of text and on a terminal, for `regrow jobs`, `status`, `logs` and `top`."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from regrow.core.errors import ProtocolError, UsageError
from regrow.core.ids import Seconds
from regrow.core.records import PLANNED
from regrow.launch.folder import JobEntry, find_job, read_entry
from regrow.membership.view import JobView, NodeView, WorkerView
from regrow.observe.story import count, tally

_CHUNK = 1 << 16
_LOOK_S: Seconds = 1.0


def job_lines(entries: Sequence[JobEntry]) -> list[str]:
    """A table of jobs; one sentence if there are none."""
    if not entries:
        return ["no jobs yet"]
    rows: list[tuple[str, ...]] = [("JOB", "STATE", "STARTED", "RANKS", "COMMAND")]
    for entry in entries:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.started))
        rows.append((entry.job, _state(entry), started, str(entry.world), " ".join(entry.command)))
    return _table(rows)


class JobRow(msgspec.Struct, frozen=True):
    """A job as `regrow jobs --json` shows it.

    `state`: running, died or ended. `code`: exit code. `started`, `ended`: seconds since the epoch. `step`: number of
    steps done. `goodput`: share of the time since the first step, from 0 to 1, as in `regrow story`; null before the
    first step. The last three fields are null if the records cannot be read.
    """

    job: str
    tag: str
    state: str
    code: int | None
    started: float
    ended: float | None
    ranks: int
    command: list[str]
    step: int | None = None
    incidents: int | None = None
    goodput: float | None = None


def job_rows(jobs_home: Path, entries: Sequence[JobEntry]) -> list[JobRow]:
    """The rows of these jobs, with figures from their records."""
    return [_row(jobs_home / entry.job, entry) for entry in entries]


def _row(folder: Path, entry: JobEntry) -> JobRow:
    from regrow.observe.ledger import Ledger, read_records

    state = _state(entry).partition(" ")[0]
    row = JobRow(entry.job, entry.tag, state, entry.code, entry.started, entry.ended, entry.world, entry.command)
    try:
        records = read_records(folder)
    except (OSError, ProtocolError):  # written by another version, or the folder is being removed
        return row
    ledger = Ledger(records)
    formed = ledger.generations[-1:]
    commits = [commit for by_rank in ledger.commits.values() for commit in by_rank.values()]
    kinds = [each.kind for each in ledger.incidents] + [each.kind for each in ledger.open_incidents.values()]
    steps = [each.step for each in formed] + [
        c.step + 1 for c in commits for g in formed if c.generation == g.generation
    ]
    return msgspec.structs.replace(
        row,
        step=max(steps, default=0),
        incidents=sum(kind not in PLANNED for kind in kinds),
        goodput=ledger.goodput if ledger.commits else None,
    )


def tagged_lines(rows: Sequence[JobRow]) -> list[str]:
    """A table of jobs with figures from their records; one sentence if there are none."""
    if not rows:
        return ["no jobs of this tag"]
    table: list[tuple[str, ...]] = [("JOB", "TAG", "STATE", "STEP", "INCIDENTS", "GOODPUT")]
    for row in rows:
        state = row.state if row.code is None else f"{row.state} ({row.code})"
        reported = (row.step, row.incidents, None if row.goodput is None else f"{row.goodput:.0%}")
        table.append((row.job, row.tag, state, *("-" if each is None else str(each) for each in reported)))
    return _table(table)


def status_lines(view: JobView) -> list[str]:
    """A job's state in a line, and its workers in a table."""
    head = (
        f"job {view.job}: {view.phase}, step {view.step}, generation {view.generation}, "
        f"{tally(view.incidents, view.changes)}, {count(view.restarts, 'restart')}"
    )
    rows: list[tuple[str, ...]] = [("RANK", "WORKER", "NODE", "PID", "STAGE")]
    rows.extend(_worker_row(worker) for worker in [*view.ranks, *view.standbys])
    rows.extend(_worker_row(worker, candidate=True) for worker in view.candidates)
    home = {worker.rank: worker.node for worker in view.ranks}
    known = [view.replaceable] if view.replaceable else []
    known += [
        f"rank {new.rank} moves from {home[new.rank]} to {new.node}: its new worker {new.worker} is {new.stage}"
        for new in view.candidates
        if new.rank in home
    ]
    return [head, *known, *_size_lines(view), *(_table(rows) if len(rows) > 1 else []), *_node_lines(view)]


def _size_lines(view: JobView) -> list[str]:
    """Lines with the present and the allowed numbers of replicas, if the number can change."""
    if view.min_replicas == view.max_replicas and view.wanted == view.replicas:
        return []
    each = f" of {view.unit} ranks" if view.unit > 1 else ""
    wanted = f", wanted {view.wanted}" if view.wanted != view.replicas else ""
    return [f"replicas{each}: {view.replicas}{wanted} (from {view.min_replicas} to {view.max_replicas})"]


def _node_lines(view: JobView) -> list[str]:
    """A table of nodes, if there are several, and a line for each problem of a node."""
    nodes = view.nodes
    bad = [
        f"{n.node}: wrong state was found {count(n.corruptions, 'time')} (silent corruption)"
        for n in nodes
        if n.corruptions
    ]
    bad += [f"{n.node}: in quarantine, gets no new workers: {n.quarantined}" for n in nodes if n.quarantined]
    bad += [f"{n.node}: {verdict}" for n in nodes for verdict in n.verdicts]
    if len(nodes) < 2:
        return bad
    rows: list[tuple[str, ...]] = [("NODE", "HOST", "STATE", "RANKS", "SLOTS", "DOMAIN", "COPIES AT")]
    held = Counter(worker.node for worker in view.ranks)
    for node in nodes:
        ranks, slots = str(0 if node.away else held[node.node]), str(node.slots)
        rows.append((node.node, node.host, _node_state(node), ranks, slots, node.domain or "-", node.buddy or "-"))
    return ["", *_table(rows), *bad]


def print_logs(entry: JobEntry, rank: int, out: BinaryIO) -> None:
    """Copy the output of all workers that held `rank` on this node to `out`. Raises `UsageError` if there is none."""
    path = Path(entry.log_dir) / f"rank{rank}.log"
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        started = f"job {entry.job} was started with ranks 0 to {entry.world - 1}"
        hint = started if rank >= entry.world else f"looked for {path}"
        raise UsageError(f"there is no output of rank {rank}", hint=hint) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    with stream:
        while block := stream.read(_CHUNK):
            out.write(block)
    out.flush()


def _state(entry: JobEntry) -> str:
    if entry.running:
        return "running"
    return "died" if entry.code is None else f"ended ({entry.code})"


def _node_state(node: NodeView) -> str:
    if node.left:
        return "given back"
    if node.away:
        return "lost"
    return "leaving" if node.draining else "here"


def _worker_row(worker: WorkerView, *, candidate: bool = False) -> tuple[str, ...]:
    place = "standby" if worker.rank is None else f"{worker.rank} to be" if candidate else str(worker.rank)
    return place, worker.worker, worker.node, str(worker.pid), worker.stage


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def watch_job(jobs_home: Path, job: str | None, *, plain: bool) -> None:
    """Show a job on the terminal until it has ended, or until Ctrl-C.

    Args:
        jobs_home: parent folder of all jobs.
        job: its name; None: the running job, else the newest.
        plain: print lines instead of the live view.

    Raises:
        UsageError: there is no such job.
        ProtocolError: a record is not one of this version.
    """
    from rich.console import Console

    from regrow.observe.live import follow, open_view

    folder = jobs_home / find_job(jobs_home, job, running=False).job

    def running() -> bool:
        entry = read_entry(folder)
        return entry is not None and entry.running

    view = open_view(Console(), plain=plain)
    with view, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the view, not the job
        follow(folder, view, running=running, every=_LOOK_S)
