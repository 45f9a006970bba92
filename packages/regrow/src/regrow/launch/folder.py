"""The folder of a job, `<jobs>/<job>/`: its description, records and logs.

`job.json` holds the job's secret, so only the owner can read folder and file; the secret is removed at the end.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from regrow.core.config import TlsFiles, tls_files, use_tls
from regrow.core.errors import UsageError
from regrow.core.exit_codes import UNPROVEN
from regrow.core.ids import JobId
from regrow.core.job import JobSpec
from regrow.launch.processes import is_alive, start_time

JOB_FILE = "job.json"
EVENTS_FILE = "events.jsonl"
CRASH_FILE = "crash.txt"
_MOST_NAMESAKES = 10_000


class JobEntry(msgspec.Struct, frozen=True):
    """Contents of `job.json`. `started` and `ended`: seconds since the epoch; `address`: `host:port`."""

    job: JobId
    address: str
    token: str
    pid: int
    pid_started: float
    started: float
    world: int
    command: list[str]
    log_dir: str
    ended: float | None = None
    code: int | None = None
    tag: str = ""
    tls: TlsFiles | None = None
    """Certificate and key files of the job on this machine; None: no TLS."""

    @property
    def running(self) -> bool:
        """True if the launcher that wrote this file still runs."""
        return self.ended is None and is_alive(self.pid, self.pid_started)

    def encrypt(self) -> None:
        """Make this process use the job's TLS files."""
        if self.tls is not None:
            use_tls(self.tls.cert, self.tls.key, self.tls.ca)


def make_job_dir(jobs_home: Path, job: JobId) -> tuple[JobId, Path]:
    """Make a folder for a job, under the requested name, or that name with a number if it is taken.

    Raises:
        UsageError: a job of this name runs already, or the folder cannot be made.
    """
    try:
        jobs_home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(1, _MOST_NAMESAKES):
            name = JobId(job if number == 1 else f"{job}-{number}")
            folder = jobs_home / name
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                _refuse_running(folder, name)
                continue
            return name, folder
    except OSError as error:
        raise UsageError(
            f"the job's folder in {jobs_home} cannot be made: {error.strerror or error}",
            hint="set REGROW_HOME to a folder that you may write to",
        ) from error
    raise UsageError(f"{jobs_home} has {_MOST_NAMESAKES} jobs named {job}", hint="remove old ones, or give --job NAME")


def _refuse_running(folder: Path, name: JobId) -> None:
    entry = read_entry(folder)
    if entry is not None and entry.running:
        raise UsageError(f"a job named {name} is running", hint=f"choose another --job, or end it: regrow stop {name}")


@contextlib.contextmanager
def hold_checkpoints(checkpoint_dir: str) -> Iterator[None]:
    """Hold an exclusive `flock` on a folder of durable checkpoints, so that no other job on this machine writes to it.

    No lock is taken for a URL, or on a file system without locks. Raises `UsageError` if another job holds it.
    """
    with contextlib.ExitStack() as held:
        if checkpoint_dir and "://" not in checkpoint_dir:
            with contextlib.suppress(OSError):
                _hold(Path(checkpoint_dir), held)
        yield


def _hold(directory: Path, held: contextlib.ExitStack) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another job writes its checkpoints to {directory}: each would remove the other's",
            hint="give this job a --checkpoint-dir of its own, or wait for the other (`regrow jobs`)",
        ) from None


def make_log_dir(folder: Path) -> None:
    """Make the folder for the output of each rank if it is missing. Raises `UsageError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder for logs {folder} cannot be made: {error.strerror or error}", hint="choose another --log-dir"
        ) from error


def describe(spec: JobSpec, address: str, token: str, *, command: list[str], log_dir: str) -> JobEntry:
    """The entry of a job whose launcher is this process."""
    return JobEntry(
        job=spec.job,
        address=address,
        token=token,
        pid=os.getpid(),
        pid_started=start_time(),
        started=time.time(),
        world=spec.world,
        tag=spec.tag,
        command=command,
        log_dir=log_dir,
        tls=tls_files(),
    )


def write_entry(job_dir: Path, entry: JobEntry) -> None:
    """Replace `job.json` atomically, mode 0600. Raises `OSError`."""
    path = job_dir / JOB_FILE
    temporary = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(entry)) + b"\n")
    temporary.replace(path)


def read_entry(job_dir: Path) -> JobEntry | None:
    """Read `job.json`; None if it is missing, or written by another version."""
    try:
        return msgspec.json.decode((job_dir / JOB_FILE).read_bytes(), type=JobEntry)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def list_jobs(jobs_home: Path) -> list[JobEntry]:
    """All jobs that have a `job.json`, the newest last."""
    if not jobs_home.is_dir():
        return []
    entries = [read_entry(folder) for folder in jobs_home.iterdir()]
    return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.started)


def find_job(jobs_home: Path, job: str | None, *, running: bool = True) -> JobEntry:
    """The job with this name; without a name, the only running job (`running=False`: if none runs, the newest job).

    Raises:
        UsageError: there is no such job, it has ended, or several are running.
    """
    entries = list_jobs(jobs_home)
    alive = [entry for entry in entries if entry.running]
    if job is not None:
        return _named(entries, job, running)
    if len(alive) == 1:
        return alive[0]
    if alive:
        names = ", ".join(entry.job for entry in alive)
        raise UsageError(f"{len(alive)} jobs are running", hint=f"name one of {names}")
    if running or not entries:
        raise UsageError("no job is running" if running else "there is no job", hint="start one: regrow run SCRIPT")
    return entries[-1]


def _named(entries: list[JobEntry], job: str, running: bool) -> JobEntry:
    found = [entry for entry in entries if entry.job == job]
    if not found:
        names = ", ".join(entry.job for entry in entries[-5:])
        raise UsageError(
            f"there is no job {job!r}", hint=f"the newest are: {names}" if names else "regrow jobs lists them"
        )
    if running and not found[0].running:
        code = found[0].code
        how = "died" if code is None else f"ended with exit code {code}"
        how += " (its result is not proven to be that of a run without faults)" if code == UNPROVEN else ""
        raise UsageError(
            f"job {job} is not running any more: it {how}",
            hint=f"regrow logs {job} --rank 0 shows the output of rank 0",
        )
    return found[0]
