"""An actor's part: one node of the job, as a process that ends with the actor."""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from regrow.core.ids import Seconds
from regrow_guests import tied


class RayNode:
    """Runs in an actor with one call at a time, so that the actor's main thread starts the process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._held: socket.socket | None = None

    def place(self, address: str) -> tuple[str, int]:
        """The actor's address, by which other machines reach it, and a port there that is reserved for it."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._held = socket.socket(family)
        # The coordinator can still bind this port explicitly, because this socket does not listen.
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((address, 0))
        return address, int(self._held.getsockname()[1])

    def start(self, arguments: list[str], environment: Mapping[str, str], folder: str) -> None:
        """Start `regrow WORDS`."""
        if home := environment.get("REGROW_HOME"):
            Path(home).mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            tied.command(arguments), env={**os.environ, **environment}, cwd=folder or None, stdin=subprocess.DEVNULL
        )

    def wait(self, within: Seconds) -> int | None:
        """Exit code of the process; None: it still runs after `within` seconds."""
        if self._process is None:
            return None
        try:
            code = self._process.wait(within)
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    def leave(self) -> None:
        """Ask the process to leave within the job's grace."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
