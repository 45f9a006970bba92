"""State between real processes: holders that die, lie, hang, or are not there."""

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regrow.core.errors import GenerationHalted, HydrationError, StateError
from regrow.core.ids import NO_STATE, Generation, StepNo
from regrow.core.net import connect
from regrow.hydration import client, flows, streams
from regrow.hydration.client import Hydration, receive
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.messages import AskState, receiver_side
from regrow.hydration.server import HydrationServer
from regrow.train.state.protected import ProtectedState

TOKEN = "secret"


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a healthy holder may answer seconds after the others, and is none the worse."""
    monkeypatch.setattr(client, "_GRACE", 60.0)


class Tensors:
    """A source and a sink over a dictionary of tensors."""

    def __init__(self, tensors: Any, step: Any = 3, touch: Any = None) -> None:
        self.tensors = tensors
        self.step = step
        self.touch = touch
        self.finished = False

    def inventory(self, step: Any) -> Any:
        if step != self.step:
            raise StateError(f"stands at {self.step}")
        return Inventory(step, [TensorEntry.of(name, t) for name, t in sorted(self.tensors.items())], b"")

    def tensor(self, name: Any) -> Any:
        if self.touch is not None:
            self.touch(name)
        return self.tensors[name]

    def prepare(self, inventory: Any) -> Any:
        return self.tensors

    def finish(self) -> None:
        self.finished = True


def big(seed: Any, count: Any = 4) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{at}": torch.randn(1 << 19, generator=generator) for at in range(count)}


def empty(tensors: Any) -> Any:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_equal(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """Starts holder processes; ends them with the test."""
    pids = []

    def start(make: Any, *, generation: Any = 1, step: Any = 3, nodes: Any = 1) -> Any:
        """Fork a holder that serves `make()`; returns its endpoint and pid."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            # Not pytest's exit: a fork must never run the rest of the test session.
            try:
                torch.set_num_threads(1)
                server = HydrationServer(make(), token=TOKEN, socket_dir=tmp_path, nodes=nodes)
                os.write(write, server.open().encode() + b"\n")
                if generation is not None:
                    server.offer(generation, step)
                signal.pause()
            except BaseException:  # noqa: BLE001 - shown, then the process ends
                traceback.print_exc()
            finally:
                os._exit(0)
        pids.append(pid)
        os.close(write)
        with os.fdopen(read) as pipe:
            return pipe.readline().strip(), pid

    yield start
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@pytest.fixture
def local(tmp_path: Path) -> Any:
    """Opens holders in this process, for what needs a look inside."""
    with contextlib.ExitStack() as stack:

        def start(source: Any, **more: Any) -> Any:
            return stack.enter_context(HydrationServer(source, token=TOKEN, socket_dir=tmp_path, **more))

        yield start


def hydrate(
    sink: Any, endpoints: Any, *, step: Any = 3, generation: Any = 1, token: Any = TOKEN, within: Any = 20.0
) -> Any:
    return receive(
        sink, step=step, generation=generation, token=token, endpoints=endpoints, deadline=time.monotonic() + within
    )


class Flipping:
    """A connection in between that flips one bit of what the holder sends, `at` bytes after its greeting's start."""

    def __init__(self, endpoint: Any, path: Any, *, at: Any = 0) -> None:
        self._target, self._at = endpoint.removeprefix("unix:"), at
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.endpoint = f"unix:{path}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        front, _ = self._listener.accept()
        back = socket.socket(socket.AF_UNIX)
        back.connect(self._target)
        threading.Thread(target=self._pump, args=(front, back), daemon=True).start()
        passed = 0
        while data := bytearray(back.recv(65536)):
            self._spoil(data, passed)
            passed += len(data)
            try:
                front.sendall(data)
            except OSError:
                return

    def _spoil(self, data: Any, passed: Any) -> None:
        if 0 <= self._at - passed < len(data):
            data[self._at - passed] ^= 0x10

    @staticmethod
    def _pump(front: Any, back: Any) -> None:
        with contextlib.suppress(OSError):
            while data := front.recv(65536):
                back.sendall(data)
        with contextlib.suppress(OSError):
            back.shutdown(socket.SHUT_RDWR)


def awkward() -> Any:
    wide = torch.randn(64, 96)
    return {
        "bf16": torch.randn(300, 7).bfloat16(),
        "scalar": torch.tensor(3.25),
        "transposed": wide.t(),
        "strided": torch.randn(500, 8)[::2, 1:5],
        "channels_last": torch.randn(2, 3, 40, 40).to(memory_format=torch.channels_last),
        "bool": torch.rand(1000) > 0.5,
        "int": torch.arange(-5, 5),
        "complex": torch.randn(33, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 4),
        "large_transposed": torch.randn(700, 700).t(),
        "float8": torch.randn(100).to(torch.float8_e4m3fn),
    }


@pytest.mark.parametrize("nodes", [1, 2], ids=["unix", "tcp"])
def test_every_kind_of_tensor_arrives_bitwise_from_two_holders(holder: Any, nodes: Any) -> None:
    def make() -> Any:
        torch.manual_seed(4)
        return Tensors(awkward())

    endpoints = [holder(make, nodes=nodes)[0] for _ in range(2)]
    assert all(endpoint.startswith("unix:" if nodes == 1 else "tcp:127.0.0.1:") for endpoint in endpoints)
    expected = make().tensors
    sink = Tensors({name: torch.zeros_like(t.resolve_conj()) for name, t in expected.items()})
    report = hydrate(sink, endpoints)
    assert sink.finished
    assert report.holders == 2
    assert report.bytes == sum(t.nbytes for t in expected.values())
    for name, tensor in expected.items():
        got, want = sink.tensors[name].contiguous(), tensor.resolve_conj().contiguous()
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name


def test_each_holder_sends_a_different_part(local: Any) -> None:
    tensors = big(1)
    touched: list[list[Any]] = [[], []]
    servers = [local(Tensors(tensors, touch=touched[at].append)) for at in range(2)]
    for server in servers:
        server.offer(Generation(1), StepNo(3))
    sink = Tensors(empty(tensors))
    hydrate(sink, [server.endpoint for server in servers])
    assert_equal(sink.tensors, tensors)
    assert set(touched[0]) == {"w0", "w1"}
    assert set(touched[1]) == {"w2", "w3"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_holder_killed_in_mid_transfer_is_replaced_by_the_others(holder: Any) -> None:
    def dying() -> Any:
        return Tensors(big(1), touch=lambda name: die() if name == "w1" else None)

    endpoints = [holder(dying)[0], holder(lambda: Tensors(big(1)))[0], holder(lambda: Tensors(big(1)))[0]]
    sink = Tensors(empty(big(1)))
    report = hydrate(sink, endpoints)
    assert_equal(sink.tensors, big(1))
    assert len(report.lost) == 1
    assert endpoints[0] in report.lost[0]


def test_when_the_only_holder_is_killed_the_error_says_so_and_nothing_is_finished(holder: Any) -> None:
    def dying() -> Any:
        return Tensors(big(1), touch=lambda name: die() if name == "w2" else None)

    endpoint, _ = holder(dying)
    sink = Tensors(empty(big(1)))
    with pytest.raises(HydrationError, match=r"bytes of state@3 could not be received: .*(hung up|reset)"):
        hydrate(sink, [endpoint])
    assert not sink.finished


def test_a_holder_that_is_gone_already_is_left_out(holder: Any, tmp_path: Path) -> None:
    living, _ = holder(lambda: Tensors(big(2)))
    sink = Tensors(empty(big(2)))
    report = hydrate(sink, [f"unix:{tmp_path}/nobody", living])
    assert_equal(sink.tensors, big(2))
    assert report.holders == 1
    with pytest.raises(HydrationError, match="none of 1 holders gave state@3: .*No such file"):
        hydrate(Tensors(empty(big(2))), [f"unix:{tmp_path}/nobody"])


def test_a_stopped_holder_does_not_hold_up_the_others(holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_GRACE", 1.0)
    stopped, pid = holder(lambda: Tensors(big(2)))
    living, _ = holder(lambda: Tensors(big(2)))
    os.kill(pid, signal.SIGSTOP)
    sink = Tensors(empty(big(2)))
    report = hydrate(sink, [stopped, living], within=200.0)
    assert_equal(sink.tensors, big(2))
    assert report.seconds < 100, "it was waited for until the deadline"
    assert "no answer in time" in report.lost[0]


def test_a_corrupted_chunk_is_read_again_from_another_holder(holder: Any, tmp_path: Path) -> None:
    first, second = (holder(lambda: Tensors(big(1)))[0] for _ in range(2))
    flipping = Flipping(first, tmp_path / "flip", at=2_500_000)
    sink = Tensors(empty(big(1)))
    report = hydrate(sink, [flipping.endpoint, second])
    assert_equal(sink.tensors, big(1))
    assert any("did not match their checksum" in text for text in report.lost)


def test_a_corrupted_chunk_of_the_only_holder_is_read_again_from_it(holder: Any, tmp_path: Path) -> None:
    endpoint, _ = holder(lambda: Tensors(big(1)))
    sink = Tensors(empty(big(1)))
    hydrate(sink, [Flipping(endpoint, tmp_path / "flip", at=2_500_000).endpoint])
    assert_equal(sink.tensors, big(1))


def test_a_holder_that_corrupts_without_end_is_given_up(holder: Any, tmp_path: Path) -> None:
    endpoint, _ = holder(lambda: Tensors({"w": torch.randn(1 << 18)}))
    sink = Tensors({"w": torch.zeros(1 << 18)})

    spoil = Endless(endpoint, tmp_path / "flip")
    with pytest.raises(HydrationError, match="did not match their checksum"):
        hydrate(sink, [spoil.endpoint])
    assert not sink.finished


class Endless(Flipping):
    """Flips a bit in every piece it passes on, once the greeting is through."""

    def _spoil(self, data: Any, passed: Any) -> None:
        if passed:
            data[0] ^= 1


def test_cancel_ends_a_reception_that_waits_for_its_holder(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else it would end by itself after 5 s.
    for module in (client, flows, streams):
        monkeypatch.setattr(module, "allow", lambda sock, *_, **__: sock.settimeout(300.0))
    blocked, release = threading.Event(), threading.Event()

    def block(name: Any) -> None:
        blocked.set()
        release.wait(120)

    server = local(Tensors(big(1), touch=block))
    server.offer(Generation(1), StepNo(3))
    sink = Tensors(empty(big(1)))
    hydration = Hydration(
        sink,
        step=StepNo(3),
        generation=Generation(1),
        token=TOKEN,
        endpoints=[server.endpoint],
        deadline=time.monotonic() + 300,
    )
    ended = []

    def run() -> None:
        with pytest.raises(GenerationHalted):
            hydration.run()
        ended.append(not release.is_set())

    thread = threading.Thread(target=run)
    thread.start()
    assert blocked.wait(10)
    hydration.cancel()
    thread.join(60)
    release.set()
    assert ended == [True], "it ends while the holder still reads, and long before its deadline"
    assert not sink.finished


def test_cancel_also_ends_the_wait_for_a_holder_that_is_not_ready(local: Any) -> None:
    server = local(Tensors(big(1)))
    hydration = Hydration(
        Tensors({}),
        step=StepNo(3),
        generation=Generation(1),
        token=TOKEN,
        endpoints=[server.endpoint],
        deadline=time.monotonic() + 200,
    )
    threading.Timer(0.05, hydration.cancel).start()
    began = time.monotonic()
    with pytest.raises(GenerationHalted):
        hydration.run()
    assert time.monotonic() - began < 100, "it was waited for until the deadline"


def beside(sink: Any, server: Any, work: Any) -> Hydration:
    """A reception beside which `work` is done."""
    return Hydration(
        sink,
        step=StepNo(3),
        generation=Generation(1),
        token=TOKEN,
        endpoints=[server.endpoint],
        deadline=time.monotonic() + 300,
        beside=work,
    )


def test_all_bytes_may_arrive_while_groups_are_formed(local: Any) -> None:
    server = local(Tensors(big(1)))
    server.offer(Generation(1), StepNo(3))
    sink, seen = Tensors(empty(big(1))), []

    def form() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and not all(torch.equal(t, big(1)[name]) for name, t in sink.tensors.items()):
            threading.Event().wait(0.01)
        assert_equal(sink.tensors, big(1))
        seen.append(sink.finished)

    beside(sink, server, form).run()
    assert seen == [False] and sink.finished


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_error_beside_a_reception_ends_it_and_is_the_one_that_is_raised(
    local: Any, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    for module in (client, flows, streams):
        monkeypatch.setattr(module, "allow", lambda sock, *_, **__: sock.settimeout(300.0))
    blocked, release = threading.Event(), threading.Event()

    def block(name: Any) -> None:
        blocked.set()
        release.wait(120)

    server = local(Tensors(big(1), touch=block))
    server.offer(Generation(1), StepNo(3))
    sink = Tensors(empty(big(1)))

    def fail() -> None:
        assert blocked.wait(60)
        if cancelled:
            hydration.cancel()
        raise StateError("this worker was built for another rank")

    hydration = beside(sink, server, fail)
    with pytest.raises(GenerationHalted if cancelled else StateError, match="cancelled" if cancelled else "another"):
        hydration.run()
    reading = [each for each in threading.enumerate() if each.name == "regrow-hydrate-from"]
    assert not release.is_set() and not sink.finished and not reading, "it ends while the holder still reads"
    release.set()


def test_where_there_is_nothing_to_receive_the_work_beside_it_is_done_all_the_same(local: Any) -> None:
    server = local(Tensors({}))
    server.offer(Generation(1), StepNo(3))
    sink, done = Tensors({}), []
    beside(sink, server, lambda: done.append(sink.finished)).run()
    assert done == [False] and sink.finished


def test_a_newcomer_that_comes_before_its_holder_is_ready_waits(local: Any) -> None:
    server = local(Tensors(big(1)))
    server.offer(1, 2)
    sink = Tensors(empty(big(1)))
    threading.Timer(0.05, server.offer, args=(2, 3)).start()
    hydrate(sink, [server.endpoint], generation=2)
    assert_equal(sink.tensors, big(1))


def test_another_step_another_generation_and_another_token_are_refused_with_the_reason(local: Any) -> None:
    server = local(Tensors(big(1)))
    server.offer(5, 3)
    with pytest.raises(HydrationError, match="is at step 3, not at 4"):
        hydrate(Tensors({}), [server.endpoint], generation=5, step=4)
    with pytest.raises(HydrationError, match="generation 4 is over, this is generation 5"):
        hydrate(Tensors({}), [server.endpoint], generation=4)
    with pytest.raises(HydrationError, match="another job's token"):
        hydrate(Tensors({}), [server.endpoint], generation=5, token="guess")


def test_a_deadline_ends_the_wait_for_a_holder_that_never_offers(local: Any) -> None:
    server = local(Tensors(big(1)))
    began = time.monotonic()
    with pytest.raises(HydrationError):
        hydrate(Tensors({}), [server.endpoint], within=0.3)
    assert time.monotonic() - began < 60


def test_the_session_learns_when_nobody_reads_any_more_and_can_end_the_rest(local: Any) -> None:
    reading, release = threading.Event(), threading.Event()

    def block(name: Any) -> None:
        reading.set()
        release.wait(120)

    server = local(Tensors(big(1), touch=block))
    server.offer(Generation(1), StepNo(3))
    assert server.readers == 0
    failed = []

    def run() -> None:
        try:
            hydrate(Tensors(empty(big(1))), [server.endpoint], within=120.0)
        except HydrationError as error:
            failed.append(error)
            release.set()  # it was hung up on

    thread = threading.Thread(target=run)
    thread.start()
    assert reading.wait(10)
    assert server.readers == 1
    assert not server.wait_idle(time.monotonic() + 0.05)
    assert server.withdraw(time.monotonic() + 0.05) == 1
    assert server.readers == 0
    thread.join(10)
    assert len(failed) == 1
    with pytest.raises(HydrationError):
        hydrate(Tensors({}), [server.endpoint], within=0.2)


def test_holders_that_disagree_with_the_first_are_not_read(local: Any) -> None:
    tensors = big(1)
    servers = [local(Tensors(tensors)), local(Tensors({"other": torch.ones(3)}))]
    for server in servers:
        server.offer(Generation(1), StepNo(3))
    sink = Tensors(empty(tensors))
    report = hydrate(sink, [server.endpoint for server in servers])
    assert_equal(sink.tensors, tensors)
    assert "holds other tensors" in report.lost[0]


def test_bytes_that_do_not_exist_are_not_sent(local: Any) -> None:
    class Greedy(Tensors):
        def prepare(self, inventory: Any) -> Any:
            entries = [TensorEntry(e.name, e.dtype, e.shape, e.nbytes + 8, e.device_type) for e in inventory.entries]
            inventory.entries[:] = entries
            return {e.name: torch.zeros(e.nbytes, dtype=torch.uint8) for e in entries}

    server = local(Tensors(big(1)))
    server.offer(Generation(1), StepNo(3))
    with pytest.raises(HydrationError, match="could not be received"):
        hydrate(Greedy({}), [server.endpoint])


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def threads() -> Any:
        return {t.name for t in threading.enumerate() if t.name.startswith("regrow-")}

    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with HydrationServer(Tensors(big(1)), token=TOKEN, socket_dir=tmp_path) as server:
            server.offer(Generation(1), StepNo(3))
            hydrate(Tensors(empty(big(1))), [server.endpoint])
            idle = socket.socket(socket.AF_UNIX)
            idle.connect(server.endpoint.removeprefix("unix:"))
        idle.close()
        server.close()
    deadline = time.monotonic() + 60.0
    while threads():  # one that has said all may not have ended
        assert time.monotonic() < deadline, threads()
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []
    # Fewer where one of a test before was still being closed.
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_socket_folder_that_does_not_exist_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(HydrationError, match="cannot listen at .*No such file or directory"):
        HydrationServer(Tensors({}), token=TOKEN, socket_dir=tmp_path / "no").open()
    with pytest.raises(HydrationError, match="longer than 107 bytes"):
        HydrationServer(Tensors({}), token=TOKEN, socket_dir=tmp_path / ("x" * 120)).open()


def training(seed: Any) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 40)
    state = ProtectedState([model, optimizer, scheduler])
    state.state_at = StepNo(0)

    def step(number: Any) -> Any:
        torch.manual_seed(500 + number)
        loss = model(torch.randn(16, 40)).pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state.state_at = number + 1
        return loss.item()

    return state, step


def test_a_fresh_process_hydrates_adamw_and_trains_on_bitwise_without_unpickling_anything(
    holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        state, step = training(0)
        for number in range(3):
            step(number)
        return state

    endpoints = [holder(make)[0] for _ in range(2)]

    newcomer, step = training(9)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    with monkeypatch.context() as patched:
        for name in ("load", "loads", "Unpickler"):
            patched.setattr(pickle, name, forbidden)
        patched.setattr(torch, "load", forbidden)
        hydrate(newcomer, endpoints)
    reference, reference_step = training(0)
    for number in range(3):
        reference_step(number)
    assert newcomer.digest() == reference.digest()
    assert [step(n) for n in range(3, 6)] == [reference_step(n) for n in range(3, 6)]
    assert newcomer.digest() == reference.digest()


def test_a_model_that_does_not_fit_is_a_state_error_and_is_not_touched(local: Any) -> None:
    state, _ = training(0)
    server = local(state)
    server.offer(1, 0)
    other = ProtectedState([nn.Linear(3, 3)])
    before = other.digest()
    with pytest.raises(StateError, match=r"model\.weight"):
        hydrate(other, [server.endpoint], step=0)
    assert other.digest() == before
    assert other.state_at == NO_STATE


def test_a_stranger_is_not_listened_to_for_long(tmp_path: Path) -> None:
    server = HydrationServer(Tensors(big(1)), token=TOKEN, socket_dir=tmp_path)
    with server, connect(server.endpoint) as stranger:
        stranger.sendall((1 << 20).to_bytes(4, "big") + bytes(100))
        stranger.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b"", "no frame so long is read before the token is known"


def serves(thread: threading.Thread) -> bool:
    """True if a thread attends to a reader; one that is listed but has not begun yet cannot be joined."""
    return "serves" in thread.name and thread.is_alive()


def test_a_reader_that_has_hung_up_while_it_waited_keeps_no_thread(tmp_path: Path) -> None:
    with HydrationServer(Tensors(big(1)), token=TOKEN, socket_dir=tmp_path) as server:
        before, deadline = set(threading.enumerate()), time.monotonic() + 20.0
        with connect(server.endpoint) as reader:
            ask = AskState(token=TOKEN, generation=Generation(7), step=StepNo(3), patience=500.0)
            reader.sendall(receiver_side.frame(ask))
            while not (serving := [each for each in set(threading.enumerate()) - before if serves(each)]):
                assert time.monotonic() < deadline, "nobody attends to it"
                time.sleep(0.01)
        for each in serving:
            each.join(20.0)
            assert not each.is_alive(), "its thread still waits"
