import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed.distributed_c10d as c10d

from regrow.comm.torch_private import group_names

NAME = "_new_process_group_helper"


def test_this_torch_makes_groups_by_the_function_that_is_watched() -> None:
    assert {"group_name", "global_ranks_in_group"} <= inspect.signature(vars(c10d)[NAME]).parameters.keys()


def test_the_ranks_of_a_group_are_known_while_it_is_made_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[int]] = []

    def maker(group_size: int, global_ranks_in_group: list[int], group_name: str, fail: bool = False) -> int:
        seen.append(group_names.ranks_of(group_name))
        assert not group_names.ranks_of("another")
        if fail:
            raise ValueError
        return group_size

    monkeypatch.setitem(vars(c10d), NAME, maker)
    group_names.watch()
    watched: Any = vars(c10d)[NAME]
    group_names.watch()
    assert vars(c10d)[NAME] is watched, "once"
    assert watched(2, [5, 3], "a") == 2
    assert watched(2, group_name="b", global_ranks_in_group=[1, 0]) == 2
    with pytest.raises(ValueError):
        watched(2, [7], "c", fail=True)
    assert watched(2, [], "0") == 2
    assert seen == [(5, 3), (1, 0), (7,), ()]
    assert not any(group_names.ranks_of(name) for name in "abc")


def test_a_function_of_other_parameters_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def maker(*given: Any) -> None: ...

    monkeypatch.setitem(vars(c10d), NAME, maker)
    group_names.watch()
    assert vars(c10d)[NAME] is maker
