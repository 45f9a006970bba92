"""`python -m regrow.agent`: reads its configuration as JSON from standard input and serves one node."""

import asyncio
import contextlib
import logging
import os
import signal
import sys

import msgspec

from regrow.agent.node import Agent
from regrow.agent.workers.processes import adopt_orphans, call_process, die_with_parent, prefer_promptness
from regrow.core.config import AgentConfig
from regrow.core.errors import RegrowError
from regrow.core.process.shortage import short_of_processes
from regrow.core.process.streams import open_standard_streams
from regrow.core.shown import Shown


class _Unhurried(logging.Handler):
    """Handler that writes to standard error without waiting for a reader."""

    def __init__(self) -> None:
        super().__init__()
        self._shown = Shown(2)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as a line."""
        with contextlib.suppress(OSError):
            self._shown.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))


def main() -> int:
    """Run the agent; returns its exit code."""
    open_standard_streams()
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    call_process("regrow-agent")
    adopt_orphans()
    prefer_promptness()
    logging.basicConfig(level=logging.WARNING, format="regrow agent: %(message)s", handlers=[_Unhurried()])
    try:
        config = msgspec.json.decode(sys.stdin.buffer.read(), type=AgentConfig)
    except msgspec.MsgspecError as error:
        sys.stderr.write(f"regrow agent: no configuration on standard input: {error}\n")
        return 2
    if os.getppid() != parent:
        return 1
    sys.setswitchinterval(0.0005)  # So that the output thread releases the GIL soon when a worker dies.
    try:
        return asyncio.run(Agent(config).run())
    except RegrowError as error:
        sys.stderr.write(f"regrow agent: {error}\n")
        return 1
    except (RuntimeError, OSError) as error:
        if not (short := short_of_processes(error)):
            raise
        sys.stderr.write(f"regrow agent: {short}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
