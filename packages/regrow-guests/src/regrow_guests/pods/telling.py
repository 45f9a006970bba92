"""Runs a pod's node, and tells Kubeflow Trainer how far the job is. Nothing of the training depends on that."""

import contextlib
import datetime
import json
import signal
import ssl
import subprocess
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
"""Trainer asks for 5 s at least."""
_WITHIN: Final[Seconds] = 5.0
_PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StatusServer(msgspec.Struct, frozen=True):
    """Address of a TrainJob's status, and files with the certificate of its server and the pod's token."""

    url: str
    ca: Path
    token: Path


class Teller:
    """Tells a TrainJob's status how far the job is.

    Args:
        server: that takes it.
        coordinator: `HOST:PORT` of the job's, which is in this pod.
        token: the job's secret.
        steps: length of the training; 0: not known.
    """

    def __init__(self, server: StatusServer, coordinator: str, token: str, steps: int) -> None:
        self._server = server
        self._client = CoordinatorClient(coordinator, token, timeout=_WITHIN)
        self._pace = TrainJobProgress(steps)
        self._last: JobFigures | None = None

    def tell(self) -> str:
        """Ask and tell once. Returns a line for people if the server did not take it, else nothing."""
        try:
            self._last = self._client.figures()
        except RegrowError:
            if self._last is None:
                return ""  # it has not begun, or has ended
        body = self._pace.body(self._last, time.monotonic(), datetime.datetime.now(datetime.UTC))
        try:
            self._post(json.dumps(body).encode())
        except (OSError, ValueError) as error:
            return f"the TrainJob's status was not told: {error}"
        return ""

    def _post(self, body: bytes) -> None:
        # The token is another one after a while.
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
        with opener.open(request, timeout=_WITHIN) as answer:
            answer.read(1 << 16)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def run_and_tell(words: list[str], teller: Teller, *, every: Seconds = EVERY) -> int:
    """Run `regrow WORDS`, which gets the signals of this process, to its end; its exit code. For a main thread."""
    node = subprocess.Popen(tied.command(words))
    said = False
    with _passed_on(node):
        while (code := _ended(node, every)) is None:
            trouble = teller.tell()
            if trouble and not said:
                print(f"regrow: {trouble}", flush=True)  # noqa: T201
            said = said or bool(trouble)
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
