"""A process that ends gives way a little, and fully once it has used much of a processor."""

import os
import sys
from subprocess import run

ENDS = """
import os, sys, time
from regrow.core.process.priority import end_soon
os.nice(int(sys.argv[1]))
end_soon(0.2)
print(os.getpriority(os.PRIO_PROCESS, 0), flush=True)
until = time.process_time() + 60
while os.getpriority(os.PRIO_PROCESS, 0) < 19 and time.process_time() < until:
    pass
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def test_a_process_that_ends_gives_way_a_little_until_it_has_used_much() -> None:
    assert priorities(0) == [max(5, here()), 19]


def test_it_takes_back_nothing_that_it_had_given_away() -> None:
    assert priorities(8)[0] == min(19, here() + 8)


def here() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def priorities(nice: int) -> list[int]:
    # In a session of its own, whose share of the processors it gives away as a whole.
    command = [sys.executable, "-c", ENDS, str(nice)]
    done = run(command, capture_output=True, text=True, timeout=120, check=True, start_new_session=True)
    return [int(line) for line in done.stdout.split()]
