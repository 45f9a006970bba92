"""Kinds of values in a graph of objects: each determines how a value is remembered and sent, or why it cannot be.

No code of the script runs here, nor code that a message names: objects are read and written by their attributes.
"""

import datetime
import decimal
import dis
import enum
import fractions
import functools
import logging
import pathlib
import random
import re
import struct
import sys
import threading
import types
import uuid
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator

import numpy as np
import torch

from regrow.core.errors import NotCarried
from regrow.core.process.own_code import is_own_name
from regrow.train.graphs.received import is_plain

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
BITS = {name: getattr(np.random, name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")}
DICTS = frozenset({dict, defaultdict, OrderedDict, Counter})
_CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    functools.partial,
    property,
    staticmethod,
    classmethod,
    np.ufunc,
    type(np.mean),
)
_FIXED = (
    pathlib.PurePath,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    uuid.UUID,
    re.Pattern,
    slice,
    type(Ellipsis),
    type(NotImplemented),
    types.GenericAlias,
    types.UnionType,
    weakref.ref,
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
GENERATOR_TYPES = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator, torch.Generator)
_OF_TORCH = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode, torch.amp.autocast)
"""Contexts and decorators of torch, such as `torch.no_grad()`."""
_FLAGS = (threading.Event, threading.Semaphore, threading.Barrier)
OF_LIBRARIES = (getattr(np.random.mtrand, "_rand", None), getattr(random, "_inst", None), torch.default_generator)
"""Global random generators, which are seeded for each body."""
_ELSEWHERE = frozenset(
    {"multiprocessing", "subprocess", "concurrent", "asyncio", "socket", "ssl", "_io", "io", "select"}
)
_NO_ENVIRONMENTS = frozenset({"torch", "builtins", "accelerate", "transformers"})
"""Packages whose objects are never environments: a script sees all changes that steps make to them."""
_HEAP_TYPE = 1 << 9
_WORD = struct.calcsize("P")


class ThingKind(enum.StrEnum):
    """Kind of a value: decides how it is remembered and sent."""

    ATOM = "atom"
    CONSTANT = "constant"
    TUPLE = "tuple"
    NAMED = "named tuple"
    FROZENSET = "frozenset"
    LIST = "list"
    DEQUE = "deque"
    DICT = "dict"
    BYTES = "bytearray"
    DTYPE = "dtype"
    RANGE = "range"
    ENUM = "enum"
    ARRAY = "array"
    ITEMS = "array of objects"
    TENSOR = "tensor"
    BITS = "bit generator"
    NUMPY = "numpy generator"
    LEGACY = "numpy random state"
    PYTHON = "python generator"
    TORCH = "torch generator"
    METHOD = "method"
    OWN_STATE = "object that says its state"
    OBJECT = "object"


_EXACT: dict[type, ThingKind] = {
    tuple: ThingKind.TUPLE,
    list: ThingKind.LIST,
    deque: ThingKind.DEQUE,
    bytearray: ThingKind.BYTES,
    range: ThingKind.RANGE,
    types.MethodType: ThingKind.METHOD,
    np.random.Generator: ThingKind.NUMPY,
    np.random.RandomState: ThingKind.LEGACY,
    random.Random: ThingKind.PYTHON,
    torch.Generator: ThingKind.TORCH,
    torch.Tensor: ThingKind.TENSOR,
    **dict.fromkeys(ATOMS, ThingKind.ATOM),
    **dict.fromkeys(DICTS, ThingKind.DICT),
}


def raise_all(errors: list[NotCarried]) -> None:
    """Raise the first error, if there are any, with the others in `more`."""
    if errors:
        errors[0].more = errors[1:]
        raise errors[0]


def kind_of(value: object, path: str) -> ThingKind:
    """Kind of a value. Raises `NotCarried` if it cannot be sent."""
    if isinstance(value, types.MethodType) and not isinstance(value.__func__, types.FunctionType):
        return ThingKind.CONSTANT  # of a class made in C, such as numpy's generators
    if (exact := _EXACT.get(type(value))) is not None:
        return ThingKind.CONSTANT if any(value is each for each in OF_LIBRARIES) else exact
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return ThingKind.ATOM
    if isinstance(value, set | frozenset):
        return _of_set(value, path)
    if isinstance(value, np.dtype):
        if not is_plain(value):
            raise NotCarried(path, value, "it is a type with objects, or of raw memory")
        return ThingKind.DTYPE
    if isinstance(value, enum.Enum):
        if type(value).__members__.get(value.name) is not value:
            raise NotCarried(path, value, "it is several flags together, or no member of its enum")
        return ThingKind.ENUM
    if isinstance(value, _CODE):
        _refuse_counting(value, path)
        return ThingKind.CONSTANT
    if isinstance(value, (*_FIXED, *_LOCKS, logging.Logger)):
        if type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
            raise NotCarried(path, value, "it is of a class of its own, made from one whose objects never change")
        return ThingKind.CONSTANT
    if isinstance(value, _OF_TORCH) or type(value).__module__ == "typing":
        return ThingKind.CONSTANT
    if isinstance(value, _FLAGS):
        raise NotCarried(path, value, "it is one of threads, which go on beside the steps")
    if isinstance(value, np.ndarray):
        return _of_array(value, path)
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        if hasattr(value, "__dict__"):
            raise NotCarried(path, value, "it is a tuple with attributes")
        return ThingKind.NAMED
    if type(value) in BITS.values():
        return ThingKind.BITS
    return _of_object(value, path)


def _of_array(array: np.ndarray, path: str) -> ThingKind:
    if type(array) is not np.ndarray:
        raise NotCarried(path, array, "it is an array of a class of its own")
    if not array.dtype.hasobject:
        if not is_plain(array.dtype):
            raise NotCarried(path, array, "its items are raw memory")
        return ThingKind.ARRAY
    if array.dtype.names is not None or array.base is not None:
        raise NotCarried(path, array, "it has objects in fields, or is a view of objects")
    return ThingKind.ITEMS


def says_its_state(value: object) -> bool:
    """True if the value's class has `state_dict` and `load_state_dict`, or `get_state` and `set_state`."""
    kind = type(value)
    pairs = ("state_dict", "load_state_dict"), ("get_state", "set_state")
    return any(callable(getattr(kind, get, None)) and callable(getattr(kind, put, None)) for get, put in pairs)


def _of_object(value: object, path: str) -> ThingKind:
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        raise NotCarried(path, value, "models and optimizers are protected by themselves")
    if package in _ELSEWHERE or isinstance(value, threading.Thread):
        raise NotCarried(path, value, "what it does is in another process or thread, or outside")
    if package == "torch" or is_own_name(package):
        raise NotCarried(path, value, f"it is an object of {package}'s own")
    if isinstance(value, GENERATOR_TYPES):
        raise NotCarried(path, value, "it has a state that its attributes do not show")
    if says_its_state(value):
        return ThingKind.OWN_STATE
    if hasattr(value, "__next__"):
        raise NotCarried(path, value, "the position of an iterator cannot be set")
    if kind is types.SimpleNamespace:
        return ThingKind.OBJECT
    if not isinstance(getattr(kind, "__module__", None), str) or not all(map(_is_of_python, kind.__mro__)):
        raise NotCarried(path, value, "it has a state that its attributes do not show")
    return ThingKind.OBJECT


def _of_set(value: "set[object] | frozenset[object]", path: str) -> ThingKind:
    if type(value) is frozenset and len(value) <= 1:
        return ThingKind.FROZENSET
    raise NotCarried(
        path, value, "the order in which it is gone through cannot be carried; a dict with values None can"
    )


def _is_of_python(kind: type) -> bool:
    """True for a class defined in Python, whose instances consist of attributes, slots and weak references only."""
    base = kind.__base__
    if base is None:
        return kind is object
    own = vars(kind)
    slots = sum(isinstance(each, types.MemberDescriptorType) for each in own.values())
    if not kind.__flags__ & _HEAP_TYPE or (slots and "__slots__" not in own):
        return False
    words = slots + ("__dict__" in own) + ("__weakref__" in own)
    return kind.__itemsize__ == 0 and kind.__basicsize__ - base.__basicsize__ <= words * _WORD


def is_key(value: object) -> bool:
    """True for a dictionary key that is complete as soon as it is made, and whose class has no code of its own."""
    kind = type(value)
    if kind in ATOMS or isinstance(value, np.generic):
        return True
    if isinstance(value, enum.Enum):
        return kind.__hash__ is enum.Enum.__hash__ and kind.__eq__ in (object.__eq__, int.__eq__, str.__eq__)
    if not isinstance(value, tuple) or kind.__hash__ is not tuple.__hash__ or kind.__eq__ is not tuple.__eq__:
        return False
    return all(is_key(each) for each in value)


def _refuse_counting(code: object, path: str) -> None:
    """Refuse code that writes variables of an enclosing function; all other functions are the same on all ranks."""
    if isinstance(code, types.FunctionType) and (kept := _written(code.__code__)):
        raise NotCarried(path, code, f"the function writes `{kept[0]}` of the function around it")


@functools.lru_cache(maxsize=10_000)
def _written(code: types.CodeType) -> list[str]:
    """Variables of enclosing functions that code, or a function in it, writes."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_DEREF", "DELETE_DEREF")}
    names |= {name for inner in code.co_consts if isinstance(inner, types.CodeType) for name in _written(inner)}
    return sorted(names & set(code.co_freevars))


def can_be_followed(value: object) -> bool:
    """True for a value whose state can be read: a container, a random generator, an object of a Python class.

    A value that a script replaces by another (an array, a number) is identified by a name, and cannot be followed.
    """
    kind = type(value)
    if isinstance(value, np.random.RandomState | random.Random | list | dict | set | deque):
        return kind in _EXACT or kind is set  # a set is refused later, with a hint
    ours = is_own_name(kind.__module__) or kind.__module__.partition(".")[0] in _NO_ENVIRONMENTS
    return (
        not ours
        and not callable(value)
        and not isinstance(value, (*_CODE, *_FIXED, tuple, enum.Enum, np.ndarray, np.generic))
    )


def slots_of(value: object) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    """Slots of an object, by name."""
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and kind.__flags__ & _HEAP_TYPE:
                yield name, member


def slot_values(value: object) -> dict[str, object]:
    """Values of the slots that have one."""
    values: dict[str, object] = {}
    for name, member in slots_of(value):
        try:
            values[name] = member.__get__(value)
        except AttributeError:
            continue
    return values


def put_slots(value: object, values: dict[str, object]) -> None:
    """Set an object's slots to these values, and delete the values of its other slots."""
    for name, member in slots_of(value):
        if name in values:
            member.__set__(value, values[name])
        else:
            try:
                member.__delete__(value)
            except AttributeError:
                continue
