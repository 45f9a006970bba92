"""`python -m regrow_guests.tied PARENT WORDS...`: regrow with these words, which ends with the process PARENT."""

import os
import signal
import sys

from regrow.agent.workers.processes import die_with_parent

_PARENT_GONE = 75


def command(arguments: list[str]) -> list[str]:
    """To be started by the main thread of the process that it ends with."""
    return [sys.executable, "-m", "regrow_guests.tied", str(os.getpid()), *arguments]


def main(parent: int, arguments: list[str]) -> int:
    """Become `regrow WORDS`. Returns only where the parent has ended already."""
    die_with_parent(signal.SIGTERM)  # stays over exec; the node is given back then, as at any SIGTERM
    if os.getppid() != parent:
        return _PARENT_GONE
    os.execv(sys.executable, [sys.executable, "-m", "regrow", *arguments])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
