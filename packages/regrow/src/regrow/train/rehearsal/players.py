"""Finds objects that certainly are environments with observations: early stoppers have `reset` and `step` too."""

import ast
import dis
import inspect
from collections.abc import Iterable, Iterator
from types import FrameType

import numpy as np
import torch

from regrow.train.rehearsal import environments
from regrow.train.script.source import parsed


class Players:
    """The environments with observations among some objects, as they are before a body.

    Args:
        things: any objects.
        frames: frames of the script.
    """

    def __init__(self, things: Iterable[object], frames: Iterable[FrameType]) -> None:
        shown = [each for each in things if shows(each)]
        taken = [each for frame in frames for each in _whose_reset_is_used(frame)] if shown else []
        self._of_libraries = any(map(_has_spaces, shown))
        self._looks = [
            (each, environments.look(each))
            for each in shown
            if any(one is each or one is _SOME for one in taken) or _returns_array(each)
        ]

    def __bool__(self) -> bool:
        return self._of_libraries or bool(self._looks)

    def played(self) -> bool:
        """True if the body has stepped one of them, or if one is a library's, which may not show that."""
        return self._of_libraries or any(
            environments.difference(look, environments.look(each)) for each, look in self._looks
        )


def shows(thing: object) -> bool:
    """True for an environment whose `reset` returns something other than itself, None or a bool."""
    return environments.is_environment(thing) and any(each is not None for each in _ends_of_reset(thing))


def _ends_of_reset(thing: object) -> Iterable[str | None]:
    """For each `return` of `reset`: the returned attribute's name, "" for another value, None for no observation."""
    code = getattr(inspect.unwrap(type(thing).reset), "__code__", None)  # type: ignore[attr-defined]
    if code is None:
        return [""]
    given = [each for each in dis.get_instructions(code) if each.opname != "RESUME"]
    ends = [at for at, each in enumerate(given) if each.opname.startswith("RETURN") and "GENERATOR" not in each.opname]
    return [_returned(given, at if given[at].opname == "RETURN_CONST" else at - 1, code.co_varnames) for at in ends]


def _returned(given: list[dis.Instruction], at: int, variables: tuple[str, ...]) -> str | None:
    name, value, own = given[at].opname, given[at].argval, list(variables[:1])
    if name.startswith("LOAD_FAST"):
        return None if [value] == own else ""
    if "CONST" in name:
        return None if value is None or isinstance(value, bool) else ""
    of_own = name == "LOAD_ATTR" and given[at - 1].opname.startswith("LOAD_FAST") and [given[at - 1].argval] == own
    return str(value) if of_own else ""


def _returns_array(thing: object) -> bool:
    named = [each for each in _ends_of_reset(thing) if each]
    return any(isinstance(getattr(thing, "__dict__", {}).get(each), np.ndarray | torch.Tensor) for each in named)


def _has_spaces(thing: object) -> bool:
    found = {*getattr(thing, "__dict__", ()), *dir(type(thing))}
    return bool(found & {"observation_space", "action_space", "observation_spec"})


_SOME = object()
"""An object that the text does not determine: it is a function's argument, or held by another object."""


def _whose_reset_is_used(frame: FrameType) -> Iterator[object]:
    """Objects for which a frame's script uses the return value of `reset`, as it would not for an early stopper."""
    tree = parsed(frame)
    if tree is None:
        return
    there = {**frame.f_globals, **frame.f_locals}
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    given = {id(part): _names(each) for each in functions for part in ast.walk(each)}
    alone = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for each in ast.walk(tree):
        match each:
            case ast.Call(ast.Attribute(ast.Name(name), "reset")) if id(each) not in alone:
                yield _SOME if name in given.get(id(each), ()) else there.get(name)
            case ast.Call(ast.Attribute(_, "reset")) if id(each) not in alone:
                yield _SOME


def _names(function: ast.FunctionDef) -> set[str]:
    found = function.args
    return {each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs)} - {"self"}
