"""Communication hooks of DDP: detects a state that steps change and that a newcomer cannot get.

PowerSGD's error feedback and its iteration counter are such a state: a step that runs again would find them one step
ahead, and a newcomer, which has none, would call other collectives than the others.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from regrow.core.errors import UsageError

_DEPTH = 3


class HookStates:
    """The states of these modules' hooks, as they were before the rehearsal.

    Args:
        modules: DDP's wrappers.
        protected: the protected objects: a state among them needs no check.
    """

    def __init__(self, modules: Iterable[DistributedDataParallel], protected: Iterable[object]) -> None:
        kept = {id(item) for item in protected}
        self._found = [
            (getattr(hook, "__qualname__", repr(hook)), state, _marks(state))
            for module in modules
            for hook, state in getattr(module, "_comm_hooks", ())
            if state is not None and not isinstance(state, ProcessGroup) and id(state) not in kept
        ]

    def refuse_changed(self) -> None:
        """Raise `UsageError` if the rehearsed step has changed the state of a hook."""
        for name, state, before in self._found:
            if _marks(state) != before:
                raise UsageError(
                    f"the communication hook {name} of DDP keeps a state that every step changes, and that is not "
                    f"protected: a {type(state).__name__}",
                    hint="use a hook without one, or give the state state_dict() and load_state_dict() and protect it",
                )


def _marks(value: Any, depth: int = _DEPTH) -> Any:
    """Marks by which a change of the value is detected, without a copy of its tensors."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        return (id(value), value._version)
    if depth == 0:
        return id(value)
    if isinstance(value, Mapping):
        return [(repr(key), _marks(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_marks(item, depth - 1) for item in value]
    if isinstance(value, ProcessGroup) or not hasattr(value, "__dict__"):
        slots = getattr(type(value), "__slots__", ())
        names = [slots] if isinstance(slots, str) else list(slots)
        return [(name, _marks(getattr(value, name, None), depth - 1)) for name in names] or id(value)
    return _marks(vars(value), depth - 1)
