"""Whatever a peer does, a halted group ends at once and leaves nothing behind."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tests.process.comm_world import DEADLINE, Seat, store, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from regrow.comm.groups import Formation, Groups
from regrow.core.errors import GenerationHalted
from regrow.core.ids import Generation

ROUNDS = 30
RELEASED_S, USUALLY_S = 10.0, 1.0
"""Within which a wait has to end once it is halted, and half of all: what nobody releases waits for `DEADLINE`."""
ELEMENTS = 4_000_000
WORLD, VICTIM = 4, 1
"""Enough ranks that tensors of this size go to one partner after the other."""


def formation(seat: Seat, generation: int, address: str) -> Formation:
    return Formation(Generation(generation), seat.rank, seat.size, address, seat.site)


def survive(seat: Seat, address: str, *, pipe: Connection) -> tuple[list[str], int]:
    """Through all rounds in one process; returns what is left of threads and descriptors when all is closed."""
    groups, ordered = Groups(), {number: threading.Event() for number in range(1, ROUNDS + 1)}
    tensor = torch.ones(ELEMENTS)

    def obey() -> None:
        for _ in range(ROUNDS):
            number = pipe.recv()
            ordered[number].set()
            groups.halt()

    control = threading.Thread(target=obey)
    control.start()
    descriptors = psutil.Process().num_fds()
    groups.install(rank=seat.rank, world=seat.size, formation=None, form_s=DEADLINE)
    for number, order in ordered.items():
        pipe.send(("", "forming"))
        try:
            groups.form(formation(seat, number, address), order.is_set)
            while True:
                dist.all_reduce(tensor)
        except (GenerationHalted, OSError, RuntimeError) as error:  # the last is what torch's futures make of any error
            ended = time.monotonic()
            assert order.wait(DEADLINE)
            pipe.send(("", (_cause(error), ended)))
    groups.close()
    control.join()
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return threads, psutil.Process().num_fds() - descriptors


def _cause(error: Exception) -> str:
    if isinstance(error, OSError):
        return "PeerLost"
    text = repr(error)
    return next((kind for kind in ("GenerationHalted", "PeerLost") if kind in text), text)


def strike(seat: Seat, generation: int, address: str, number: int, after: float, *, pipe: Connection) -> None:
    """Be struck by a signal in the middle of an all-reduce."""
    groups = Groups()
    groups.install(rank=seat.rank, world=seat.size, formation=formation(seat, generation, address), form_s=DEADLINE)
    dist.all_reduce(torch.ones(ELEMENTS))
    work = dist.all_reduce(torch.ones(ELEMENTS), async_op=True)
    threading.Event().wait(after)
    pipe.send(("", "struck"))
    os.kill(os.getpid(), number)
    work.wait()


def wait_gone_or_stopped(pid: int) -> None:
    until = time.monotonic() + DEADLINE
    with contextlib.suppress(psutil.NoSuchProcess):  # it has gone, before the first question or later
        while psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            assert time.monotonic() < until
            time.sleep(0.001)


def test_every_wait_ends_within_a_second_and_nothing_is_left_after_thirty_halts(tmp_path: Path) -> None:
    moments = random.Random(7)
    survivors = [Seat(rank, WORLD, str(tmp_path), tcp=False) for rank in range(WORLD) if rank != VICTIM]
    victim = Seat(VICTIM, WORLD, str(tmp_path), tcp=False)
    seen: dict[str, list[Any]] = {"killed": [], "stopped": [], "forming": []}
    took: dict[str, list[float]] = {kind: [] for kind in seen}
    with store(tmp_path) as address, world(survivors, survive, address) as living:
        pids = [process.pid for process in living.processes]
        for number in range(1, ROUNDS + 1):
            kind = list(seen)[number % 3]
            assert living.results() == ["forming"] * len(survivors)
            if kind == "forming":
                threading.Event().wait(moments.uniform(0.0, 0.02))
                said = time.monotonic()
                living.tell(number)
                endings = living.results()
            else:
                how = signal.SIGKILL if kind == "killed" else signal.SIGSTOP
                with world([victim], strike, number, address, how, moments.uniform(0.0, 0.03)) as dying:
                    assert dying.results() == ["struck"]
                    said = time.monotonic()
                    wait_gone_or_stopped(dying.processes[0].pid)
                    living.tell(number)
                    endings = living.results()
            seen[kind] += endings
            took[kind] += [at - said for _, at in endings]
            assert max(took[kind]) < RELEASED_S, f"{kind}: {[(name, at - said) for name, at in endings]}"
        assert living.results() == [([], 0)] * len(survivors)
    assert {kind: each for kind, each in took.items() if median(each) >= USUALLY_S} == {}
    # Who is halted a moment later than the other survivor sees its connection end.
    assert {name for name, _ in chain(*seen.values())} <= {"GenerationHalted", "PeerLost"}
    assert [name for name, _ in seen["forming"]].count("GenerationHalted") >= ROUNDS // 3
    left = [path.name for pid in pids for path in tmp_path.glob(f"mesh-{pid}-*")]
    assert left == [], "sockets of groups that are over lie about"  # those of the killed go with the agent's folder


def _received_in_a_batch(group: dist.ProcessGroup) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(3), 0, group)])
    for work in works:
        work.wait()


@cache
def _region(group: dist.ProcessGroup) -> Callable[[torch.Tensor], Any]:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def region(x: torch.Tensor) -> Any:
        return funcol.all_reduce(x * 2, "sum", group) + 1

    return region


def _redistributed(group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])


def _in_backward(group: dist.ProcessGroup) -> None:
    given = torch.ones(4, requires_grad=True)
    gathered = funcol.all_gather_tensor_autograd(given, 0, group)
    gathered.sum().backward()


wait_tensor: Callable[[torch.Tensor], torch.Tensor] = funcol.wait_tensor
WAYS_TO_WAIT: dict[str, Callable[[dist.ProcessGroup], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "a work handle": lambda group: dist.all_reduce(torch.ones(ELEMENTS), group=group, async_op=True).wait(),
    "a work handle, with a timeout": lambda group: dist.barrier(group, async_op=True).wait(timedelta(seconds=DEADLINE)),
    "a future": lambda group: dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait(),
    "broadcast": lambda group: dist.broadcast(torch.ones(3), group_src=0, group=group),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(torch.zeros(12), torch.ones(3), group),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(12), group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(torch.zeros(4), torch.ones(4), group=group),
    "gather_object": lambda group: dist.all_gather_object([None] * 4, "mine", group),
    "barrier": lambda group: dist.barrier(group),
    "recv": lambda group: dist.recv(torch.zeros(3), group_src=0, group=group),
    "recv from anyone": lambda group: dist.recv(torch.zeros(3), group=group),
    "batch_isend_irecv": _received_in_a_batch,
    "wait_tensor": lambda group: wait_tensor(funcol.all_reduce(torch.ones(3), "sum", group)),
    "a compiled region": lambda group: _region(group)(torch.ones(3)),
    "redistribute": _redistributed,
    "a backward": _in_backward,
}


def wait_for_one_that_never_calls(seat: Seat, address: str, *, pipe: Connection) -> None:
    """Every way to wait, for rank 0, which calls nothing; each in a generation of its own."""
    groups = Groups()
    groups.install(rank=seat.rank, world=seat.size, formation=formation(seat, 1, address), form_s=DEADLINE)
    group = dist.new_group(list(range(seat.size)))
    halted = threading.Event()

    def obey() -> None:
        while pipe.recv():
            groups.halt()
            halted.set()

    threading.Thread(target=obey, daemon=True).start()
    with groups.echo():
        for way in WAYS_TO_WAIT.values() if seat.rank else ():
            way(group)  # what is compiled is compiled here
    for number, (name, way) in enumerate(WAYS_TO_WAIT.items(), start=2):
        pipe.send(("", "calling"))
        try:
            if seat.rank:
                way(group)
                raise AssertionError(f"{name} did not wait")
        except (GenerationHalted, OSError, RuntimeError):
            pass
        pipe.send(("", (name, time.monotonic())))
        assert halted.wait(DEADLINE)
        halted.clear()
        groups.form(formation(seat, number, address), lambda: False)
    groups.close()


def test_whoever_waits_in_a_group_of_the_scripts_is_released_within_a_second(tmp_path: Path) -> None:
    seats = [Seat(rank, 4, str(tmp_path), tcp=False) for rank in range(4)]
    took: list[float] = []
    with store(tmp_path) as address, world(seats, wait_for_one_that_never_calls, address) as waiting:
        for name in WAYS_TO_WAIT:
            assert waiting.results() == ["calling"] * 4
            threading.Event().wait(0.05)  # let them come to where they wait
            said = time.monotonic()
            waiting.tell(True)
            endings = waiting.results()
            assert [found for found, _ in endings] == [name] * 4
            took += [at - said for _, at in endings]
            assert max(took) < RELEASED_S, (name, said, endings)
        assert median(took) < USUALLY_S
        assert waiting.results() == [None] * 4
