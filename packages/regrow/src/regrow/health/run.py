"""Runs probes in child processes, and converts failures of these processes to readings too.

One child runs probe after probe. If it hangs, dies or raises, its failure becomes the reading of the present device,
and another child continues with the rest.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import msgspec

from regrow.core.exit_codes import exit_text
from regrow.core.ids import Instant, Seconds
from regrow.core.process.ends import ChildEnd
from regrow.health.probes import PROBES
from regrow.health.readings import (
    FailedHow,
    Gave,
    Line,
    ProbeAt,
    ProbeFailed,
    ProbeOrder,
    ProbeResult,
    ProbeSettings,
    Raised,
    Through,
)

START_S: Seconds = 20.0
"""Time limit for the child's first message: an interpreter must start, perhaps on a busy machine."""
_END_S: Seconds = 1.0
_MOST_BYTES = 4 << 20
_LAST_BYTES = 600
_COMMAND = (sys.executable, "-P", "-m", "regrow.health.child")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class _Failure(Exception):
    """The child has failed and gives no more readings."""

    def __init__(self, how: FailedHow, detail: str) -> None:
        super().__init__(detail)
        self.how, self.detail = how, detail


class ProbeRunner:
    """Runs probes in child processes.

    Args:
        settings: settings of the probes.
        environ: environment of the child.
        command: command line of the child; another one in tests.
        deadlines: deadlines by probe, in place of those of the table.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        environ: Mapping[str, str],
        *,
        command: Sequence[str] = _COMMAND,
        deadlines: Mapping[str, Seconds] | None = None,
    ) -> None:
        self._settings = settings
        # One core is enough for probes, which run beside a training.
        self._environ = {**environ, **dict.fromkeys(_THREADS, "1")}
        self._command = list(command)
        self._deadlines = {name: probe.deadline for name, probe in PROBES.items()} | dict(deadlines or {})

    def run(self, probes: Sequence[str]) -> list[ProbeResult]:
        """All readings of these probes, in order. Always returns within the sum of the deadlines."""
        results: list[ProbeResult] = []
        left, skip = list(probes), list[str]()
        while left:
            round_ = _Round(left, msgspec.structs.replace(self._settings, skip=skip), self._deadlines)
            failure = round_.run(self._command, self._environ)
            results += round_.results
            left = round_.left
            if failure is None:
                break
            results.append(ProbeResult(left[0], ProbeFailed(failure.how, round_.device, failure.detail)))
            if round_.device and round_.device not in round_.skip:
                skip = [*round_.skip, round_.device]  # continue with the probe's other devices
            else:
                left, skip = left[1:], []
        return results


class _Round:
    """One child, from its start to its end or its failure.

    `left`: unfinished probes; `device`: the present device of the first of them; `skip`: its finished devices.
    """

    def __init__(self, probes: list[str], settings: ProbeSettings, deadlines: Mapping[str, Seconds]) -> None:
        self.left, self.device, self.skip = list(probes), "", list(settings.skip)
        self.results: list[ProbeResult] = []
        self._order = ProbeOrder(list(probes), settings)
        self._deadlines = deadlines
        self._decoder = msgspec.json.Decoder(Line)

    def run(self, command: list[str], environ: Mapping[str, str]) -> _Failure | None:
        """Start the child and read its messages; returns its failure, or None if all probes have finished."""
        with tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environ),
                start_new_session=True,
            )
            try:
                self._send(child)
                self._receive(child)
            except _Failure as failure:
                return _Failure(failure.how, self._with_last_words(failure.detail, errors))
            finally:
                end_group(child)
                if child.stdout is not None:
                    child.stdout.close()
        return None

    def _send(self, child: subprocess.Popen[bytes]) -> None:
        if child.stdin is not None:
            with contextlib.suppress(BrokenPipeError), child.stdin as pipe:  # `_receive` detects the child's end
                pipe.write(msgspec.json.encode(self._order))

    def _receive(self, child: subprocess.Popen[bytes]) -> None:
        lines = _lines(child, self)
        for line in lines:
            try:
                said = self._decoder.decode(line)
            except msgspec.MsgspecError as error:
                text = line[:200].decode(errors="replace")
                raise _Failure(FailedHow.GARBLED, f"the probe said {text!r}, which is not a reading: {error}") from None
            self._take(said)
            if not self.left:
                return

    def _take(self, said: ProbeAt | Gave | Raised | Through) -> None:
        if said.probe != self.left[0]:
            raise _Failure(FailedHow.GARBLED, f"probe {said.probe} speaks while {self.left[0]} runs")
        match said:
            case ProbeAt(device=device):
                if self.device:
                    self.skip.append(self.device)
                self.device, self.started = device, time.monotonic()
            case Gave(probe=probe, reading=reading):
                self.results.append(ProbeResult(probe, reading))
            case Raised(device=device, error=error):
                self.device = device
                raise _Failure(FailedHow.RAISED, error)
            case Through():
                self.left, self.device, self.skip = self.left[1:], "", []

    started: Instant | None = None
    """Time when the present probe started with the present device; None: no message has come from the child yet."""

    def limit(self, begun: Instant) -> Instant:
        """Deadline of the child's next line."""
        return begun + START_S if self.started is None else self.started + self._deadlines[self.left[0]]

    def _with_last_words(self, detail: str, errors: IO[bytes]) -> str:
        errors.seek(0, os.SEEK_END)
        errors.seek(max(0, errors.tell() - _LAST_BYTES))
        lines = errors.read().decode(errors="replace").strip().splitlines()
        return f"{detail}; its last words: {lines[-1].strip()}" if lines else detail


def _lines(child: subprocess.Popen[bytes], round_: _Round) -> Iterator[bytes]:
    """The lines of the child. Raises `_Failure` if it hangs, writes too much, or ends before it has finished."""
    out = child.stdout
    if out is None:
        return
    begun, buffer, total = time.monotonic(), b"", 0
    while True:
        limit = round_.limit(begun)
        ready, _, _ = select.select([out], [], [], max(0.0, limit - time.monotonic()))
        if not ready:
            raise _Failure(FailedHow.HUNG, f"no answer within {_span(limit - (round_.started or begun))}")
        block = os.read(out.fileno(), 1 << 16)
        if not block:
            raise _Failure(FailedHow.DIED, _how_it_ended(child))
        total += len(block)
        if total > _MOST_BYTES:
            raise _Failure(FailedHow.GARBLED, f"the probe said more than {_MOST_BYTES >> 20} MiB")
        *lines, buffer = (buffer + block).split(b"\n")
        yield from lines


def _how_it_ended(child: subprocess.Popen[bytes]) -> str:
    code = wait_unreaped(child.pid, _END_S)
    return "the probe's process closed its output and stays" if code is None else f"its process {exit_text(code)}"


def wait_unreaped(pid: int, within: Seconds) -> int | None:
    """The exit code of a child, or minus the signal that ended it; None if it has not ended in time.

    The child is not reaped: until then its pid and process group id are not reused, so the group can be killed safely.
    """
    end = ChildEnd(pid)
    try:
        ended = end.wait(within)
    finally:
        end.close()
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) if ended else None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and the process group that it leads. Does not wait long for a child that hangs inside the kernel."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)


def _span(seconds: Seconds) -> str:
    return f"{seconds:.3g} s"
