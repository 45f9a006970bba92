"""A worker is bound to the processors that torch finds near its device, or people are told why it is not."""

import builtins
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.numa import binding

from regrow.comm.torch_private import numa

CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="one processor has no parts")


@pytest.fixture(autouse=True)
def processors_given_back() -> Iterator[None]:
    yield
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, CPUS)


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two NUMA nodes in two sockets, each with one of our processors and a GPU, as the kernel tells it."""
    told = {"devices/system/node/possible": "0-1\n"}
    for node, cpu in enumerate(CPUS[:2]):
        told[f"devices/system/node/node{node}/cpulist"] = f"{cpu},{900 + node}-{910 + node}\n"
        told[f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = f"{node}\n"
        told[f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = f"{cpu}\n"
        told[f"bus/pci/devices/0000:{16 + node:02x}:00.0/numa_node"] = f"{node}\n"
    for name, text in told.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def place(index: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=16 + index, pci_device_id=0)

    def opened(path: str, *more: Any) -> Any:
        return builtins.open(path.replace("/sys", str(tmp_path), 1), *more)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", place)
    monkeypatch.setattr(binding, "open", opened, raising=False)
    return tmp_path


@pytest.mark.parametrize("mode", ["node", "socket", "exclusive"])
def test_all_threads_are_bound_to_the_node_of_the_device(two_nodes: Path, mode: str) -> None:
    go, seen = threading.Event(), list[set[int]]()

    def look() -> None:
        go.wait(60.0)
        seen.append(os.sched_getaffinity(0))

    before, after = threading.Thread(target=look), threading.Thread(target=look)
    before.start()
    assert numa.bind(mode, 1) == ""
    after.start()
    go.set()
    before.join()
    after.join()
    assert seen == [{CPUS[1]}, {CPUS[1]}]
    assert os.sched_getaffinity(0) == {CPUS[1]}


def test_a_thread_that_ends_meanwhile_is_nobody_to_bind(two_nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    listed = os.listdir("/proc/self/task")
    monkeypatch.setattr(os, "listdir", lambda folder: [str(ended.native_id), *listed])
    assert numa.bind("node", 1) == ""
    assert os.sched_getaffinity(0) == {CPUS[1]}


def test_nothing_changes_where_all_processors_are_as_near(two_nodes: Path) -> None:
    (two_nodes / "devices/system/node/node0/cpulist").write_text(",".join(map(str, CPUS)))
    assert numa.bind("node", 0) == "all processors that it may use are as near to its device"
    assert sorted(os.sched_getaffinity(0)) == CPUS


def test_nothing_changes_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert numa.bind("node", 0) == "there is no accelerator"


def test_the_reason_of_torch_is_told(two_nodes: Path) -> None:
    (two_nodes / "devices/system/node/node1/cpulist").unlink()
    assert "numa_node_index=1" in numa.bind("node", 1)
    (two_nodes / "devices/system/node/node0/cpulist").write_text("900-910\n")
    assert numa.bind("node", 0) == "it may use no processor that is near to its device"
    assert sorted(os.sched_getaffinity(0)) == CPUS


def test_a_device_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    forks, forked = os.fork, list[int]()

    def hang(mode: str, device: int) -> set[int]:
        time.sleep(600.0)
        return set()

    def fork() -> int:
        forked.append(forks())
        return forked[-1]

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(numa, "processors", hang)
    monkeypatch.setattr(numa, "ASK_S", 0.05)
    assert numa.bind("node", 0) == "torch did not report the processors near it"
    with pytest.raises(ChildProcessError):  # its child has ended, and was waited for
        os.waitpid(forked[0], os.WNOHANG)
