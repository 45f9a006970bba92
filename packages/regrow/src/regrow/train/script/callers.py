"""Finds the callers of the steps: the script's frames, iterators that count the steps, loops around the loop."""

import dis
import gc
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, GeneratorType

from regrow.core.process.own_code import is_own_file
from regrow.train.script.one_turn import turn_once
from regrow.train.script.source import is_script

_COUNT: dict[type, str] = {
    enumerate: "enumerate(...)",
    zip: "zip(...)",
    itertools.islice: "itertools.islice(...)",
    itertools.zip_longest: "itertools.zip_longest(...)",
    itertools.groupby: "itertools.groupby(...)",
    itertools.pairwise: "itertools.pairwise(...)",
}
READ_AHEAD = frozenset({_COUNT[itertools.groupby], _COUNT[itertools.pairwise]})
"""Iterators that request the next step before the script has run the code after the last one."""
_PASS_ON: tuple[type, ...] = (
    tuple,  # zip and chain hold their iterators in an iterator
    map,
    filter,
    itertools.chain,
    itertools.filterfalse,
    itertools.takewhile,
    itertools.dropwhile,
    itertools.starmap,
    type(iter(())),
)
_DEEP = 4


def script_frames(innermost: FrameType | None = None) -> list[FrameType]:
    """The frames of the script's own code on this thread's stack, innermost first."""
    mine: list[FrameType] = []
    for frame in _outwards(innermost or sys._getframe(1)):
        if is_script(frame.f_code.co_filename):
            mine.append(frame)
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break  # the frames around it have started the script
    return mine


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def counted_by(*steps: object) -> str:
    """Name an iterator that counts the items of `steps`, of which one is running now; empty if none is known.

    Such a counter counts a rehearsal like a step, and a newcomer's begins at 0 in the middle of the training.
    """
    # A running generator does not show its referents, so generators on the stack are found by their frames.
    between = {
        id(frame)
        for frame in itertools.takewhile(_passes_on, _outwards(sys._getframe(1)))
        if not is_own_file(frame.f_code.co_filename)
    }
    running = [
        each
        for each in (gc.get_objects() if between else [])
        if type(each) is GeneratorType and each.gi_frame is not None and id(each.gi_frame) in between
    ]
    near: list[object] = [*steps, *running]
    for _ in range(_DEEP):
        around = [each for each in gc.get_referrers(*near) if type(each) in _COUNT or type(each) in _PASS_ON]
        for each in around:
            if type(each) in _COUNT:
                return _COUNT[type(each)]
        if not around:
            break
        near = around
    return ""


def _passes_on(frame: FrameType) -> bool:
    generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
    return generator or is_own_file(frame.f_code.co_filename)


def script_loops() -> bool:
    """True if the script's own code loops over the steps; False if a library or an adapter does it for the script.

    A library's loop calls the script's callbacks once for a step, even if the body of the step runs again.
    """
    engine = __name__.partition(".")[0]
    for frame in _outwards(sys._getframe(1)):
        if (
            frame.f_globals.get("__name__", "").partition(".")[0] != engine
            and not frame.f_code.co_flags & inspect.CO_GENERATOR
        ):
            return is_script(frame.f_code.co_filename)
    return False


def loop_around(frames: Iterable[FrameType]) -> FrameType | None:
    """The innermost frame whose present call is in the body of a `for` loop that may have several iterations."""
    for frame in frames:
        loops = _loops_at(frame.f_code, frame.f_lasti)
        if loops and not turn_once(frame, loops):
            return frame
    return None


def _loops_at(code: CodeType, at: int) -> int:
    """Number of `for` loops whose bodies contain the instruction at this offset."""
    heads = {each.offset for each in dis.get_instructions(code) if each.opname == "FOR_ITER"}
    return len(
        {
            each.argval
            for each in dis.get_instructions(code)
            if each.opname.startswith("JUMP_BACKWARD") and each.argval in heads and each.argval < at < each.offset
        }
    )
