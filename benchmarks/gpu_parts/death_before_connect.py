"""Part 5: a rank dies after it has met the others and before it connects to them, at the start and in a recovery."""

import sys

from gpu_parts.jobs import LIMIT_S, Job, play, same


def main() -> int:
    """Check that the other ranks recover from its death."""
    none = Job("none", options=(), ranks=3)
    start = Job("connect", options=("--standby=1", "--hang-timeout=10s"), ranks=3)
    recovery = Job("reconnect", options=("--standby=1", "--hang-timeout=10s"), ranks=3)
    play([none, start, recovery], LIMIT_S - 5)
    return 0 if same([start, recovery], none) else 1


if __name__ == "__main__":
    sys.exit(main())
