"""Digests of code and values that are equal in all processes that run the same script.

They depend on no memory address, `id`, order of a set, or Python `hash`. Script code is digested by its byte code,
with the functions, classes and values of its modules that it refers to; an installed package's code by its name and
version. Large values are sampled evenly, so a change of a few samples in millions can go unnoticed.
"""

import dis
import enum
import functools
import os
import stat
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from regrow.core.process.own_code import is_own_name
from regrow.data.cache.evenly import SAMPLED_ITEMS, Digest, bytes_of_array, of, of_atom, of_bytes, of_tensor, sampled

_DEEPEST = 60
_MOST_VISITS = 50_000
"""Number of visits after which only the types of objects are digested, to limit the time to some 0.2 s."""
_LIBRARIES = tuple(
    os.path.join(path, "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_path(name))
)
_OF_THE_MACHINERY = frozenset(
    {
        "__module__",
        "__qualname__",
        "__dict__",
        "__weakref__",
        "__doc__",
        "__annotations__",
        "__firstlineno__",
        "__static_attributes__",
        "__slots__",
        "__parameters__",
        "__orig_bases__",
        "__abstractmethods__",
        "_abc_impl",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__classdictcell__",
        "__match_args__",
    }
)
_OPAQUE = (types.ModuleType, types.GeneratorType, torch.Generator, np.random.Generator, np.random.RandomState)
"""Types digested without their contents, which change with use."""
_SIMPLE = (int, float, complex, str, bytes, bool, type(None))


class Walk:
    """Digests several values that may share parts; each part is digested once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, Digest]] = {}
        self._within: set[int] = set()
        self._visits = 0
        self._in_code = 0
        """Nesting depth in functions, where the state of files is ignored: code may refer to a file that it writes."""

    def digest(self, value: Any) -> Digest:
        """Digest of a value, 16 bytes. Never raises, even if the value's own methods do."""
        if type(value) in _SIMPLE:
            return of_atom(value)
        if issubclass(type(value), os.PathLike):
            return of("path", os.fspath(value), "" if self._in_code else file_state(value))
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        self._visits += 1
        if id(value) in self._within or len(self._within) > _DEEPEST or self._visits > _MOST_VISITS:
            return of("within", _type_name(type(value)))
        self._within.add(id(value))
        try:
            digest = self._looked_at(value)
        except Exception as error:  # noqa: BLE001 - an attribute of the script's raised; only its type is digested
            digest = of("unreadable", _type_name(type(value)), type(error).__name__)
        finally:
            self._within.discard(id(value))
        # Hold the value, so that no other object can get its id.
        self._known[id(value)] = (value, digest)
        return digest

    def attributes(self, value: Any) -> dict[str, Any]:
        """Parts of an object by name: its own fingerprint, if it has one, and its pickled state or its attributes.

        With a `fingerprint()` method, or `_fingerprint` as in Hugging Face's data sets, only the fingerprint and public
        attributes count.
        """
        ingredients = fingerprint_of(value)
        state = _state_of(value)
        if ingredients is None:
            return state
        return {"fingerprint": ingredients} | {name: item for name, item in state.items() if not name.startswith("_")}

    def _looked_at(self, value: Any) -> Digest:
        if isinstance(value, torch.Tensor):
            return of_tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value))
        if isinstance(value, enum.Enum):
            return of("enum", _type_name(type(value)), value.name, self.digest(value.value))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, _OPAQUE):
            return of("opaque", _type_name(type(value)), getattr(value, "__name__", ""))
        code = self._callable(value)
        if code is not None:
            return code
        if isinstance(value, torch.dtype | torch.device | range | slice | types.EllipsisType | torch.Size):
            return of("plain", str(value))
        return self._object(value, self._content(value))

    def _content(self, value: Any) -> list[Digest]:
        """Digests of the items of a container."""
        if isinstance(value, bytearray | memoryview):
            return [of_bytes(value)]
        if isinstance(value, Mapping):
            pairs = [of(self.digest(key), self.digest(value[key])) for key in sampled(list(value))]
            return [of(len(value)), *sorted(pairs)]
        if isinstance(value, set | frozenset):
            return [of(len(value)), *sorted(self.digest(item) for item in _chosen(value))]
        if isinstance(value, list | tuple):
            return [of(len(value)), *(self.digest(item) for item in sampled(value))]
        if isinstance(value, str):
            return [of_atom(str.__str__(value))]
        if isinstance(value, int):
            return [of_atom(int.__index__(value))]
        if isinstance(value, float):
            return [of_atom(float.__float__(value))]
        if isinstance(value, bytes):
            return [of_bytes(value)]
        return []

    def _object(self, value: Any, content: list[Digest]) -> Digest:
        kind = type(value)
        attributes = self.attributes(value)
        if kind.__module__.partition(".")[0] in ("pandas", "pyarrow"):
            content = [*content, self.digest(_rows(value))]
        named = [of(name, self.digest(attributes[name])) for name in sorted(attributes)]
        return of("object", self.digest(kind), *content, *named)

    # --- code ----------------------------------------------------------------------------------------------------

    def _callable(self, value: Any) -> Digest | None:
        """Digest of the code that a call of `value` runs; None if that is its class's `__call__`, digested with it."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return self._code(value, {})
        if isinstance(value, types.MethodType):
            return of("method", self.digest(value.__func__), self.digest(value.__self__))
        if isinstance(value, functools.partial):
            return of("partial", self.digest(value.func), self.digest(value.args), self.digest(value.keywords))
        if isinstance(value, property):
            return of("property", *(self.digest(part) for part in (value.fget, value.fset, value.fdel)))
        if isinstance(value, staticmethod | classmethod):
            return of(type(value).__name__, self.digest(value.__func__))
        if isinstance(value, functools.cached_property):
            return of("cached", self.digest(value.func))
        wrapped = getattr(type(value), "__wrapped__", None) or _own(value, "__wrapped__")
        if wrapped is not None and wrapped is not value:
            return of("wrapped", _type_name(type(value)), self.digest(wrapped))
        if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | np.ufunc):
            owner = getattr(value, "__self__", None)
            about = b"" if owner is None or isinstance(owner, types.ModuleType) else self.digest(owner)
            return of("builtin", str(getattr(value, "__module__", "")), getattr(value, "__name__", ""), about)
        return None

    def _function(self, value: types.FunctionType) -> Digest:
        if (library := _library(value.__module__)) is not None:
            return of("library", library, value.__module__, value.__qualname__, self._closure(value))
        defaults = [self.digest(value.__defaults__), self.digest(value.__kwdefaults__)]
        own = self.digest(value.__dict__) if value.__dict__ else b""
        return of("function", self._code(value.__code__, value.__globals__), *defaults, self._closure(value), own)

    def _closure(self, value: types.FunctionType) -> Digest:
        cells: list[Digest] = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self.digest(cell.cell_contents))
            except ValueError:  # the variable is not assigned yet
                cells.append(of("empty"))
        return of("closure", *cells)

    def _code(self, code: types.CodeType, names: Mapping[str, Any]) -> Digest:
        consts = [
            self._code(const, names) if isinstance(const, types.CodeType) else self.digest(const)
            for const in code.co_consts
        ]
        words = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._in_code += 1
        try:
            referred = [of(name, self.digest(item)) for name, item in _referred(code, names)]
        finally:
            self._in_code -= 1
        ingredients = (code.co_name, code.co_code, code.co_exceptiontable, repr(words), repr(counts))
        return of("code", *ingredients, *consts, *referred)

    def _class(self, kind: type) -> Digest:
        if (library := _library(kind.__module__)) is not None:
            return of("library", library, _type_name(kind))
        bases = [self.digest(base) for base in kind.__bases__]
        body = [
            of(name, self.digest(item))
            for name, item in sorted(vars(kind).items())
            if name not in _OF_THE_MACHINERY and not isinstance(item, types.MemberDescriptorType)
        ]
        return of("class", kind.__qualname__, *bases, *body)

    def _array(self, value: "np.ndarray[Any, Any]") -> Digest:
        if value.dtype.hasobject:
            items = [self.digest(item) for item in sampled(value.reshape(-1).tolist())]
            return of("objects", str(value.shape), *items)
        return of("array", str(value.dtype), str(value.shape), of_bytes(bytes_of_array(value)))


def fingerprint_of(value: Any) -> str | None:
    """The fingerprint that an object provides of its own content; None if it provides none."""
    ingredients = _own(value, "_fingerprint")
    if isinstance(ingredients, str) and ingredients:
        return ingredients
    method = getattr(type(value), "fingerprint", None)
    if not isinstance(method, types.FunctionType):
        return None
    ingredients = method(value)
    return ingredients if isinstance(ingredients, str) else None


def file_state(path: str | bytes | os.PathLike[Any]) -> str:
    """Size and modification time of a file; empty if there is none, and for a folder, as any run may write to it."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return ""
    return "" if stat.S_ISDIR(state.st_mode) else f"{state.st_size} {state.st_mtime_ns}"


# --- parts of objects ------------------------------------------------------------------------------------------------


def _state_of(value: Any) -> dict[str, Any]:
    getstate = getattr(type(value), "__getstate__", None)
    if isinstance(getstate, types.FunctionType):
        try:
            state = getstate(value)
        except Exception:  # noqa: BLE001 - it cannot be pickled: use its attributes
            state = None
        if isinstance(state, dict):
            return {str(name): item for name, item in state.items()}
    attributes: dict[str, Any] = {}
    for kind in type(value).__mro__:
        for name, descriptor in vars(kind).items():
            if isinstance(descriptor, types.MemberDescriptorType):
                try:
                    attributes[name] = descriptor.__get__(value)
                except AttributeError:
                    continue  # a slot without a value
    attributes.update({str(name): item for name, item in _dict_of(value).items()})
    return attributes


def _dict_of(value: Any) -> dict[str, Any]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, dict) else {}


def _own(value: Any, name: str) -> Any:
    return _dict_of(value).get(name)


def _rows(value: Any) -> Any:
    """Size, columns and some rows of a pandas or pyarrow table."""
    count = len(value)
    places = list(sampled(range(count)))
    if hasattr(value, "iloc"):
        rows = value.iloc[places].to_dict("list") if value.ndim > 1 else value.iloc[places].to_list()
        return [value.shape, str(getattr(value, "dtypes", "")), rows]
    if hasattr(value, "take"):
        return [
            count,
            str(getattr(value, "schema", value)) if hasattr(value, "schema") else "",
            value.take(places).to_pylist(),
        ]
    return [count]


def _chosen(value: "set[Any] | frozenset[Any]") -> Iterable[Any]:
    if len(value) <= SAMPLED_ITEMS:
        return value
    kinds = {type(item) for item in value}
    return sampled(sorted(value)) if len(kinds) == 1 and kinds <= set(_SIMPLE) else ()


def _referred(code: types.CodeType, names: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names that the code looks up in its module, with their values; for a module, the attribute that it uses."""
    found: dict[str, Any] = {}
    instructions = list(dis.get_instructions(code))
    for at, instruction in enumerate(instructions):
        name = instruction.argval
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or name not in names:
            continue
        value = names[name]
        if isinstance(value, types.ModuleType):
            after = instructions[at + 1] if at + 1 < len(instructions) else None
            if (
                after is None
                or after.opname not in ("LOAD_ATTR", "LOAD_METHOD")
                or _library(value.__name__) is not None
            ):
                continue
            name, value = f"{name}.{after.argval}", getattr(value, after.argval, None)
        found[name] = value
    return sorted(found.items())


def _library(module: str | None) -> str | None:
    """Name and version of the installed package that a module belongs to; None for the script's own modules."""
    if module is None or module == "__main__":
        return None
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return top if top in sys.stdlib_module_names else None
    if not is_own_name(top) and not file.startswith(_LIBRARIES) and "-packages" not in file:
        return None
    return f"{top} {getattr(sys.modules.get(top), '__version__', '')}"


def _type_name(kind: type) -> str:
    # The module name of a script's own class depends on how the script was started.
    return kind.__qualname__ if _library(kind.__module__) is None else f"{kind.__module__}.{kind.__qualname__}"
