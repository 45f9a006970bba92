"""The stack above a call into a group: torch's own functions, and the script's, are known by their frames."""

import sys
from collections.abc import Iterator
from types import FrameType


def callers(depth: int) -> Iterator[FrameType]:
    """The frames above the function that iterates, nearest first, `depth` of them at most."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(depth):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
