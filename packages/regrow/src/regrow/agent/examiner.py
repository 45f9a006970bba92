"""Examination of this node in the background: when it has joined, and after each incident.

It runs in a separate process of low priority, a moment after the event, so that no recovery waits for it. Its findings
come too late for that incident and count for the next decision. A missing answer is not counted against the node.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from regrow.core.config import AgentConfig, visible_gpus
from regrow.core.ids import Generation, Instant, Seconds
from regrow.core.messages.health import NodeExamined
from regrow.core.messages.orders import FormGeneration, NoteGeneration
from regrow.core.records import PLANNED
from regrow.health.examination import ExaminationOrder
from regrow.health.probes import QUICK
from regrow.health.readings import ProbeSettings

AFTER_INCIDENT = [name for name in QUICK if name != "memory-bandwidth"]
"""Probes after an incident; that of memory bandwidth would measure the traffic of the training."""
_AFTER_S: Seconds = 1.0
"""Delay of the examination after a new generation, which trains by then."""
_APART_S: Seconds = 10.0
"""Least time between two examinations; faults in close succession cause only one."""
_LOOK_BACK_S: Seconds = 600.0
"""Age up to which lines of the kernel log count when the node joins; later examinations begin at the last one."""
_CHECK_S: Seconds = 30.0
_MOST_S: Seconds = 300.0
_END_S: Seconds = 1.0
_log = logging.getLogger("regrow.agent")


class Examiner:
    """One node's examinations, one at a time.

    Args:
        config: configuration of the node; `spec.health` switches examinations on.
        report: receives the findings.
    """

    def __init__(self, config: AgentConfig, *, report: Callable[[NodeExamined], None]) -> None:
        self._config, self._report = config, report
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._timer: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._last: Instant | None = None
        self._newest = Generation(0)

    @property
    def pid(self) -> int | None:
        """Process id of the running examination; None while there is none."""
        return None if self._process is None else self._process.pid

    def joined(self) -> None:
        """Examine the node before anything runs on it, as it has joined the job."""
        self._soon("joined", QUICK, 0.0)

    def formed(self, order: FormGeneration | NoteGeneration) -> None:
        """Examine the node after a fault; the first generation and those of planned changes follow none.

        Ignores repetition.
        """
        generation, known = order.generation, self._newest
        self._newest = max(known, generation)
        change = order.change if isinstance(order, FormGeneration) else None
        planned = change is not None and change.kind in PLANNED and change.generation == generation
        if self._newest > known > 0 and not planned:
            self._soon(f"before generation {generation}", AFTER_INCIDENT, _AFTER_S)

    def close(self) -> None:
        """End a running examination."""
        for timer in (self._timer, self._limit):
            if timer is not None:
                timer.cancel()
        self._end()

    def _soon(self, occasion: str, probes: list[str], after: Seconds) -> None:
        if not self._config.spec.health or self._timer is not None:
            return
        if self._last is not None:
            after = max(after, self._last + _APART_S - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(after, self._start, occasion, probes)

    def _start(self, occasion: str, probes: list[str]) -> None:
        self._timer = None
        if self._process is not None:  # The last examination is still running, as the machine is very busy.
            return
        now, config = time.monotonic(), self._config
        window = _LOOK_BACK_S if self._last is None else now - self._last
        self._last = now
        settings = ProbeSettings(
            config.job_dir,
            peers=[] if config.near else [urlsplit(config.coordinator).netloc],
            clock=f"{config.coordinator}/time",
            token=config.token,
            window=window,
            visible=visible_gpus(),
        )
        order = ExaminationOrder(config.node, occasion, settings, probes, config.spec.health_checks, _CHECK_S)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "regrow.health.examination"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            _log.warning("node %s cannot be examined: %s", config.node, error)
            return
        self._listen(self._process, msgspec.json.encode(order))

    def _listen(self, process: subprocess.Popen[bytes], order: bytes) -> None:
        self._said = b""
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(order)
        loop = asyncio.get_running_loop()
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
            loop.add_reader(process.stdout, self._readable, process.stdout.fileno())
        self._limit = loop.call_later(_MOST_S, self._end)

    def _readable(self, descriptor: int) -> None:
        try:
            block = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        self._said += block
        if block:
            return
        said = self._said
        self._end()
        try:
            self._report(msgspec.json.decode(said, type=NodeExamined))
        except msgspec.MsgspecError:
            _log.warning("the examination of node %s gave no answer", self._config.node)

    def _end(self) -> None:
        process, self._process, self._said = self._process, None, b""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if process is None:
            return
        if process.stdout is not None:
            asyncio.get_running_loop().remove_reader(process.stdout)
            process.stdout.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
