"""Values that functions, classes and enums share with all their holders.

These are defaults, variables of the enclosing function, globals, and attributes of the class. They are followed like
other values; a step may change their contents, but not replace them.
"""

import contextlib
import dataclasses
import dis
import enum
import functools
import itertools
import reprlib
import sys
from collections import deque
from collections.abc import Collection, Iterator
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch

from regrow.core.process.own_code import is_own_name
from regrow.train.graphs.kinds import ATOMS, DICTS, GENERATOR_TYPES
from regrow.train.script.source import is_script

_LIBRARIES = frozenset({"builtins", "numpy", "torch", *sys.stdlib_module_names})
_DATA = (list, deque, bytearray, np.ndarray, torch.Tensor, *DICTS, *GENERATOR_TYPES)
FIELDS = type(vars(NamedTuple("_Fields", [("field", int)]))["field"])
_REPR = {each.__code__.co_filename for each in (reprlib.recursive_repr, dataclasses.field)}
"""Files whose functions hold a set of objects being printed, empty between steps; each dataclass has one."""
_BUILTINS = (BuiltinFunctionType, MethodWrapperType)
Given = list[tuple[str, object]]


def is_followed(kind: type) -> bool:
    """True for a class whose attributes steps may change: not of numpy, torch, or the standard library."""
    module = str(kind.__module__)
    if is_own_name(module):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return module.partition(".")[0] not in _LIBRARIES or bool(file and is_script(file))


def followed_bases(kind: type) -> dict[str, type]:
    """The followed classes in `kind`'s MRO, itself included, by the prefix of their attributes' paths."""
    found: dict[str, type] = {}
    for base in kind.__mro__ if is_followed(kind) else ():
        at = "" if base is kind else f".{base.__name__}"
        while at in found:  # a class may have the name of one of its bases
            at += "'"
        found[at] = base
    return {at: base for at, base in found.items() if is_followed(base)}


def given_to(code: object) -> Given:
    """Values that a function, a class, an enum's member or the like has, each with the suffix of its path."""
    if isinstance(code, type):
        return list(_of_enum(code) if issubclass(code, enum.Enum) else _of_class(code)) if is_followed(code) else []
    if isinstance(code, enum.Enum):
        own = [(f".{name}", each) for name, each in vars(code).items() if not name.startswith("_") or name == "_value_"]
        return [(".__class__", type(code)), *own] if is_followed(type(code)) else []
    if isinstance(code, FunctionType):
        return list(_of_function(code))
    if isinstance(code, functools.partial):
        return [(f" with {at}", each) for at, each in _of_partial(code)]
    if isinstance(code, property):
        return [(f".{at}", each) for at in ("fget", "fset", "fdel") if (each := getattr(code, at)) is not None]
    if isinstance(code, staticmethod | classmethod):
        return [(".__func__", code.__func__)]
    if isinstance(code, MethodType):
        return [(".__self__", code.__self__)]
    if isinstance(code, _BUILTINS) and not isinstance(code.__self__, ModuleType | type | None):
        return [(".__self__", code.__self__)]
    return []


def apart(given: Given, exchanged: Collection[str]) -> Given:
    """Values that are not in these places, with the suffixes of their paths."""
    if not exchanged:
        return given
    stems = tuple(f"{at}{more}" for at in exchanged for more in (".", " ", "["))
    return [(at, each) for at, each in given if at not in exchanged and not at.startswith(stems)]


def built_alike(code: object, exchanged: Collection[str]) -> Given:
    """Values of `code` outside of the places in `exchanged`, in an order that exchanges do not change."""
    return sorted(apart(given_to(code), exchanged), key=lambda each: each[0])


def _of_partial(code: functools.partial[Any]) -> Iterator[tuple[object, object]]:
    yield from enumerate([code.func, *code.args])
    yield from code.keywords.items()
    yield from vars(code).items()


def _of_function(code: FunctionType) -> Iterator[tuple[str, object]]:
    if code.__code__.co_filename in _REPR:
        return
    for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the variable has no value yet
            yield f" with {name}", cell.cell_contents
    yield from ((f" default {at}", each) for at, each in enumerate(code.__defaults__ or ()))
    yield from ((f" default {at}", each) for at, each in (code.__kwdefaults__ or {}).items())
    yield from ((f".{name}", each) for name, each in vars(code).items())
    if is_script(code.__code__.co_filename):
        is_method = not code.__qualname__.rpartition(".")[0].endswith("<locals>") and "." in code.__qualname__
        for name in globals_of(code.__code__):
            each = code.__globals__.get(name)
            if isinstance(each, type) or (not is_method and _is_state(each)):
                yield f" global {name}", each


def _is_state(value: object) -> bool:
    """True for a global variable's value that a step may change; models and optimizers are protected separately."""
    if isinstance(value, FunctionType):
        return is_script(value.__code__.co_filename)
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | type):
        return False
    return type(value) in _DATA or (is_followed(type(value)) and not hasattr(type(value), "state_dict"))


def _of_class(kind: type) -> Iterator[tuple[str, object]]:
    for at, base in followed_bases(kind).items():
        for name, value in vars(base).items():
            of_code = isinstance(value, FunctionType | staticmethod | classmethod) and not name.startswith("__annotate")
            if (of_code or not name.startswith(("__", "_abc_"))) and not isinstance(
                value, MemberDescriptorType | GetSetDescriptorType | FIELDS
            ):
                yield from ((f"{at}.{name}{more}", each) for more, each in _of_attribute(value))


def _of_enum(kind: type[enum.Enum]) -> Iterator[tuple[str, object]]:
    yield from ((f".{name}", each) for name, each in kind.__members__.items())
    for name, value in vars(kind).items():
        if isinstance(value, FunctionType) and not name.startswith("_"):
            yield from ((f".{name}{more}", each) for more, each in _of_attribute(value))


def _of_attribute(value: object) -> Given:
    if isinstance(value, FunctionType):
        # A function counts only if it has values; its code may write variables of enclosing functions.
        return [("", value)] if given_to(value) else []
    if isinstance(value, property | staticmethod | classmethod):
        return [(at + more, each) for at, held in given_to(value) for more, each in _of_attribute(held)]
    if isinstance(value, itertools.count) or (type(value) is frozenset and all(type(each) in ATOMS for each in value)):
        return [("", ", ".join(sorted(map(repr, value)) if isinstance(value, frozenset) else [repr(value)]))]
    return [("", value)]


@functools.lru_cache(maxsize=10_000)
def globals_of(code: CodeType) -> tuple[str, ...]:
    """Names of global variables that code reads."""
    names = {each.argval: None for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= dict.fromkeys(globals_of(inner))
    return tuple(names)


def alike(one: object, other: object) -> bool:
    """True for the same thing, and for equal numbers or text, or tuples of these."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return is_atom(one) and repr(one) == repr(other)


def is_atom(value: object) -> bool:
    """True for numbers, text and the like."""
    return type(value) in ATOMS or isinstance(value, np.generic | np.dtype | range | enum.Enum)
