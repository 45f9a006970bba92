"""A device that has failed for good is told from one call that went wrong, and devices are named in one room only."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regrow.devices import accelerators, failing

SOURCES = Path(failing.__file__).parents[1]
KIND = re.compile(r"""["']cuda["':]|\btorch\.cuda\b|\.is_cuda\b""")


def device_error() -> Exception:
    return RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Behaviour of the device when it is asked, time after time; the last for ever."""
    does: list[Any] = [lambda: None]

    def synchronize(device: int) -> None:
        (does.pop(0) if len(does) > 1 else does[0])()

    monkeypatch.setattr(failing, "ANSWER_S", 30.0)
    monkeypatch.setattr(accelerators, "in_use", lambda: SimpleNamespace())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    return does


def raises() -> None:
    raise device_error()


def test_a_device_that_raises_at_every_call_has_failed(asked: list[Any]) -> None:
    asked[:] = [raises]
    assert failing.has_failed(device_error()) == "CUDA error: device-side assert triggered"


def test_one_that_works_when_it_is_asked_again_has_not(asked: list[Any]) -> None:
    assert failing.has_failed(device_error()) == ""
    asked[:] = [raises, lambda: None]
    assert failing.has_failed(device_error()) == "", "the first answer is of what was enqueued before"


def test_one_that_never_answers_has_failed(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(failing, "ANSWER_S", 0.01)
    asked[:] = [never.wait]
    try:
        assert failing.has_failed(device_error()) == "it does not answer"
    finally:
        never.set()


def test_errors_of_scripts_and_devices_that_nobody_uses_are_not_asked(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked[:] = [raises]
    assert failing.has_failed(ValueError("CUDA error: says a script")) == ""
    assert failing.has_failed(torch.OutOfMemoryError("CUDA out of memory")) == ""
    monkeypatch.setattr(accelerators, "in_use", lambda: None)
    assert failing.has_failed(device_error()) == ""


def test_what_came_of_a_devices_error_is_one_too() -> None:
    shown = ValueError("no loss")
    shown.__context__ = device_error()
    assert failing.is_device_error(shown)
    assert failing.is_device_error(torch.AcceleratorError("of any kind"))
    shown.__context__ = shown
    assert not failing.is_device_error(shown)


def test_no_room_but_that_of_devices_names_a_kind_of_them() -> None:
    named = [
        f"{file.relative_to(SOURCES)}:{number}"
        for file in sorted(SOURCES.rglob("*.py"))
        if file.parent != SOURCES / "devices"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if KIND.search(line)
    ]
    assert named == [], "devices/accelerators.py for what all kinds have, devices/nvidia.py for what only NVIDIA's has"
