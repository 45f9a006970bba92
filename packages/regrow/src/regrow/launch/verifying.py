"""Finds the records of a job, a folder or a file, for `regrow data verify` and other commands."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from regrow.core.errors import UsageError
from regrow.launch.folder import find_job, list_jobs, read_entry
from regrow.observe.plot_clocks import clock_shifts, on_one_clock
from regrow.observe.proof import Proof
from regrow.observe.reads import RunRecords
from regrow.observe.tail import read_run, read_run_file
from regrow.observe.thinning import records_since


def verify(jobs_home: Path, jobs: Sequence[str], against: Sequence[str]) -> Proof:
    """Decide whether a chain of jobs has read every sample exactly once.

    Args:
        jobs: names, folders or files, in the order in which they ran; none: the running job, else the newest.
        against: another chain, each step of which must have read the same samples.

    Raises:
        UsageError: there is no such job, or it has no records.
        ProtocolError: a record is not one of this version.
    """
    from regrow.observe.order_proof import prove

    runs = [find_run(jobs_home, job) for job in jobs] or [find_run(jobs_home, None)]
    return prove(runs, against=[find_run(jobs_home, job) for job in against])


def locate(jobs_home: Path, job: str | None) -> Path:
    """Path of a job's folder, found by the job's name, or of the given folder or file. Raises `UsageError`."""
    path = Path(job) if job is not None else None
    if path is not None and path.exists() and not any(entry.job == job for entry in list_jobs(jobs_home)):
        return path
    return jobs_home / find_job(jobs_home, job, running=False).job


def find_run(jobs_home: Path, job: str | None) -> RunRecords:
    """The records of a job, given its name, its folder, or a file. Raises as `verify` does."""
    path = locate(jobs_home, job)
    if not path.is_dir():
        return _with_records(read_run_file(path), path)
    entry = read_entry(path)
    live = entry is not None and entry.running
    return _with_records(read_run(path, path.resolve().name, live=live), path)


def find_run_on_one_clock(jobs_home: Path, job: str | None) -> RunRecords:
    """As `find_run`, with the times of all machines converted to the coordinator's clock.

    If lines of old steps were dropped, the run begins with the first step that all files still contain.
    """
    run = find_run(jobs_home, job)
    shifts = clock_shifts(locate(jobs_home, job))
    records = on_one_clock(run.records, shifts) if shifts else run.records
    return replace(run, records=records_since(records, run.since) if run.since else records)


def _with_records(run: RunRecords, path: Path) -> RunRecords:
    if not run.records:
        raise UsageError(f"there are no records in {path}", hint="name a job, its folder, or a file of its records")
    return run
