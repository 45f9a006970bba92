"""A process that ends gives way a little, and fully once it has used much of a processor."""

import os
import sys
from subprocess import run

ENDS = """
import os, sys, threading, time
from regrow.core.process.priority import end_soon
os.nice(int(sys.argv[1]))
if sys.argv[2] == "alone":
    def refused(_):
        raise RuntimeError("can't start new thread")
    threading.Thread.start = refused
end_soon(0.2)
print(os.getpriority(os.PRIO_PROCESS, 0), flush=True)
until = time.process_time() + 60
while os.getpriority(os.PRIO_PROCESS, 0) < 19 and time.process_time() < until:
    pass
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def test_a_process_that_ends_gives_way_a_little_until_it_has_used_much() -> None:
    assert priorities(0) == [max(10, here()), 19]


def test_it_takes_back_nothing_that_it_had_given_away() -> None:
    assert priorities(12)[0] == min(19, here() + 12)


def test_where_no_thread_may_be_started_it_lets_others_go_first_at_once() -> None:
    assert priorities(0, "alone") == [19, 19]


def here() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def priorities(nice: int, threads: str = "any") -> list[int]:
    # In a session of its own, whose share of the processors it gives away as a whole.
    command = [sys.executable, "-c", ENDS, str(nice), threads]
    done = run(command, capture_output=True, text=True, timeout=120, check=True, start_new_session=True)
    return [int(line) for line in done.stdout.split()]
