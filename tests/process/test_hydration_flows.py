"""State over several connections and addresses of one holder, some of which refuse, are silent, or die on the way."""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.ports import held_port
from tests.process.launching import site
from tests.process.training import SCRIPTS

from regrow.core.ids import Generation, StepNo
from regrow.core.net import connect, hang_up
from regrow.core.records import Noted
from regrow.core.wire import read_frame
from regrow.hydration import client, flows, plan
from regrow.hydration.client import Hydration
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.messages import AskFlow, FlowOpened, StateRefused, receiver_side
from regrow.hydration.server import HydrationServer
from regrow.observe.ledger import Ledger, read_records

TOKEN, GENERATION, STEP = "secret", Generation(1), StepNo(3)
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def many_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few megabytes are as much as gigabytes are otherwise, and no flow is left out for being slow."""
    monkeypatch.setattr(flows, "cores", lambda: 2 * flows.FLOWS)
    monkeypatch.setattr(flows, "FLOW_WORTH", 1 << 20)
    monkeypatch.setattr(flows, "FIRST_PART", 64 << 10)
    monkeypatch.setattr(plan, "LEAST_PART", 64 << 10)
    monkeypatch.setattr(plan, "_MUCH_SLOWER", 0.0)


class Tensors:
    """A source and a sink."""

    def __init__(self, tensors: dict[str, torch.Tensor], touch: Callable[[], object] = lambda: None) -> None:
        self.tensors, self.touch = tensors, touch

    def inventory(self, step: StepNo) -> Inventory:
        return Inventory(step, [TensorEntry.of(name, each) for name, each in sorted(self.tensors.items())], b"")

    def tensor(self, name: str) -> torch.Tensor:
        self.touch()
        return self.tensors[name]

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        return self.tensors

    def finish(self) -> None: ...


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"w{at}": torch.randn(1 << 19, generator=generator) for at in range(4)}


@contextlib.contextmanager
def holding(source: Tensors, folder: Path, *, ways: tuple[str, ...] = (), nodes: int = 2) -> Iterator[HydrationServer]:
    server = HydrationServer(source, token=TOKEN, socket_dir=folder, nodes=nodes, ways=ways)
    with server:
        server.offer(GENERATION, STEP)
        yield server


def newcomer(server: HydrationServer) -> tuple[Hydration, dict[str, torch.Tensor]]:
    """A reception of what the server has, and the tensors that it fills."""
    empty = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    hydration = Hydration(
        Tensors(empty),
        step=STEP,
        generation=GENERATION,
        token=TOKEN,
        endpoints=[server.endpoint],
        deadline=time.monotonic() + LIMIT_S,
    )
    return hydration, empty


def assert_whole(received: dict[str, torch.Tensor]) -> None:
    for name, tensor in state().items():
        assert torch.equal(received[name], tensor), name


class Meeting:
    """Holds each of the holder's threads once, at one of its looks at a tensor, until all have come."""

    def __init__(self, parties: int, then: Callable[[], None] = lambda: None, *, look: int = 6) -> None:
        self._barrier, self._look = threading.Barrier(parties, then), look
        self._seen: Counter[int] = Counter()

    def touch(self) -> None:
        me = threading.get_ident()
        self._seen[me] += 1
        if self._seen[me] == self._look:
            self._barrier.wait(LIMIT_S)


@pytest.mark.parametrize(
    ("nodes", "flows_of"),
    [(1, {"": 4}), (2, {"127.0.0.1": 2, "127.0.0.2": 2})],
    ids=["within a node", "over two addresses"],
)
def test_one_holders_state_comes_over_four_flows(tmp_path: Path, nodes: int, flows_of: dict[str, int]) -> None:
    source = Tensors(state(), Meeting(4).touch)
    with holding(source, tmp_path, ways=("127.0.0.2",), nodes=nodes) as server:
        assert [way.rpartition(":")[0] for way in server.ways] == (["tcp:127.0.0.2"] if nodes > 1 else [])
        hydration, received = newcomer(server)
        report = hydration.run()
        assert server.wait_idle(time.monotonic() + LIMIT_S)
    assert_whole(received)
    assert report.lost == []
    assert {way.address: way.flows for way in report.ways} == flows_of
    assert all(way.bytes > 0 and way.gbps > 0 and not way.failure for way in report.ways)
    assert sum(way.bytes for way in report.ways) == report.bytes


def test_an_address_that_dies_on_the_way_is_replaced_by_the_other(tmp_path: Path) -> None:
    def die() -> None:
        for sock in list(server._servers[1]._serving):
            hang_up(sock)

    source = Tensors(state(), Meeting(4, die).touch)
    with holding(source, tmp_path, ways=("127.0.0.2",)) as server:
        hydration, received = newcomer(server)
        report = hydration.run()
    assert_whole(received)
    told = {way.address: way for way in report.ways}
    assert told["127.0.0.2"].failure
    assert not told["127.0.0.1"].failure
    assert len(report.lost) == 2


def test_an_address_that_refuses_is_told_and_does_no_harm(tmp_path: Path) -> None:
    def wait_for_the_refusal() -> None:
        until = time.monotonic() + LIMIT_S
        while not hydration._unused and time.monotonic() < until:
            time.sleep(0.01)

    with holding(Tensors(state(), wait_for_the_refusal), tmp_path) as server, socket.socket() as nobody:
        nobody.bind(("127.0.0.3", 0))  # it does not listen
        server.ways.append(f"tcp:127.0.0.3:{nobody.getsockname()[1]}")
        hydration, received = newcomer(server)
        report = hydration.run()
    assert_whole(received)
    told = {way.address: way for way in report.ways}
    assert "refused" in told["127.0.0.3"].failure
    assert told["127.0.0.3"].flows == 0
    assert told["127.0.0.1"].bytes == report.bytes


def test_nobody_waits_for_an_address_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FURTHER", 300.0)
    with holding(Tensors(state()), tmp_path) as server, socket.create_server(("127.0.0.3", 0)) as silent:
        server.ways.append(f"tcp:127.0.0.3:{silent.getsockname()[1]}")
        hydration, received = newcomer(server)
        assert hydration.run().seconds < LIMIT_S
    assert_whole(received)


def swallowing(endpoint: str, stack: contextlib.ExitStack) -> str:
    """An address over which a flow is opened; all that comes after that is lost on the way, and nobody hangs up."""
    listener = stack.enter_context(socket.create_server(("127.0.0.3", 0)))
    back = stack.enter_context(connect(endpoint))
    back.settimeout(LIMIT_S)

    def carry() -> None:
        front = stack.enter_context(listener.accept()[0])
        asked = read_frame(front)
        assert asked is not None
        back.sendall(len(asked).to_bytes(4, "big") + asked)
        opened = read_frame(back)
        assert opened is not None
        front.sendall(len(opened).to_bytes(4, "big") + opened)
        back.sendall(front.recv(65536))  # the first request, whose answer does not arrive
        with contextlib.suppress(OSError):
            while back.recv(65536):
                pass

    threading.Thread(target=carry, daemon=True).start()
    return f"tcp:127.0.0.3:{listener.getsockname()[1]}"


def test_a_holder_does_not_wait_for_a_connection_over_an_address_that_died_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "FLOWS", 2)
    source = Tensors(state(), Meeting(2, look=1).touch)
    with holding(source, tmp_path) as server, contextlib.ExitStack() as stack:
        server.ways.append(swallowing(server.endpoint, stack))
        hydration, received = newcomer(server)
        report = hydration.run()
        assert server.wait_idle(time.monotonic() + LIMIT_S), "it would wait for two minutes"
    assert_whole(received)
    assert {way.address for way in report.ways if way.failure} == {"127.0.0.3"}


def test_nobody_waits_for_an_address_that_trickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "STALL", 0.5)
    asked = threading.Event()

    def trickle() -> None:
        sock, _ = slow.accept()
        with sock, contextlib.suppress(OSError):
            read_frame(sock)
            sock.sendall(receiver_side.frame(FlowOpened()))
            read_frame(sock)
            asked.set()
            while not done.wait(0.05):
                sock.sendall(b"?")

    done = threading.Event()
    source = Tensors(state(), lambda: asked.wait(LIMIT_S))
    with holding(source, tmp_path) as server, socket.create_server(("127.0.0.3", 0)) as slow:
        server.ways.append(f"tcp:127.0.0.3:{slow.getsockname()[1]}")
        thread = threading.Thread(target=trickle)
        thread.start()
        hydration, received = newcomer(server)
        try:
            report = hydration.run()
        finally:
            done.set()
            thread.join(LIMIT_S)
    assert_whole(received)
    told = {way.address: way for way in report.ways}
    assert "it sent no 1 MiB in" in told["127.0.0.3"].failure
    assert told["127.0.0.1"].bytes == report.bytes


def test_an_address_that_is_not_this_nodes_is_told_and_left_out(tmp_path: Path) -> None:
    with holding(Tensors(state()), tmp_path, ways=("192.0.2.1",)) as server:
        assert server.ways == []
        assert "192.0.2.1" in server.failed_addresses[0]
        hydration, received = newcomer(server)
        hydration.run()
    assert_whole(received)


def test_a_flow_without_a_readers_ticket_is_refused(tmp_path: Path) -> None:
    with holding(Tensors(state()), tmp_path) as server, connect(server.endpoint) as sock:
        sock.sendall(receiver_side.frame(AskFlow(TOKEN, "guess")))
        body = read_frame(sock)
        assert body is not None
        assert isinstance(receiver_side.decode(body), StateRefused)
        assert server.readers == 0


def test_a_job_tells_the_addresses_that_state_came_over_and_those_that_a_node_does_not_have(tmp_path: Path) -> None:
    words = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{held_port()}", "--state-addr", "127.0.0.2,192.0.2.1"]
    script = (str(SCRIPTS / "train_small.py"), "--steps", "6", "--say-steps", "--hold", "3:go")
    with site(tmp_path) as here:
        zero, one = (
            here.start("run", "--job", "ways", "--node-rank", rank, *words, *script, REGROW_TOKEN="both know")
            for rank in ("0", "1")
        )
        with zero, one:
            zero.wait_for("step 2\n")
            killed = here.regrow("kill", "--rank", "1")
            (here.folder / "go").touch()
            assert (zero.wait(), one.wait()) == (0, 0), killed.stderr + zero.output
        records = read_records(here.home / "jobs" / "ways")
        (incident,) = Ledger(records).incidents
        assert [(way.address, way.flows, way.bytes) for way in incident.ways] == [
            ("127.0.0.1", 1, incident.hydrated_bytes)
        ]
        assert "state over 127.0.0.1 (1 flow, " in here.regrow("story", "ways").stdout
        told = [record.text for record in records if isinstance(record, Noted)]
        assert any(text.startswith("state cannot be read at 192.0.2.1") for text in told), told
        assert not any("127.0.0.2" in text for text in told)
        here.assert_nothing_left()
