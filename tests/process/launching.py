"""Running `regrow run` as a user would, and looking for what it leaves behind."""

import contextlib
import copy
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil
from tests.process.judging import Judge
from tests.process.warm_client import WarmProcess, WarmServer
from tests.sources import PYTHONPATH

PATIENCE = 240.0
SHARED = Path("/dev/shm")
TRAINERS = (
    "accelerate",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.sft_trainer",
)
"""Imports of the scripts of tests about others' trainers: seconds for each worker, otherwise."""
GENERATING = (
    "accelerate",
    "pandas",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
)
"""The same, of trainers that generate."""
LIGHTNING = ("pytorch_lightning",)
SOURCE = PYTHONPATH


class Site:
    """A place to run jobs in: a home of its own, scripts, and a runtime folder.

    Every process of a job inherits `REGROW_HOME`, which is unique, so that none can hide.
    """

    def __init__(self, folder: Path, imports: tuple[str, ...] = ()) -> None:
        self.folder, self._imports = folder, imports
        self.module = "regrow"
        """Module that its commands run."""
        self.patience = PATIENCE
        """Time limit of a command, in seconds."""
        self.home = folder / "home"
        self.runtime = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
        self.judge = Judge(folder, self.home / "jobs", self.regrow)

    def importing(self, imports: tuple[str, ...]) -> "Site":
        """The same place, for jobs of which the process they are forked from has imported other modules."""
        other = copy.copy(self)
        other._imports = imports
        return other

    def environment(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        mine = {"REGROW_HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.runtime), "PYTHONPATH": path}
        # An examination takes more of a processor than some of these jobs; tests of it ask for it.
        return os.environ | mine | {"OMP_NUM_THREADS": "1", "REGROW_NO_HEALTH": "1"} | more

    def script(self, text: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "regrow", *words]

    def popen(self, words: Sequence[str], *, output: int, errors: int, **more: str) -> WarmProcess:
        """`regrow words…`, forked from the warm process."""
        streams = (_nothing(), output, errors)
        self.judge.starts(words, more)
        return warm(self._imports).start(
            self.module, words, cwd=str(self.folder), env=self.environment(**more), streams=streams
        )

    def regrow(self, *words: str, **more: str) -> "subprocess.CompletedProcess[str]":
        """A command to its end."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self.popen(words, output=output.fileno(), errors=errors.fileno(), **more)
            try:
                code = process.wait(self.patience)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(PATIENCE)
                late = f"{words} did not end in {self.patience} s"
                raise AssertionError(f"{late}: {_text(output)}{_text(errors)}") from None
            return subprocess.CompletedProcess(list(words), code, _text(output), _text(errors))

    def start(self, *words: str, **more: str) -> "Running":
        return Running(self, words, more)

    def processes(self) -> list[int]:
        marker = f"REGROW_HOME={self.home}".encode()
        return [pid for pid in _all_pids() if marker in _environ(pid).split(b"\0")]

    def assert_nothing_left(self) -> None:
        """No process, socket or cache of any job."""
        self.assert_no_process_left()
        assert list(self.runtime.iterdir()) == []
        assert self.caches() == []

    def assert_no_process_left(self) -> None:
        """Processes may be on their way out when their launcher was killed; whoever stays is a failure."""
        left = _wait_ended(self.processes(), time.monotonic() + 15.0)
        assert left == [], [_describe(pid) for pid in left]

    def caches(self, root: Path = SHARED) -> list[Path]:
        """Folders of data caches of jobs of this site, whether somebody uses them or not."""
        return [folder for folder in root.glob("regrow-data-*") if self._owns(folder)]

    def _owns(self, folder: Path) -> bool:
        try:
            return str(self.home) in (folder / "owner").read_text()
        except FileNotFoundError:
            return False  # another site's, which comes or goes just now; its last file is this one

    def sweep(self) -> None:
        """Remove sockets and memory of a host that has lost all its processes at once."""
        for left in (*self.runtime.iterdir(), *self.caches()):
            shutil.rmtree(left)

    def close(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.runtime, ignore_errors=True)
        for folder in self.caches():
            shutil.rmtree(folder, ignore_errors=True)


class Running:
    """A command that runs; its output can be waited for."""

    def __init__(self, site: Site, words: Sequence[str], more: dict[str, str]) -> None:
        self._reader, writer = os.pipe()
        try:
            self.process = site.popen(words, output=writer, errors=writer, **more)
        finally:
            os.close(writer)
        os.set_blocking(self._reader, False)
        self.output = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._reader)

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until the output has `text` this number of times."""
        deadline = time.monotonic() + PATIENCE
        while self.output.count(text) < times:
            assert self._read(deadline), f"no {text!r} in: {self.output}"

    def wait(self, patience: float = PATIENCE) -> int:
        """Read on to the end; the exit code."""
        deadline = time.monotonic() + patience
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE)

    def drain(self) -> None:
        """Take in what it has written so far, so that it never waits for a reader."""
        self._take()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"nothing more within {PATIENCE} s after: {self.output}"
        return self._take()

    def _take(self) -> bool:
        new = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._reader, 1 << 16):
                new += part
        self.output += new.decode(errors="replace")
        return bool(new)


def named(pid: int) -> str:
    """A process's name as the kernel shows it; empty where it has ended, maybe since it was found."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def agents_below(launcher: Running) -> list[int]:
    """The agents among a launcher's processes; where processes are forked ahead, others wait to become some."""
    found = []
    for child in psutil.Process(launcher.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now, or has
            if "regrow.agent" in child.cmdline():
                found.append(child.pid)
    return found


def warm(imports: tuple[str, ...] = ()) -> WarmServer:
    """The process that jobs are forked from, one a test session for each set of modules that it has imported."""
    if imports not in _warm:
        _warm[imports] = warm().importing(imports) if imports else WarmServer.of_session(SOURCE)
    return _warm[imports]


_warm: dict[tuple[str, ...], WarmServer] = {}


def close_warm() -> None:
    """Leave the processes that jobs were forked from, where there are any."""
    while _warm:
        _warm.popitem()[1].close()


@functools.cache
def _nothing() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@contextmanager
def site(folder: Path, *imports: str) -> Iterator[Site]:
    """A site that is closed at the end; its jobs are forked from a process that has these modules imported.

    Raises `AssertionError` where a job that had faults has ended with 0 and other numbers than without.
    """
    made = Site(folder, imports)
    try:
        yield made
        made.judge.judge()
    finally:
        made.close()


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return f"{pid} (gone by now)"
    return f"{pid} ({state}) {command}"


def still_running(pids: Iterable[int], *, seconds: float) -> list[int]:
    """Those that have not ended `seconds` from now."""
    return _wait_ended(pids, time.monotonic() + seconds)


def _wait_ended(pids: Iterable[int], deadline: float) -> list[int]:
    """Waits on the processes themselves; returns those that still run at the deadline."""
    left = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                left.append(pid)
        finally:
            os.close(descriptor)
    return left
