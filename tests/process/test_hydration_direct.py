"""State read out of a holder's memory: by the kernel, and by NIXL; the library itself where it is installed.

Elsewhere an agent of the tests' own stands for it, which reads one-sidedly from another process as the library does.
"""

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.process.launching import site
from tests.process.training import SCRIPTS

from regrow.core.errors import HydrationError
from regrow.core.ids import Generation, StepNo
from regrow.core.records import Noted
from regrow.hydration import direct, flows, nixl_reads, plan
from regrow.hydration.client import Hydration, HydrationReport
from regrow.hydration.direct import MemoryPlace, MemoryReads
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.server import HydrationServer
from regrow.observe.ledger import Ledger, read_records

TOKEN, GENERATION, STEP = "secret", Generation(1), StepNo(3)
LIMIT_S = 60.0
REAL = not nixl_reads.missing()


@pytest.fixture(autouse=True)
def many_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few megabytes are as much as gigabytes are otherwise, and no flow is left out for being slow."""
    monkeypatch.setattr(flows, "cores", lambda: 2 * flows.FLOWS)
    monkeypatch.setattr(flows, "FLOW_WORTH", 1 << 20)
    monkeypatch.setattr(flows, "FIRST_PART", 2 << 20)
    monkeypatch.setattr(plan, "LEAST_PART", 1 << 20)
    monkeypatch.setattr(plan, "_MUCH_SLOWER", 0.0)


class Tensors:
    """A source and a sink."""

    def __init__(self, tensors: dict[str, torch.Tensor], touch: Callable[[str], object] = lambda name: None) -> None:
        self.tensors, self.touch = tensors, touch

    def inventory(self, step: StepNo) -> Inventory:
        return Inventory(step, [TensorEntry.of(name, each) for name, each in sorted(self.tensors.items())], b"")

    def tensor(self, name: str) -> torch.Tensor:
        self.touch(name)
        return self.tensors[name]

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        return self.tensors

    def finish(self) -> None: ...


def state() -> dict[str, torch.Tensor]:
    """Large tensors, one that does not lie in memory as it is sent, and many small ones."""
    generator = torch.Generator().manual_seed(1)
    large = {f"a{at}": torch.randn(1 << 19, generator=generator) for at in range(4)}
    small = {f"b{at}": torch.randn(100, generator=generator) for at in range(20)}
    return large | small | {"crooked": torch.randn(700, 700, generator=generator).t()}


class AgentStandIn:
    """Stands for the library's: memory of another process, read by the kernel after a while."""

    hold_up: Callable[[], str] = staticmethod(lambda: "DONE")
    """State of a read that was begun, when it is asked for."""

    def get_agent_metadata(self) -> bytes:
        return str(os.getpid()).encode()

    def add_remote_agent(self, passport: bytes) -> bytes:
        return passport

    def register_memory(self, places: Any, kind: str) -> Any:
        return places

    def deregister_memory(self, places: Any) -> None: ...

    def remove_remote_agent(self, name: str) -> None: ...

    def get_xfer_descs(self, places: Any, kind: str) -> Any:
        return places[0]

    def initialize_xfer(self, what: str, mine: Any, theirs: Any, peer: str) -> Any:
        return mine, theirs, int(peer)

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        (address, size, _), theirs, peer = handle
        told = self.hold_up()
        if told == "DONE":
            room = (ctypes.c_char * size).from_address(address)
            MemoryReads(peer).read(MemoryPlace(theirs[0]), memoryview(room).cast("B"), time.monotonic() + LIMIT_S)
        return told

    def release_xfer_handle(self, handle: Any) -> None: ...


@pytest.fixture(
    params=["memory", "stand-in", pytest.param("nixl", marks=pytest.mark.skipif(not REAL, reason="no NIXL"))]
)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`--hydration` of both sides."""
    if request.param == "memory":
        return "memory"
    if request.param == "stand-in":
        stand_in(monkeypatch)
    return "nixl"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_reads, "missing", lambda: "")
    monkeypatch.setattr(nixl_reads, "_agent", lambda *, serves: AgentStandIn())


Start = Callable[..., str]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Start]:
    """Starts holder processes; ends them with the test."""
    pids = []

    def start(hydration: str, touch: Callable[[str], object] = lambda name: None) -> str:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                server = HydrationServer(Tensors(state(), touch), token=TOKEN, socket_dir=tmp_path, hydration=hydration)
                endpoint = server.open()
                server.offer(GENERATION, STEP)
                theirs.send(endpoint)
                signal.pause()
            finally:
                os._exit(1)
        pids.append(pid)
        assert ours.poll(LIMIT_S)
        return str(ours.recv())

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def receive(endpoints: list[str], hydration: str) -> tuple[HydrationReport, dict[str, torch.Tensor]]:
    """Receive the state, which is whole afterwards."""
    empty = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    report = Hydration(
        Tensors(empty),
        step=STEP,
        generation=GENERATION,
        token=TOKEN,
        endpoints=endpoints,
        deadline=time.monotonic() + LIMIT_S,
        hydration=hydration,
    ).run()
    return report, empty


def assert_whole(received: dict[str, torch.Tensor]) -> None:
    for name, tensor in state().items():
        assert torch.equal(received[name], tensor), name


def by(report: HydrationReport) -> set[str]:
    """Kinds of reads."""
    return {way.by for way in report.ways}


def dying(kind: str) -> Callable[[str], None]:
    """Touch of a holder that dies between the two chunks of its first tensor, of which one has been read."""
    seen: list[str] = []
    looks = 4 if kind == "memory" else 5  # two to begin, two for their places; the library has looked at each before

    def touch(name: str) -> None:
        seen.append(name)
        if seen.count("a0") == looks:
            os.kill(os.getpid(), signal.SIGKILL)

    return touch


def test_tensors_of_all_kinds_come_out_of_the_holders_memory(holder: Start, kind: str) -> None:
    report, received = receive([holder(kind)], kind)
    assert_whole(received)
    assert by(report) == {kind}
    assert sum(way.bytes for way in report.ways) == report.bytes
    assert not any(way.fallback or way.failure for way in report.ways)


def test_a_holder_killed_in_the_middle_of_reads_is_replaced_by_the_others(holder: Start, kind: str) -> None:
    report, received = receive([holder(kind, dying(kind)), holder(kind), holder(kind)], kind)
    assert_whole(received)
    assert report.lost


def test_when_the_only_holder_is_killed_nothing_is_believed(holder: Start, kind: str) -> None:
    with pytest.raises(HydrationError, match="could not be received"):
        receive([holder(kind, dying(kind))], kind)


def test_where_the_kernel_refuses_the_bytes_come_over_the_socket_and_the_reason_is_told(
    holder: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(1)
        return -1

    monkeypatch.setattr(flows, "FLOWS", 1)
    monkeypatch.setattr(direct, "_read_of_kernel", lambda: refuse)
    report, received = receive([holder("memory")], "memory")
    assert_whole(received)
    (way,) = report.ways
    assert (way.by, way.bytes) == ("", report.bytes)
    assert way.fallback == "memory: the holder's memory cannot be read: Operation not permitted"


def test_bytes_that_are_not_the_holders_are_not_believed(holder: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another process has got a dead holder's number."""
    monkeypatch.setattr(flows, "FLOWS", 1)
    monkeypatch.setattr(MemoryReads, "read", lambda self, place, room, until: None)
    report, received = receive([holder("memory")], "memory")
    assert_whole(received)
    (way,) = report.ways
    assert (way.by, way.fallback) == ("", "memory: bytes did not match their checksum")


def test_a_read_that_is_silent_is_given_up_and_its_late_bytes_reach_no_tensor(
    holder: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(flows, "FLOWS", 1)
    monkeypatch.setattr(nixl_reads, "STALL", 0.2)
    given_up: list[Any] = []
    monkeypatch.setattr(nixl_reads, "_GIVEN_UP", given_up)
    monkeypatch.setattr(AgentStandIn, "hold_up", staticmethod(lambda: "PROC"))
    report, received = receive([holder("nixl")], "nixl")
    (way,) = report.ways
    assert (way.by, way.fallback) == ("", "nixl: the holder's memory brings nothing")
    buffers = [each[1] for each in given_up if isinstance(each, tuple)]
    assert len(buffers) == 1
    buffers[0].fill_(7)  # it arrives after all
    assert_whole(received)


def test_a_read_from_a_holder_that_hangs_up_is_not_waited_for(holder: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(nixl_reads, "STALL", 300.0)
    ours, theirs = socket.socketpair()
    buffer = torch.zeros(plan.CHUNK_BYTES, dtype=torch.uint8)
    reader = nixl_reads.NixlReader()
    monkeypatch.setattr(AgentStandIn, "hold_up", staticmethod(lambda: "PROC"))
    timer = threading.Timer(0.1, theirs.close)
    timer.start()
    with ours, pytest.raises(OSError, match="hung up"):
        reads = nixl_reads.NixlReads(reader, str(os.getpid()), buffer, ours)
        reads.read(MemoryPlace(buffer.data_ptr()), memoryview(bytearray(100)), time.monotonic() + 300.0)
    timer.join()


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ("nixl", "memory", "nixl: the holder is not configured for it"),
        ("memory", "nixl", "memory: the holder is not configured for it"),
        ("sockets", "memory", ""),
    ],
)
def test_two_ends_that_were_told_different_things_use_sockets(
    holder: Start, monkeypatch: pytest.MonkeyPatch, ours: str, theirs: str, expected: str
) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(flows, "FLOWS", 1)
    report, received = receive([holder(theirs)], ours)
    assert_whole(received)
    (way,) = report.ways
    assert (way.by, way.fallback, way.bytes) == ("", expected, report.bytes)


@pytest.mark.skipif(REAL, reason="NIXL is installed")
def test_a_job_without_the_library_says_so_once_and_trains_on_over_sockets(tmp_path: Path) -> None:
    words = ("run", "--job", "rdma", "--nproc-per-node", "2", "--hydration", "nixl")
    script = (str(SCRIPTS / "train_small.py"), "--steps", "6", "--say-steps", "--hold", "3:go")
    with site(tmp_path) as here:
        with here.start(*words, *script) as job:
            job.wait_for("step 2\n")
            killed = here.regrow("kill", "--rank", "1")
            (here.folder / "go").touch()
            assert job.wait() == 0, killed.stderr + job.output
        records = read_records(here.home / "jobs" / "rdma")
        (incident,) = Ledger(records).incidents
        (way,) = incident.ways
        assert (way.by, way.fallback) == ("", "nixl: nixl is not installed (regrow[rdma])")
        told = [record.text for record in records if isinstance(record, Noted) and "nixl" in record.text]
        assert told == ["state is read over sockets: nixl is not installed (regrow[rdma])"]
        here.assert_nothing_left()
