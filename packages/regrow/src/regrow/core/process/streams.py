"""Descriptors 0, 1 and 2 are there in each process of a job, whatever the one that started it had closed."""

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """First thing in a process: what is closed of 0, 1 and 2 is /dev/null from now on.

    Else the next file or socket gets that number, and is written to by whoever prints, or replaced. Python has None in
    place of such a stream.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # POSIX: the lowest number that is free
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
