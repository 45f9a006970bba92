"""A group on devices is made with the script's options, and by its name, each time that it is formed."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import Backend

from regrow.comm.torch_private import group_backends, nccl_group
from regrow.comm.torch_private.internals import HashStore
from regrow.comm.torch_private.nccl_group import Wanted, make_brought, nccl_options
from regrow.core.errors import UsageError
from regrow.devices import nvidia


class Options:
    """As NCCL's."""

    def __init__(self) -> None:
        self.is_high_priority_stream, self.config = False, SimpleNamespace(min_ctas=0)
        self.split_color = 0
        self.group_name, self.global_ranks_in_group = "", list[int]()


def test_nccls_options_are_the_scripts_and_what_torch_noted_in_those_is_not_taken_along() -> None:
    given = Options()
    given.is_high_priority_stream, given.config.min_ctas, given.split_color = True, 4, 7
    made = nccl_options(Options(), Wanted("tp", (0, 2), given))
    assert (made.is_high_priority_stream, made.config.min_ctas, made.split_color) == (True, 4, 0)
    assert (made.group_name, made.global_ranks_in_group) == ("tp", [0, 2])
    assert nccl_options(Options(), Wanted("dp", (0, 1))).is_high_priority_stream is False


def test_options_of_another_backend_are_refused_by_the_groups_name() -> None:
    with pytest.raises(UsageError, match="pg_options of tp are SimpleNamespace"):
        nccl_options(Options(), Wanted("tp", (0, 2), SimpleNamespace()))


@pytest.mark.parametrize("extended", [True, False])
def test_a_backend_that_takes_options_gets_them(monkeypatch: pytest.MonkeyPatch, extended: bool) -> None:
    heard: list[Any] = []

    def create(*args: Any) -> object:
        heard.extend(args)
        return object()

    group = SimpleNamespace(_register_backend=lambda *_: None, _set_default_backend=lambda *_: None)
    monkeypatch.setattr(nccl_group, "inner_group", lambda *_: group)
    monkeypatch.setattr(Backend, "default_device_backend_map", {"xpu": "theirs"})
    monkeypatch.setattr(Backend, "_plugins", {"THEIRS": Backend._BackendPlugin(create, extended)})
    make_brought("xpu", HashStore(), 1, 2, 60.0, Wanted("tp", (0, 2), "urgent"))
    if not extended:
        assert heard[1:] == [1, 2, timedelta(seconds=60)]
        return
    asked, options = heard
    assert (asked.group_rank, asked.group_size, asked.group_id) == (1, 2, "tp")
    assert (list(asked.global_ranks_in_group), asked.timeout) == ([0, 2], timedelta(seconds=60))
    assert options == "urgent"


@pytest.mark.parametrize(
    ("name", "nccl", "wanted"),
    [
        ("gloo", False, {"gloo"}),
        ("nccl", True, {"nccl"}),
        ("cpu:gloo,cuda:nccl", True, {"gloo", "nccl"}),
        ("nccl", False, None),
        ("ucc", True, None),
        ("regrow", True, None),
    ],
)
def test_backends_whose_place_ours_can_take(
    monkeypatch: pytest.MonkeyPatch, name: str, nccl: bool, wanted: set[str] | None
) -> None:
    monkeypatch.setattr(nvidia, "nccl_available", lambda: nccl)
    assert group_backends._wanted((2, 0, [0, 1], name)) == wanted
