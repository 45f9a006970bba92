"""Fingerprints of a script's values that are not sent to newcomers: a replaced rank reports which of them it lacks.

They are taken as the loop begins and when a rank is replaced, never in a step. See decision 0124.
"""

import contextlib
import dis
import enum
import functools
import gc
import itertools
import marshal
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType
from typing import Any, cast

import numpy as np
import torch
import xxhash

from regrow.train.script.namespaces import Namespace
from regrow.train.script.source import modules_of_script, text_of, tree_of
from regrow.train.values.arrays import ARRAYS, Array, Keep, hashed, is_freed
from regrow.train.values.plain import ATOMS, PLAIN, has_grown, plain_kind, stays_here
from regrow.train.values.spaces import Spaces

_DEEP, _LAST, _WIDE, _WHOLE, _TEXT = 4, 8, 256, 32 << 20, 1 << 20
"""Levels of containers, last items of each, members of a set, bytes of an array, and letters of texts, at most."""
_NUMBERS, _CACHED = frozenset({bool, int, float, complex, str, bytes}), type(functools.lru_cache(lambda: None))
_BASES, _SHOWN = PLAIN | {np.ndarray, np.memmap}, (range, slice, torch.device)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType)
_SHORT: dict[str, Callable[[Any], object]] = {"pandas": len, "polars": len, "_weakrefset": set}
_SHORT["numpy"] = lambda seed: repr(seed.state)
_REDUCED = {"builtins", "itertools", "functools", "collections", "_io", "weakref", *_SHORT}
_LINK, _CHANGING = "_lru_list_elem", frozenset({list, dict, set, deque})
_WAYS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "STORE_ATTR", "STORE_GLOBAL"})
_Kept = Mapping[str, Mapping[str, object]]
_Marks = dict[str, tuple[bytes, bool, Callable[[], object]]]
"""By place: fingerprint, equal in all processes for the same value; True if it has arrays; returns it if an array."""


class Unkept:
    """Fingerprints of one script's values, by place. `spaces`: their places; `is_clock`: True for a clock's reading."""

    def __init__(self, spaces: Spaces, is_clock: Callable[[object], bool]) -> None:
        self._spaces, self._is_clock = spaces, is_clock
        self._begun: _Marks | None = None
        self._seen: set[int] = set()  # objects that were looked into for one place

    def begin(self, kept: _Kept) -> list[str]:
        """Take the first fingerprints as the loop begins. Later calls return the places that have changed since."""
        with contextlib.suppress(Exception):  # no value of the script may end the following of the others
            now = self._marks(kept)
            self._begun = now if self._begun is None else self._begun
            return [place for place in _changed(self._begun, now) if place in self._begun]
        return []

    def changed(self, kept: _Kept) -> dict[str, bytes]:
        """Fingerprints of the values that have changed since the loop began."""
        return {} if self._begun is None else _changed(self._begun, self._marks(kept))

    def differing(self, sent: Mapping[str, bytes], kept: _Kept) -> list[str]:
        """Places for which this rank's fingerprint differs from the one received from another rank, or is missing."""
        now, spaces = self._marks(kept), self._spaces.now()
        return [each for each in sent if each.split("\n")[0] in spaces and now.get(each, [b""])[0] != sent[each]]

    def _marks(self, kept: _Kept) -> _Marks:
        found, reads = _Marks(), self._spaces.reads
        for name, space in self._spaces.now().items():
            known = kept.get(name, {})
            for key, value in space.read().items():
                if type(key) is not str or key.startswith("__") or key in self._spaces.elsewhere:
                    continue
                if key in known and not (has_grown(known[key]) or stays_here(known[key])):
                    continue
                carried = not isinstance(space, Namespace) or self._spaces.arrays_named(key) is not Keep.NOT
                if carried or (reads is not None and key not in reads.written) or type(value) is _CACHED:
                    with contextlib.suppress(Exception):  # odd objects run code, and may raise, when they are inspected
                        self._seen.clear()
                        look = self._look(value, 0, there := list[Array]())
                        digest = xxhash.xxh3_64_digest(repr(look).encode("utf-8", "surrogatepass"))
                        found[f"{name}\n{key}"] = digest, bool(there or self._seen), _identity(value)
        return found

    def _look(self, value: Any, deep: int, arrays: list[Array]) -> object:
        """An object whose `repr` distinguishes the value from others of its kind."""
        kind, items = plain_kind(type(value)), list[Any]()
        kind = next((each for each in kind.__mro__ if each in _BASES), kind)  # a kind of its own builds on it
        if kind in ARRAYS:
            arrays.append(value)
            return _of_array(value)
        if issubclass(type(value), enum.Enum):
            return type(value).__qualname__, repr(value._name_)
        if kind in ATOMS or kind in _SHOWN or issubclass(kind, np.generic):
            text = cast(Any, kind).__repr__(value)
            return "clock" if self._is_clock(value) else (len(text), text[:200], text[-200:])
        if deep >= _DEEP:
            return kind.__qualname__
        if kind not in PLAIN:
            with contextlib.suppress(Exception):  # odd things show their kind only
                items = self._inside(value, kind)
        else:
            names = list(kind.keys(value)) if issubclass(kind, dict) else []
            items = list(kind.values(value)) if issubclass(kind, dict) else [*cast(Any, kind).__iter__(value)]
            is_set = kind in (set, frozenset)
            long = sum(len(each) for each in items if type(each) in (str, bytes)) > _TEXT
            if not long and _NUMBERS.issuperset(map(type, items)) and not any(map(self._is_clock, items[-_LAST:])):
                named = [each for each in names if type(each) is str or type(each) in _NUMBERS]
                return xxhash.xxh3_64_intdigest(marshal.dumps([named, sorted(items, key=repr) if is_set else items], 2))
            last = items[-_LAST:] if not is_set else items if len(items) <= _WIDE else []
            last = sorted(repr(self._look(each, deep + 1, arrays)) for each in last) if is_set else last
            items = [len(items), *names[-_LAST:], *last]
        return kind.__qualname__, [self._look(each, deep + 1, arrays) for each in items]

    def _inside(self, value: Any, kind: type) -> list[Any]:
        """Parts that distinguish an object from others of its kind."""
        if kind is _CACHED:  # a cache of constant results need not be the same on all ranks
            found = [each for each in gc.get_referents(value) if each is not vars(value)]
            if value.cache_parameters()["maxsize"] is None:
                found = [each for table in found if type(table) is dict for each in table.values()]
            tables = [id(each) for each in found if type(each) is dict and _LINK in str(list(map(type, each.values())))]
            return [each for each in found if type(each) in _CHANGING and each and id(each) not in tables]
        if kind is GeneratorType and (frame := value.gi_frame) is not None:
            there = [each for each in Namespace("", frame).read().values() if plain_kind(type(each)) in ATOMS]
            return [frame.f_lasti, *there]
        if kind in _CODE:
            return [value.__qualname__, getattr(getattr(value, "__code__", None), "co_firstlineno", 0)]
        if kind in (array, bytearray, memoryview):
            return [len(value), xxhash.xxh3_64_intdigest(value[-_WHOLE:])]
        if (package := kind.__module__.partition(".")[0]) in _REDUCED:
            with contextlib.suppress(Exception):  # of those that have no content to be copied
                return [_SHORT[package](value)] if package in _SHORT else list(value.__reduce_ex__(2)[1:])
            if package == "itertools":  # Python 3.14 has no copies of them; a second round of a `cycle` looks the same
                return [repr(value)] if kind is itertools.count else gc.get_referents(value)
        if id(value) in self._seen or len(self._seen) >= _WIDE:
            return []
        self._seen.add(id(value))
        return [each for pair in self._spaces.objects.missed(value) for each in pair]


def _changed(before: _Marks, now: _Marks) -> dict[str, bytes]:
    found = {}
    for place, (mark, has_arrays, get) in now.items():
        former, _, same = before.get(place, (b"", False, lambda: 0))
        if former != mark:
            written = same() == get() != 0
            if not has_arrays or written or _carries(place.partition("\n")[2]):
                found[place] = mark
    return found


def _identity(value: object) -> Callable[[], int]:
    """Returns the value's id; 0 once the value is gone, for kinds that allow weak references."""
    try:
        held = weakref.ref(value)
    except TypeError:
        return functools.partial(int, id(value))
    return lambda: 0 if (thing := held()) is None else id(thing)


def _of_array(thing: Array) -> object:
    if isinstance(thing, torch.Tensor) and thing.layout is not torch.strided:
        parts = thing.detach().to_sparse(layout=torch.sparse_coo).coalesce()
        return [_of_array(parts.indices()), _of_array(parts.values())]
    if is_freed(thing) or (isinstance(thing, np.ndarray) and thing.dtype.hasobject):
        return thing.shape
    return hashed(thing if thing.nbytes <= _WHOLE else thing.reshape(-1)[:: 1 + thing.nbytes // _WHOLE])


@functools.lru_cache(maxsize=1_000)
def _carries(name: str) -> bool:
    """True if arrays of this name may carry something from step to step, by the text of the script's functions.

    False if functions, other than those that build an object, only write them: then they hold the last step's result.
    """
    texts = {text_of(vars(each).get("__file__") or "") for each in modules_of_script()}
    uses = [_uses(name, code) for code in map(_compiled, texts) if code is not None]
    return "carried" in uses or "written" not in uses


@functools.cache
def _compiled(text: str) -> CodeType | None:
    return None if tree_of(text) is None else compile(text, "", "exec", dont_inherit=True)


def _uses(name: str, code: CodeType) -> str:
    inside = {_uses(name, each) for each in code.co_consts if isinstance(each, CodeType)}
    known = dis.get_instructions(code) if name in code.co_names else ()
    ways = [each.opname for each in known if each.argval == name and each.opname in _WAYS]
    stores = [way for way in ways if way.startswith("STORE") and code.co_name != "__init__"]
    carried = "carried" in inside or (stores and not ways[0].startswith("STORE"))
    return "carried" if carried else "written" if stores or "written" in inside else ""
