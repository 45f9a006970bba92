"""Keeps descriptors 0, 1 and 2 open in each process of a job, even if its parent had closed them."""

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Open /dev/null for each of the descriptors 0, 1 and 2 that is closed; called first in a process.

    Else the next file or socket would get that number: prints would write to it, or a redirection would replace it.
    Python has None in place of such a stream.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # POSIX: `open` returns the lowest free number
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
