"""Accelerators of every kind, by what their modules of torch have; the modules here are made for the purpose."""

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regrow.comm.transport import MeshTransport
from regrow.core.errors import UsageError
from regrow.data.seeding import derive, seed_everything
from regrow.devices import accelerators
from regrow.hydration.memory import Outgoing


class Kind:
    """An accelerator named `there`, with a generator that only its own module can seed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, available: bool = True) -> None:
        self.module = SimpleNamespace()
        self.generator = random.Random(0)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="there"))
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
        monkeypatch.setattr(torch, "get_device_module", {"there": self.module}.__getitem__)

    def draw(self) -> float:
        return self.generator.random()


@pytest.mark.parametrize("name", ["manual_seed_all", "manual_seed"])
@pytest.mark.parametrize("says", [True, False])
def test_what_is_drawn_on_any_kind_of_device_follows_the_step(
    monkeypatch: pytest.MonkeyPatch, name: str, says: bool
) -> None:
    kind = Kind(monkeypatch)
    setattr(kind.module, name, kind.generator.seed)
    if says:
        kind.module.is_initialized = lambda: True
    seed_everything(3, 7)
    first = kind.draw()
    kind.draw()
    seed_everything(3, 8)
    assert kind.draw() != first
    seed_everything(3, 7)
    assert kind.draw() == first
    kind.generator.seed(derive(3, 7) & 0xFFFF_FFFF_FFFF_FFFF)
    assert kind.draw() == first


@pytest.mark.parametrize("says", [True, False])
def test_a_device_that_is_not_in_use_is_left_alone(monkeypatch: pytest.MonkeyPatch, says: bool) -> None:
    kind = Kind(monkeypatch, available=False)
    kind.module.manual_seed_all = lambda seed: pytest.fail("it would be taken into use")
    if says:
        kind.module.is_initialized = lambda: False
    seed_everything(3, 7)
    assert accelerators.in_use() is None


def test_a_device_that_cannot_be_seeded_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    Kind(monkeypatch)
    with pytest.raises(UsageError, match=r"torch.there has neither manual_seed_all nor manual_seed: .* different"):
        seed_everything(3, 7)


def test_without_an_accelerator_there_is_only_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert accelerators.kinds() == ["cpu", "cuda"]
    assert (accelerators.kind(), accelerators.in_use()) == ("", None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert accelerators.choose(3) == torch.device("cpu")
    assert accelerators.random_state() is None
    assert accelerators.name_of(torch.device("cpu")) == ""
    assert accelerators.memory_peak(torch.device("cpu")) is None


@pytest.mark.parametrize(("devices", "ranks", "taken"), [(8, 8, True), (8, 7, False), (1, 3, True)])
def test_a_device_that_a_rank_uses_is_known_by_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, devices: int, ranks: int, taken: bool
) -> None:
    kind = Kind(monkeypatch)
    kind.module.is_initialized = lambda: False
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    assert not accelerators.all_taken(ranks), "none is in use"
    kind.module.is_initialized = lambda: True
    assert accelerators.all_taken(ranks) is taken


def test_groups_are_registered_for_the_devices_of_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    Kind(monkeypatch)
    assert accelerators.kinds() == ["cpu", "cuda", "there"]


@pytest.mark.parametrize(
    ("name", "is_one"), [("cpu", False), ("meta", False), ("cuda:1", True), ("xpu", True), ("mps", True)]
)
def test_what_is_neither_the_processor_nor_meta_is_an_accelerator(name: str, is_one: bool) -> None:
    assert accelerators.is_accelerator(torch.device(name)) is is_one


def test_memory_beside_a_device_is_ordinary_where_its_kind_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators._pins.cache_clear()
    real = torch.empty

    def unpinned(*shape: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("no pinned memory on this device")
        return real(*shape, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    try:
        assert accelerators.host_memory((4, 2), torch.int16, torch.device("xpu")).shape == (4, 2)
        assert accelerators.host_memory((3,), torch.uint8, None).nbytes == 3
    finally:
        accelerators._pins.cache_clear()
    assert Outgoing(lambda name: torch.ones(1), 8)._staging(0, torch.device("cpu")).nbytes == 8


def test_a_collective_over_our_own_connections_comes_after_what_its_caller_has_enqueued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr("regrow.comm.transport.is_accelerator", lambda device: device.type == "meta")
    monkeypatch.setattr("regrow.comm.transport.await_stream", lambda device: order.append(f"awaits {device}"))
    monkeypatch.setattr(
        "regrow.comm.transport._METHODS", {"allgather": lambda transport, *args: order.append("runs"), "barrier": print}
    )
    mesh = MeshTransport.__new__(MeshTransport)
    mesh._calling = threading.local()
    mesh.call("allgather", ([[], [torch.empty(1, device="meta")]], [torch.empty(1)]), {})
    mesh.call("allgather", ([[torch.empty(1)]], []), {})
    assert order == ["awaits meta", "runs", "runs"]
