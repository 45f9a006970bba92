"""Ranks of the group that torch is making, available while torch makes it.

torch gives a backend the group's name and this rank's place in it. The backend then publishes its address in the store,
before torch stores the group's ranks anywhere. A store that knows the ranks keeps each address near its rank.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed.distributed_c10d as c10d

_MAKER = "_new_process_group_helper"
_making = threading.local()


def ranks_of(name: str) -> Sequence[int]:
    """Ranks in the world, in the group's order, of the group with this name that this thread is making.

    Empty if the thread makes no group of that name, for the default group, and if this torch does not show the ranks.
    """
    found, ranks = getattr(_making, "group", ("", ()))
    return ranks if found == name else ()


def watch() -> None:
    """Provide `ranks_of` from now on. May be called again."""
    maker = vars(c10d).get(_MAKER)
    code = getattr(maker, "__code__", None)
    if maker is None or code is None or hasattr(maker, "__wrapped__"):
        return
    parameters = code.co_varnames[: code.co_argcount]
    if not {"group_name", "global_ranks_in_group"} <= set(parameters):
        return
    name_at, ranks_at = parameters.index("group_name"), parameters.index("global_ranks_in_group")

    @functools.wraps(maker)
    def watched(*args: Any, **options: Any) -> Any:
        name = args[name_at] if len(args) > name_at else options.get("group_name")
        ranks = args[ranks_at] if len(args) > ranks_at else options.get("global_ranks_in_group")
        before = getattr(_making, "group", ("", ()))
        _making.group = (name, tuple(ranks or ()))
        try:
            return maker(*args, **options)
        finally:
            _making.group = before

    vars(c10d)[_MAKER] = watched
