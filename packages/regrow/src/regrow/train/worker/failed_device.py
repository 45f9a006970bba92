"""A worker whose accelerator has failed ends: only another process can use it, and the error is not the script's."""

import contextlib
import os
import sys

from regrow.agent.workers.link import WorkerLink
from regrow.agent.workers.tracebacks import report
from regrow.core.errors import AgentGone
from regrow.core.exit_codes import DEVICE_FAILED
from regrow.core.messages import facts
from regrow.devices import accelerators, failing

_CURE = (
    "another process takes this rank; where it comes again at this step, look for the script's cause with "
    "CUDA_LAUNCH_BLOCKING=1, else drain the node"
)


def leave_if_device_failed(link: WorkerLink, error: BaseException) -> None:
    """End this process, where the error says that its device has failed and the device does not work any more.

    Nothing is put back before: what is on the device cannot be read, and the state comes from others.
    """
    why = failing.has_failed(error)
    if not why:
        return
    with contextlib.suppress(AgentGone):
        text = f"the {accelerators.kind().upper()} device of rank {link.env.rank} has failed ({why}): {_CURE}"
        link.send(facts.WorkerNoted(link.env.worker, text))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the script may have closed its own
            if stream is sys.stderr:
                stream.write(report(error).traceback)
            stream.flush()
    os._exit(DEVICE_FAILED)  # exit handlers would wait for the device
