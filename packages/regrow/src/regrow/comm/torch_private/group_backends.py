"""Groups for which a script names a backend of torch's: regrow's backend serves them under that name.

Megatron and torchtitan make groups of gloo beside those of NCCL. torch would form them by the default group's store,
which refuses that here, and torch could neither end them at a fault nor form them anew.
"""

import functools
import threading
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed.distributed_c10d import Backend, ProcessGroup, _world

from regrow.comm.torch_private.nccl_group import BACKEND, brought_for
from regrow.devices import accelerators, nvidia

_GLOO, _NCCL = "gloo", "nccl"
_MAKER = "_new_process_group_helper"
_BACKEND_AT = 3
"""Position of the backend among the arguments of torch's group-making function, which torch passes by position."""
_asked = threading.local()


def asked_for_devices() -> bool:
    """True if the group that this thread is making is to serve devices too, and not only the processor (gloo)."""
    return getattr(_asked, "devices", True)


def serve(kind: type[ProcessGroup]) -> None:
    """While the default group is of this kind, make other groups of it too, if it can serve their named backends."""
    maker = vars(c10d)[_MAKER]

    @functools.wraps(maker)
    def make(*args: Any, **options: Any) -> Any:
        wanted = _wanted(args)
        if wanted is None or not isinstance(c10d.GroupMember.WORLD, kind):
            return maker(*args, **options)
        _asked.devices = wanted != {_GLOO}
        try:
            made = maker(*args[:_BACKEND_AT], Backend(BACKEND), *args[_BACKEND_AT + 1 :], **options)
        finally:
            _asked.devices = True
        if isinstance(made[0], kind):
            _world.pg_map[made[0]] = (args[_BACKEND_AT], made[1])
        return made

    vars(c10d)[_MAKER] = make


def _wanted(args: tuple[Any, ...]) -> set[str] | None:
    """The named backends; None if regrow's backend cannot replace them, or is the named one."""
    if len(args) <= _BACKEND_AT:
        return None
    named = {each.rpartition(":")[2] for each in str(args[_BACKEND_AT]).lower().split(",")}
    served = {_GLOO, BACKEND, *filter(None, [brought_for(accelerators.kind())])}
    if nvidia.nccl_available():
        served.add(_NCCL)
    return named if named <= served and named != {BACKEND} else None
