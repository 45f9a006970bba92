"""Bind the variables of a step's body after the body was cut off, so that `return loss` still works.

If a function of the script iterates over the steps, its variables keep the values of an earlier body. But a function
that only has the `with` begins without variables in each step, and `del loss` removes one: there a body that was cut
off, which the script does not see, would end the job by an `UnboundLocalError`. So these variables get small copies of
the values from the last complete body.
"""

import copy
import dis
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import is_dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from regrow.core.errors import UsageError
from regrow.train.script.namespaces import Namespace

_SMALL = 1_024
"""Largest number of elements of a tensor that is kept as it is."""
_LEAVES = 100
"""Largest number of values in a container that is kept."""
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class _Large(NamedTuple):
    """Placeholder for a tensor that is too large to be kept."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


class _NotKept(Exception):
    """Raised for a value that is not kept."""


class BodyBindings:
    """Keeps the variables that bodies bind, by the code that enters the steps. `writes`: regrow may bind them again."""

    def __init__(self, *, writes: bool = True) -> None:
        self._writes = writes
        self._bound: dict[CodeType, dict[str, object]] = {}
        self._before: set[str] = set()
        self._code: CodeType | None = None

    def enters(self, frame: FrameType) -> None:
        """Note the variables that exist as the body of a step begins in this frame."""
        self._code, self._before = frame.f_code, set(Namespace("body", frame).read())

    def leaves(self, frame: FrameType, *, whole: bool) -> None:
        """Keep copies of the variables that a `whole` body has bound; bind them again after a body that was cut off."""
        if frame.f_code is not self._code:
            return  # for example, an `ExitStack` entered the step, not the script itself
        space = Namespace("body", frame)
        now = space.read()
        if not self._writes:
            if whole and not self._bound:
                _refuse_read_behind(frame, now.keys() - self._before)
            self._bound[frame.f_code] = {}
            return
        if whole:
            kept = self._bound[frame.f_code] = {}
            for name in now.keys() - self._before:
                try:
                    kept[name] = _kept(now[name], _LEAVES)
                except Exception:  # noqa: BLE001  a copy of a script's objects may raise anything
                    continue
            return
        missing = {name: _given(value) for name, value in self._bound.get(frame.f_code, {}).items() if name not in now}
        if missing:
            space.write(missing)


def _refuse_read_behind(frame: FrameType, bound: Collection[str]) -> None:
    """Raise `UsageError` for a function that runs once per step and reads the body's variables after the body."""
    behind = [each for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti]
    if not any("JUMP_BACKWARD" in each.opname or each.argval == "committed" for each in behind):
        read = [each.argval for each in behind if each.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_DEREF"))]
        for name in filter(bound.__contains__, read):
            raise UsageError(
                f"{frame.f_code.co_qualname} reads `{name}` after a step's body that may be cut off before it "
                "binds that, and --no-script-rewrite keeps regrow from binding it",
                hint=f"bind `{name}` before the `with`, or go on after it only `if step.committed`",
            )


def _kept(value: object, room: int) -> object:
    if type(value) in (torch.Tensor, torch.nn.Parameter) and isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise _NotKept
        return value.detach() if value.numel() <= _SMALL else _Large(value.shape, value.dtype, value.device)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict) and len(value) <= room and _is_mere(type(value)):
        # Keep the class: Hugging Face's models return a dictionary with attributes.
        made: dict[object, object] = copy.copy(value)
        for key, item in value.items():
            made[key] = _given(_kept(item, room // max(1, len(value))))
        return made
    if type(value) in (list, tuple) and isinstance(value, list | tuple) and len(value) <= room:
        return type(value)(_given(_kept(item, room // max(1, len(value)))) for item in value)
    raise _NotKept


def _is_mere(kind: type[dict[Any, Any]]) -> bool:
    """True if writing to a copy of this kind of dictionary has no side effect, on a file for example."""
    return kind.__setitem__ in (dict.__setitem__, OrderedDict.__setitem__) or is_dataclass(kind)


def _given(value: object) -> object:
    return value.zeros() if isinstance(value, _Large) else value
