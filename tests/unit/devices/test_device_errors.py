"""Errors that a device's groups see by themselves are reported once, and never those that our aborts have made."""

from types import SimpleNamespace
from typing import Any

from torch.distributed import Backend

from regrow.comm import nccl
from regrow.comm.nccl import DeviceErrors
from regrow.comm.torch_private import nccl_group


class Group:
    def __init__(self, error: str = "", *, aborting: bool = False) -> None:
        self.found, self.aborting = error, aborting

    def error(self) -> str:
        return self.found


def test_each_group_tells_its_error_once() -> None:
    told: list[str] = []
    well, ill = Group(), Group("REMOTE_ERROR")
    errors = DeviceErrors([well, ill])
    errors.ask()
    errors.report = told.append
    for _ in range(3):
        errors.ask()
    assert told == ["REMOTE_ERROR"]
    well.found = "TIMEOUT"
    errors.ask()
    assert told == ["REMOTE_ERROR", "TIMEOUT"]


def test_what_we_abort_ourselves_has_no_error() -> None:
    told: list[str] = []
    errors = DeviceErrors([Group("REMOTE_ERROR", aborting=True)])
    errors.report = told.append
    errors.ask()
    assert told == []


def test_an_error_of_an_abort_that_begins_while_we_ask_is_ours() -> None:
    class Late(Group):
        def error(self) -> str:
            self.aborting = True
            return "COMM_ERROR"

    told: list[str] = []
    errors = DeviceErrors([Late()])
    errors.report = told.append
    errors.ask()
    assert told == []


def test_the_groups_of_this_process_are_asked() -> None:
    assert nccl.ERRORS._living is nccl._living


def test_groups_of_other_kinds_of_devices_are_taken_by_torchs_registration(monkeypatch: Any) -> None:
    def create(*_: Any) -> None:
        raise AssertionError("nobody makes a group here")

    known, made = {"npu": "theirs", "cpu": "gloo", "xpu": "regrow", "hpu": "fake"}, Backend._BackendPlugin
    known |= {"cuda": "nccl"}  # which torch registers as others do from 2.15 on
    monkeypatch.setattr(Backend, "default_device_backend_map", known)
    monkeypatch.setattr(
        Backend, "_plugins", {name: made(create, name != "FAKE") for name in ("THEIRS", "REGROW", "FAKE", "NCCL")}
    )
    kinds = ("npu", "xpu", "cpu", "mps", "hpu", "cuda")
    assert [nccl_group.brought_for(kind) for kind in kinds] == ["theirs", "", "", "", "", ""]
    assert nccl.serves(SimpleNamespace(type="npu"))  # type: ignore[arg-type]
    assert not nccl.serves(SimpleNamespace(type="xpu"))  # type: ignore[arg-type]


def test_an_error_that_a_kind_cannot_tell_is_none() -> None:
    asked = nccl_group.Communicator(SimpleNamespace(), None)
    assert asked.error() == ""
    found = SimpleNamespace(get_error=lambda: SimpleNamespace(value=3, name="REMOTE_ERROR"))
    assert nccl_group.Communicator(found, None).error() == "REMOTE_ERROR"

    def refuse() -> None:
        raise RuntimeError("Backend theirs does not support getError")

    assert nccl_group.Communicator(SimpleNamespace(get_error=refuse), None).error() == ""
