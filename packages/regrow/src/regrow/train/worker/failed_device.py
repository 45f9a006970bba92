"""Ends a worker whose accelerator has failed: only another process can use it, and the error is not the script's."""

import contextlib
import os
import sys
import time

from regrow.agent.workers.link import WorkerLink
from regrow.agent.workers.tracebacks import report
from regrow.core.errors import AgentGone
from regrow.core.exit_codes import DEVICE_FAILED
from regrow.core.messages import facts
from regrow.core.messages.vocabulary import Role
from regrow.devices import accelerators, failing, memory_return

_CURE = (
    "another process takes this rank; where it comes again at this step, look for the script's cause with "
    "CUDA_LAUNCH_BLOCKING=1, else drain the node"
)


def judge_failure(link: WorkerLink, error: BaseException) -> None:
    """Judge an error that ends the script: end the process at once if its device has failed.

    A newcomer or restarted worker that ran out of memory waits until the memory of a dead process is free, so that the
    next worker finds it.
    """
    leave_if_device_failed(link, error)
    first = link.env.role is Role.RANK and link.env.restarts == 0
    if first or not memory_return.ran_out(error):
        return
    began = time.monotonic()
    try:
        found = memory_return.await_return()
    except RuntimeError:  # the device does not report its memory any more, so the known error counts
        return
    text = f"rank {link.env.rank} found too little memory on its device, as it came after others"
    took = f"{time.monotonic() - began:.0f} s later {found / 2**30:.1f} GiB more were free"
    link.send(facts.WorkerNoted(link.env.worker, f"{text}: {took}"))


def leave_if_device_failed(link: WorkerLink, error: BaseException) -> None:
    """End this process if the error says that its device has failed, and the device does not work any more.

    Nothing is rolled back before: the device's memory cannot be read, and the state comes from other ranks.
    """
    why = failing.has_failed(error)
    if not why:
        return
    with contextlib.suppress(AgentGone):
        text = f"the {accelerators.kind().upper()} device of rank {link.env.rank} has failed ({why}): {_CURE}"
        link.send(facts.WorkerNoted(link.env.worker, text))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the script may have closed its own streams
            if stream is sys.stderr:
                stream.write(report(error).traceback)
            stream.flush()
    os._exit(DEVICE_FAILED)  # exit handlers would wait for the device
