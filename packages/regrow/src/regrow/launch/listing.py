"""Jobs as lines of text and on a terminal: for `regrow jobs`, `status`, `logs` and `top`."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds
from regrow.launch.folder import JobEntry, find_job, read_entry
from regrow.membership.view import JobView, NodeView, WorkerView

_CHUNK = 1 << 16
_LOOK_S: Seconds = 1.0


def job_lines(entries: Sequence[JobEntry]) -> list[str]:
    """A table of jobs; one sentence when there are none."""
    if not entries:
        return ["no jobs yet"]
    rows: list[tuple[str, ...]] = [("JOB", "STATE", "STARTED", "RANKS", "COMMAND")]
    for entry in entries:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.started))
        rows.append((entry.job, _state(entry), started, str(entry.world), " ".join(entry.command)))
    return _table(rows)


def status_lines(view: JobView) -> list[str]:
    """A job's state in a line, and its workers in a table."""
    head = (
        f"job {view.job}: {view.phase}, step {view.step}, generation {view.generation}, "
        f"{view.incidents} incidents, {view.restarts} restarts"
    )
    rows: list[tuple[str, ...]] = [("RANK", "WORKER", "NODE", "PID", "STAGE")]
    rows.extend(_worker_row(worker) for worker in [*view.ranks, *view.standbys])
    rows.extend(_worker_row(worker, candidate=True) for worker in view.candidates)
    known = [view.replaceable] if view.replaceable else []
    return [head, *known, *_size_lines(view), *(_table(rows) if len(rows) > 1 else []), *_node_lines(view)]


def _size_lines(view: JobView) -> list[str]:
    """Describe the present and allowed numbers of replicas, if they can change."""
    if view.min_replicas == view.max_replicas and view.wanted == view.replicas:
        return []
    each = f" of {view.unit} ranks" if view.unit > 1 else ""
    wanted = f", wanted {view.wanted}" if view.wanted != view.replicas else ""
    return [f"replicas{each}: {view.replicas}{wanted} (from {view.min_replicas} to {view.max_replicas})"]


def _node_lines(view: JobView) -> list[str]:
    """A table of nodes, where there are several; a line for each whose ranks were found with wrong state."""
    nodes = view.nodes
    bad = [f"{n.node}: wrong state was found {n.corruptions} times (silent corruption)" for n in nodes if n.corruptions]
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
    """Copy the output of all workers that held `rank` on this node. Raises `UsageError` when there is none."""
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
        jobs_home: where jobs are.
        job: its name; None: the running job, else the newest.
        plain: lines instead of a picture.

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
    with view, contextlib.suppress(KeyboardInterrupt):  # who watches has seen enough, and the job goes on
        follow(folder, view, running=running, every=_LOOK_S)
