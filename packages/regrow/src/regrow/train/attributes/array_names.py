"""Treatment of arrays in a script's variables, by the text of its loop."""

import contextlib
import inspect
from collections.abc import Callable, Iterable
from types import FrameType

from regrow.train.script.read_first import read_first
from regrow.train.state.arrays import Keep


def arrays_of_names(frames: Iterable[FrameType]) -> Callable[[str], Keep]:
    """Treatment by name: those that a body may read first are copied; all of them, where the text is not known."""
    with contextlib.suppress(RecursionError):  # of a text that is nested too deeply
        for frame in frames:
            if not frame.f_code.co_flags & inspect.CO_GENERATOR and (reads := read_first(frame)) is not None:
                found = dict.fromkeys(reads.first - reads.harmless, Keep.CONTENT)
                found |= dict.fromkeys(reads.added_to, Keep.ITSELF)
                return lambda name: found.get(name, Keep.NOT)
    return lambda _: Keep.CONTENT
