"""Runs a pod's node, and reports the job's progress to Kubeflow Trainer. The training does not depend on reports."""

import contextlib
import datetime
import json
import os
import signal
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from regrow.core.errors import RegrowError
from regrow.core.ids import Seconds
from regrow.launch.remote import CoordinatorClient
from regrow.observe.watch.present import JobFigures
from regrow_guests import tied
from regrow_guests.pods.progress import TrainJobProgress

EVERY: Final[Seconds] = 10.0
"""Interval of reports; Trainer requires at least 5 s."""
_WITHIN: Final[Seconds] = 5.0
_LONG: Final[Seconds] = 60.0
"""Duration of one report after which a warning says that the server takes long."""
_PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StatusServer(msgspec.Struct, frozen=True):
    """Address of a TrainJob's status, and files with the certificate of its server and the pod's token."""

    url: str
    ca: Path
    token: Path


class StatusReporter:
    """Reports the job's progress to a TrainJob's status.

    Args:
        server: receives the reports.
        coordinator: `HOST:PORT` of the job's coordinator, which is in this pod.
        token: the job's secret.
        steps: length of the training; 0: unknown.
    """

    def __init__(self, server: StatusServer, coordinator: str, token: str, steps: int) -> None:
        self._server = server
        self._client = CoordinatorClient(coordinator, token, timeout=_WITHIN)
        self._pace = TrainJobProgress(steps)
        self._last: JobFigures | None = None

    def report(self) -> str:
        """Read the progress and report it once. Returns a line for people if the server refused it, else nothing."""
        try:
            self._last = self._client.figures()
        except RegrowError:
            if self._last is None:
                return ""  # it has not begun, or has ended
        body = self._pace.body(self._last, time.monotonic(), datetime.datetime.now(datetime.UTC))
        try:
            self._post(json.dumps(body).encode())
        except (OSError, ValueError) as error:
            return f"the TrainJob's status was not reported: {error}"
        return ""

    def _post(self, body: bytes) -> None:
        # Read each time, because the token is rotated.
        headers = {
            "Authorization": f"Bearer {self._server.token.read_text(encoding='ascii').strip()}",
            "Content-Type": "application/json",
        }
        request = urllib.request.Request(self._server.url, body, headers, method="POST")
        context = ssl.create_default_context(cafile=str(self._server.ca))
        # Neither a proxy nor a redirect may see the token.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirect
        )
        with opener.open(request, timeout=_WITHIN):
            pass  # the body is not needed


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


class _Reporting:
    """Reports in a thread of its own, which may hang for ever: a server can send its answer byte by byte."""

    def __init__(self, reporter: StatusReporter) -> None:
        self._reporter = reporter
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._trouble = ""
        self._said = False

    def again(self) -> None:
        """Start a report, unless the last one is still in progress. Prints the first error."""
        if self._trouble and not self._said:
            self._said = True
            _say(f"regrow: {self._trouble}\n")
        if self._thread is not None and self._thread.is_alive():
            if time.monotonic() > self._began + _LONG:
                self._trouble = self._trouble or "the TrainJob's status was not reported: its server takes long"
            return
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._report, name="telling", daemon=True)
        self._thread.start()

    def _report(self) -> None:
        try:
            self._trouble = self._reporter.report() or self._trouble
        except Exception as error:  # noqa: BLE001 - the training does not depend on it
            self._trouble = f"the TrainJob's status was not reported: {type(error).__name__}: {error}"


def _say(line: str) -> None:
    # Not by print: the interpreter exits with its own code if it cannot flush its buffer.
    with contextlib.suppress(OSError):
        os.write(1, line.encode(errors="replace"))


def run_and_report(words: list[str], reporter: StatusReporter, *, every: Seconds = EVERY) -> int:
    """Run `regrow WORDS` to its end, with this process's signals passed on; returns its exit code. Main thread only."""
    node = subprocess.Popen(tied.command(words))
    reporting = _Reporting(reporter)
    with _passed_on(node):
        while (code := _ended(node, every)) is None:
            with contextlib.suppress(RuntimeError):  # no thread can be started now
                reporting.again()
    return 128 - code if code < 0 else code


def _ended(node: "subprocess.Popen[bytes]", within: Seconds) -> int | None:
    try:
        return node.wait(within)
    except subprocess.TimeoutExpired:
        return None


@contextlib.contextmanager
def _passed_on(node: "subprocess.Popen[bytes]") -> Iterator[None]:
    def pass_on(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            node.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
