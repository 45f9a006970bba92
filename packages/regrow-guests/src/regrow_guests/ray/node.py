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
    """Runs in an actor, with one call at a time, so that its process is started by the actor's main thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._held: socket.socket | None = None

    def place(self, address: str) -> tuple[str, int]:
        """The actor's address, by which others of the cluster reach it, and a port there that nobody else is given."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._held = socket.socket(family)
        # Whoever asks for it by number gets it as long as this one does not listen.
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
        """Exit code of the process; None: it runs still after `within` seconds."""
        if self._process is None:
            return None
        try:
            code = self._process.wait(within)
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    def leave(self) -> None:
        """Give the node back, within the job's grace."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
