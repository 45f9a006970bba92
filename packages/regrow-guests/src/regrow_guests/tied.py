"""`python -m regrow_guests.tied PARENT WORDS...`: runs regrow with these arguments; it ends with the process PARENT."""

import os
import signal
import sys

from regrow.agent.workers.processes import die_with_parent

_PARENT_GONE = 75


def command(arguments: list[str]) -> list[str]:
    """Command to be started by the main thread of the process with which it must end."""
    return [sys.executable, "-m", "regrow_guests.tied", str(os.getpid()), *arguments]


def main(parent: int, arguments: list[str]) -> int:
    """Become `regrow WORDS`. Returns only if the parent has already ended."""
    die_with_parent(signal.SIGTERM)  # kept over exec; the node then leaves, as at any SIGTERM
    if os.getppid() != parent:
        return _PARENT_GONE
    os.execv(sys.executable, [sys.executable, "-m", "regrow", *arguments])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
