"""Finds the `for` loop of a script that requests steps, by the instruction that requests one."""

import ast
import dis
import inspect
from types import CodeType, FrameType
from typing import NamedTuple

from regrow.train.script.source import is_script, last_line, parsed

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Asking(NamedTuple):
    """Place in the code at which a call requests the next step."""

    code: CodeType
    instruction: int


def asking_frame(frame: FrameType | None) -> FrameType | None:
    """The frame that requests a step: `frame`, or the caller of libraries' generators that pass steps on.

    None if a generator of the script requests it, which may give its loop something made from the step.
    """
    while frame is not None and frame.f_code.co_flags & _GENERATORS:
        frame = None if is_script(frame.f_code.co_filename) else frame.f_back
    return frame


def asking(frame: FrameType | None) -> Asking | None:
    """Place of the request in `asking_frame`; to be called during the request."""
    found = asking_frame(frame)
    return None if found is None else Asking(found.f_code, found.f_lasti)


def loop_at(frame: FrameType, instruction: int) -> ast.For | None:
    """The loop that requests steps at this instruction, if its body begins on a line of its own."""
    asks = [each for each in dis.get_instructions(frame.f_code) if each.offset <= instruction]
    tree = parsed(frame) if asks and asks[-1].opname == "FOR_ITER" else None
    if tree is None:
        return None
    lines = [(offset, line) for offset, line in dis.findlinestarts(frame.f_code) if line]
    head = max((each for each in lines if each[0] <= instruction), default=(0, 0))[1]
    first = next((line for offset, line in lines if offset > instruction and line != head), 0)
    loops = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.For)
        and each.body[0].lineno == first
        and last_line(each.iter) < first
        and each.lineno <= head <= last_line(each.iter)
    ]
    return loops[0] if len(loops) == 1 else None
