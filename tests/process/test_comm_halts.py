"""Whatever a peer does, a halted group ends at once and leaves nothing behind."""

import os
import random
import signal
import threading
import time
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from tests.process.comm_world import DEADLINE, Seat, store, world

from regrow.comm.groups import Formation, Groups
from regrow.core.errors import GenerationHalted
from regrow.core.ids import Generation

ROUNDS = 30
ELEMENTS = 4_000_000
VICTIM = 1


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


def wait_gone_or_stopped(process: psutil.Process) -> None:
    until = time.monotonic() + DEADLINE
    while process.is_running() and process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        assert time.monotonic() < until


def test_every_wait_ends_within_a_second_and_nothing_is_left_after_thirty_halts(tmp_path: Path) -> None:
    moments = random.Random(7)
    survivors = [Seat(rank, 3, str(tmp_path), tcp=False) for rank in range(3) if rank != VICTIM]
    victim = Seat(VICTIM, 3, str(tmp_path), tcp=False)
    seen: dict[str, list[Any]] = {"killed": [], "stopped": [], "forming": []}
    with store(tmp_path) as address, world(survivors, survive, address) as living:
        for number in range(1, ROUNDS + 1):
            kind = list(seen)[number % 3]
            assert living.results() == ["forming"] * 2
            if kind == "forming":
                threading.Event().wait(moments.uniform(0.0, 0.02))
                said = time.monotonic()
                living.tell(number)
                endings = living.results()
            else:
                how = signal.SIGKILL if kind == "killed" else signal.SIGSTOP
                with world([victim], strike, number, address, how, moments.uniform(0.0, 0.03)) as dying:
                    struck = psutil.Process(dying.processes[0].pid)
                    assert dying.results() == ["struck"]
                    said = time.monotonic()
                    wait_gone_or_stopped(struck)
                    living.tell(number)
                    endings = living.results()
            seen[kind] += endings
            assert all(at - said < 1.0 for _, at in endings), f"{kind}: {[(name, at - said) for name, at in endings]}"
        assert living.results() == [([], 0)] * 2
    # Who is halted a moment later than the other survivor sees its connection end.
    assert {name for name, _ in chain(*seen.values())} <= {"GenerationHalted", "PeerLost"}
    assert [name for name, _ in seen["forming"]].count("GenerationHalted") >= ROUNDS // 3
    assert not list(tmp_path.glob("mesh-*")), "sockets of a group that was never formed lie about"
