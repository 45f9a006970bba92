"""NCCL's transport with a stand-in for NCCL: whose settings count, time-outs, batches of sends, and how it ends."""

import gc
import os
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from regrow.comm import nccl
from regrow.comm.echo import EchoTransport
from regrow.comm.nccl import NcclTransport
from regrow.comm.observers import Moments
from regrow.comm.process_group import Owner, RegrowGroup, send_together
from regrow.comm.torch_private import internals, nccl_group
from regrow.comm.torch_private.internals import HashStore
from regrow.comm.torch_private.nccl_group import Communicator, Wanted
from regrow.comm.transport import MeshTransport
from regrow.core.errors import CollectiveMisuse, DeadlineExceeded, GenerationHalted, StateError
from regrow.devices import accelerators

CUDA = torch.device("cuda", 0)


class Mesh:
    """The mesh beside it."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def form(self, deadline: float) -> None:
        self.said.append("formed")

    def set_timeout(self, seconds: float) -> None:
        self.said.append(seconds)

    def halt(self) -> None:
        self.said.append("halted")

    def call(self, name: str, args: Any, options: Any, done: Any = None) -> Any:
        peer = f" {args[1]}" if args else ""
        return SimpleNamespace(wait=lambda: self.said.append(f"{name}{peer}"))

    def close(self) -> None:
        self.said.append("closed")


class Nccl:
    """Calls of NCCL's backend and of the group that holds it."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def abort(self) -> None:
        self.said.append("abort")

    def _group_start(self) -> None:
        self.said.append("together")

    def _group_end(self) -> None:
        self.said.append("ended")

    def allreduce(self, tensors: Any) -> None:
        self.said.append("allreduce")

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.said.append(timeout)

    def _start_coalescing(self, device: torch.device) -> None:
        self.said.append("start")

    def _end_coalescing(self, device: torch.device) -> str:
        self.said.append("end")
        return "work"

    def send(self, tensors: Any, peer: int, tag: int = 0) -> None:
        self.said.append(("send", peer))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> None:
        self.said.append(("recv", peer))


def formed(made: Nccl, mesh: Mesh, *, run_s: float = 70.0) -> tuple[NcclTransport, list[Any]]:
    asked: list[Any] = []

    def connect(store: Any, rank: int, size: int, seconds: float, wanted: Wanted) -> Communicator:
        asked.append((rank, size, seconds))
        return Communicator(made, made)

    transport = NcclTransport(cast(MeshTransport, mesh), HashStore(), 0, 2, run_s=run_s, connect=connect)
    transport.form(1.0)
    return transport, asked


@pytest.mark.parametrize(("keep", "found"), [(False, "0"), (True, "1")])
def test_nccls_error_handling_is_ours_whatever_the_environment_said(
    monkeypatch: pytest.MonkeyPatch, keep: bool, found: str
) -> None:
    import os

    for name in nccl._OURS:
        monkeypatch.setenv(name, "1")
    nccl.settle_environment(keep)
    assert {os.environ[name] for name in nccl._OURS} == {found}


def test_a_groups_own_time_out_is_nccls_too_and_can_be_changed() -> None:
    made, mesh = Nccl(), Mesh()
    transport, asked = formed(made, mesh)
    assert asked == [(0, 2, 70.0)]
    transport.set_timeout(9.0)
    assert made.said == [timedelta(seconds=9)]
    assert mesh.said == ["formed", 9.0]


def test_ranks_meet_on_the_mesh_before_they_connect_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "on_device", lambda args: True)
    made, mesh = Nccl(), Mesh()
    transport, _ = formed(made, mesh)
    for _ in range(2):
        transport.call("allreduce", ([1.0],), {})
        transport.call("send", ([1.0], 1, 0), {})
    assert mesh.said == ["formed", "barrier", "send 1", "recv 1"]
    again = Mesh()
    batched, _ = formed(made, again)
    batched.start_coalescing(CUDA)
    batched.call("send", ([1.0], 1, 0), {})
    batched.end_coalescing(CUDA)
    assert again.said == ["formed", "barrier"], "one communicator of all ranks serves a batch"


def test_communicators_whose_aborts_wait_for_one_another_end() -> None:
    first, second, together = Nccl(), Nccl(), threading.Barrier(2, timeout=60.0)
    transports = []
    for made in (first, second):
        made.abort = together.wait  # type: ignore[method-assign, assignment]
        transports.append(formed(made, Mesh())[0])
    for transport in transports:
        transport.halt()
    for transport in transports:
        transport.close()
    assert not together.broken


def test_a_batch_in_which_a_call_fails_is_closed_and_aborted_after_that(group: RegrowGroup) -> None:
    made, transport = of(group), group.transport
    assert transport is not None
    batch = [operation(group, dist.isend, CUDA), operation(group, dist.irecv, CUDA)]

    def receive(tensors: Any, peer: int, tag: int = 0) -> None:
        transport.halt()
        raise RuntimeError("the peer is gone")

    made.recv = receive  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the peer is gone"):
        send_together(batch)
    transport.close()
    assert made.said == ["start", ("send", 1), "end", "together", "abort", "ended"]


def test_a_batch_that_nccl_does_not_let_be_closed_ends_the_worker(group: RegrowGroup) -> None:
    made, transport = of(group), group.transport
    assert transport is not None

    def refuse(device: torch.device) -> str:
        raise RuntimeError("unhandled system error")

    made._end_coalescing = refuse  # type: ignore[method-assign]
    transport.start_coalescing(CUDA)
    with pytest.raises(StateError, match="could not be closed: unhandled system error"):
        transport.give_up_coalescing()
    transport.give_up_coalescing()  # nothing is open any more


def test_an_abort_lets_a_call_of_another_thread_return_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "on_device", lambda args: True)
    monkeypatch.setattr(nccl_group, "CALL_S", 60.0)
    made, entered, goes_on = Nccl(), threading.Event(), threading.Event()
    transport, _ = formed(made, Mesh())

    def enqueue(tensors: Any) -> None:
        entered.set()
        assert goes_on.wait(60.0)
        made.said.append("enqueued")

    made.allreduce = enqueue  # type: ignore[method-assign]
    calling = threading.Thread(target=transport.call, args=("allreduce", ([1.0],), {}))
    calling.start()
    assert entered.wait(60.0)
    transport.halt()
    with pytest.raises(GenerationHalted):
        transport.call("allreduce", ([1.0],), {})
    goes_on.set()
    calling.join()
    transport.close()
    assert made.said == ["enqueued", "together", "abort", "ended"]


def test_what_a_blocked_call_connects_after_the_abort_is_aborted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "on_device", lambda args: True)
    monkeypatch.setattr(nccl_group, "CALL_S", 0.01)
    made, entered, first = Nccl(), threading.Event(), threading.Event()
    transport, _ = formed(made, Mesh())

    def connect(tensors: Any) -> None:
        entered.set()
        assert first.wait(60.0)
        made.said.append("connected")

    def abort() -> None:
        made.said.append("abort")
        first.set()

    made.allreduce, made.abort = connect, abort  # type: ignore[method-assign]
    calling = threading.Thread(target=transport.call, args=("allreduce", ([1.0],), {}))
    calling.start()
    assert entered.wait(60.0)
    transport.halt()
    calling.join()
    transport.close()
    assert [said for said in made.said if said in ("abort", "connected")] == ["abort", "connected", "abort"]


def test_an_abort_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "ABORT_S", 0.01)
    over, made = threading.Event(), Nccl()
    made.abort = over.wait  # type: ignore[method-assign, assignment]
    transport, _ = formed(made, Mesh())
    transport.halt()
    with pytest.raises(DeadlineExceeded, match="the device still runs a collective"):
        transport.close()
    over.set()


def test_what_was_aborted_is_never_dropped() -> None:
    made, mesh = Nccl(), Mesh()
    transport, _ = formed(made, mesh)
    transport.halt()
    transport.close()
    left = weakref.ref(made)
    del made, transport
    gc.collect()
    found = left()
    assert found is not None
    assert found.said == ["together", "abort", "ended"]
    assert mesh.said == ["formed", "halted", "closed"]


def test_the_end_of_the_process_ends_what_still_stands_after_its_last_work(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(nccl, "_drain", lambda: done.append("drained"))
    monkeypatch.setattr(nccl, "_living", [])
    closed, standing = Nccl(), Nccl()
    formed(closed, Mesh())[0].close()
    formed(standing, Mesh())
    monkeypatch.setattr(standing, "abort", lambda: done.append("aborted"))
    nccl._leave()
    assert done == ["drained", "aborted"]
    assert closed.said == []
    nccl._leave()
    assert done == ["drained", "aborted"]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> RegrowGroup:
    monkeypatch.setattr(nccl, "on_device", lambda args: True)
    owner = SimpleNamespace(
        generation=1,
        halted=False,
        in_flight=False,
        refused=False,
        draining=False,
        moments=Moments(),
        tape=None,
        between=None,
        past=None,
        set_up=None,
    )
    made = RegrowGroup(cast(Owner, owner), Wanted("pair", [0, 1]), 0, run_s=60.0)
    made.transport, _ = formed(Nccl(), Mesh())
    return made


def of(group: RegrowGroup) -> Nccl:
    transport = group.transport
    assert isinstance(transport, NcclTransport)
    assert transport._inner is not None
    made = transport._inner.backend
    assert isinstance(made, Nccl)
    return made


def operation(group: RegrowGroup, op: Any, device: torch.device) -> Any:
    def call(tensor: Any, *, group: RegrowGroup, tag: int, **peer: int) -> None:
        group.forward("send" if op is dist.isend else "recv", ([tensor], *peer.values(), tag), {})

    return SimpleNamespace(op=call, group=group, tensor=SimpleNamespace(device=device), tag=0, group_peer=1)


def test_a_batch_of_sends_and_receives_is_one_call_to_nccl(group: RegrowGroup) -> None:
    batch = [operation(group, dist.isend, CUDA), operation(group, dist.irecv, CUDA)]
    sent: Any = send_together(batch)
    assert sent == ["work"]
    assert of(group).said == ["start", ("send", 1), ("recv", 1), "end"]
    assert send_together([operation(group, dist.isend, torch.device("cpu"))]) is None, "the mesh needs none"


def test_torch_asks_our_groups_for_time_outs_and_batches(monkeypatch: pytest.MonkeyPatch, group: RegrowGroup) -> None:
    for module, name in ((c10d, "_set_pg_timeout"), (c10d, "batch_isend_irecv"), (dist, "batch_isend_irecv")):
        monkeypatch.setattr(module, name, getattr(module, name))
    internals.serve_by(RegrowGroup, set_timeout=RegrowGroup.set_timeout, send_together=send_together)
    c10d._set_pg_timeout(timedelta(seconds=8), group)
    sent: Any = dist.batch_isend_irecv([operation(group, dist.isend, CUDA)])
    assert sent == ["work"]
    assert of(group).said == [timedelta(seconds=8), "start", ("send", 1), "end"]
    assert group.run_s == 8.0


@pytest.mark.parametrize("keeps", [False, True])
def test_a_communicator_is_made_under_our_settings_unless_the_user_keeps_his(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in nccl._OURS:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("REGROW_KEEP_NCCL_SETTINGS", str(int(keeps)))
    monkeypatch.setattr(nccl, "make_communicator", lambda *_: {name: os.environ[name] for name in nccl._OURS})
    found = cast(Any, nccl.connect(HashStore(), 0, 2, 1.0, Wanted()))
    assert set(found.values()) == {"1" if keeps else "0"}


def test_a_collective_that_a_graph_records_is_refused_wherever_it_would_be_answered(
    monkeypatch: pytest.MonkeyPatch, group: RegrowGroup
) -> None:
    monkeypatch.setattr(accelerators, "is_capturing", lambda device: True)
    for echo in (None, EchoTransport(0, 2)):
        group.echo = echo
        with pytest.raises(CollectiveMisuse, match="allreduce was called while a graph of cpu records"):
            group.forward("allreduce", ([torch.ones(1)],), {})
    assert of(group).said == []
