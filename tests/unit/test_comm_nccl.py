"""NCCL's transport with a stand-in for NCCL: whose settings count, time-outs, batches of sends, and how it ends."""

import gc
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from regrow.comm import nccl
from regrow.comm.nccl import NcclTransport
from regrow.comm.process_group import Owner, RegrowGroup, send_together
from regrow.comm.torch_private import internals
from regrow.comm.torch_private.internals import HashStore
from regrow.comm.torch_private.nccl_group import Communicator
from regrow.comm.transport import MeshTransport

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

    def close(self) -> None:
        self.said.append("closed")


class Nccl:
    """What is called of NCCL's backend and of the group that holds it."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def abort(self) -> None:
        self.said.append("abort")

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

    def connect(store: Any, rank: int, size: int, seconds: float) -> Communicator:
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
    assert found.said == ["abort"]
    assert mesh.said == ["formed", "halted", "closed"]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> RegrowGroup:
    monkeypatch.setattr(nccl, "on_cuda", lambda args: True)
    owner = SimpleNamespace(
        generation=1,
        halted=False,
        refused=False,
        draining=False,
        on_call=None,
        on_collective=None,
        after_collective=None,
        between=None,
    )
    made = RegrowGroup(cast(Owner, owner), "pair", [0, 1], 0, run_s=60.0)
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
