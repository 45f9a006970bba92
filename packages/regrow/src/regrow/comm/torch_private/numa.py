"""Binds a worker to the processors near its accelerator, which torch finds: torchrun's `--numa-binding`.

A fork asks torch, because the question initializes a device, and the script may still choose its devices.

Source: https://docs.pytorch.org/docs/stable/elastic/numa.html
"""

import contextlib
import inspect
import os
import select
import signal
import time
from collections.abc import Callable, Iterable

import torch

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds

ASK_S: Seconds = 60.0
"""Longest time for the fork's answer: with many devices the initialization takes seconds."""


def bind(mode: str, device: int) -> str:
    """Bind all present and future threads of this process; returns the reason if nothing was bound, else empty.

    Args:
        mode: torchrun's name of it: node, socket, exclusive or core-complex.
        device: number of the accelerator on its node.
    """
    allowed = os.sched_getaffinity(0)
    try:
        found = _in_a_fork(lambda: processors(mode, device))
        if found == allowed:
            return "all processors that it may use are as near to its device"
        for thread in map(int, os.listdir("/proc/self/task")):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                if os.sched_getaffinity(thread) == allowed:
                    os.sched_setaffinity(thread, found)
    except (OSError, UsageError) as error:
        return str(error)
    return ""


def processors(mode: str, device: int) -> set[int]:
    """The processors that torchrun would choose. Raises `UsageError` without an accelerator, else torch's errors."""
    if not torch.accelerator.is_available():
        raise UsageError("there is no accelerator")
    from torch.numa import binding

    ask: Callable[..., set[int]] = binding._get_logical_cpus_to_bind_to
    index = next(iter(inspect.signature(ask).parameters))  # torch has had two names for it
    return ask(**{index: device}, numa_options=binding.NumaOptions(binding.AffinityMode(mode)))


def _in_a_fork(ask: Callable[[], Iterable[int]]) -> set[int]:
    """Run `ask` in a child process. Raises `UsageError` with the child's reason, or if it does not answer in time."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = ",".join(map(str, ask())) or "it may use no processor that is near to its device"
        except BaseException as error:  # noqa: BLE001  reported as a reason; no code of the parent's may run here
            said = str(error) or type(error).__name__
        try:
            os.write(writes, f"{said}\n".encode())
        finally:
            os._exit(0)
    os.close(writes)
    received, until = b"", time.monotonic() + ASK_S
    try:
        while select.select([reads], [], [], max(0.0, until - time.monotonic()))[0]:
            if not (part := os.read(reads, select.PIPE_BUF)):
                break
            received += part
    finally:
        os.close(reads)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = received.decode(errors="replace").partition("\n")[0]
    if not said.replace(",", "").isdecimal():
        raise UsageError(said or "torch did not report the processors near it")
    return set(map(int, said.split(",")))
