"""Bodies of the processes of a world on one GPU."""

import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from tests.process.comm_world import DEADLINE, Seat
from tests.scripts.placing import take_place

from regrow.comm.groups import Formation, Groups
from regrow.comm.nccl import NcclTransport
from regrow.core.errors import GenerationHalted
from regrow.core.ids import Generation
from regrow.train.worker.accelerator import accelerator_of

SIZE = 300_000


def joined(seat: Seat, address: str, generation: int = 1) -> tuple[Groups, Formation]:
    take_place(lambda: seat.rank)
    groups = Groups()
    formation = Formation(Generation(generation), seat.rank, seat.size, address, seat.site)
    groups.install(rank=seat.rank, world=seat.size, formation=formation, form_s=DEADLINE)
    return groups, formation


def sums(seat: Seat) -> tuple[list[float], list[float]]:
    """One sum of each device's tensors: those of CUDA by NCCL, those of the processor by the mesh."""
    found = []
    for device in ("cuda", "cpu"):
        tensor = torch.full((SIZE,), float(1 + seat.rank), device=device)
        dist.all_reduce(tensor)
        found.append([float(tensor[0]), float(tensor[-1])])
    return found[0], found[1]


def both_devices(seat: Seat, address: str) -> Any:
    groups, _ = joined(seat, address)
    world = dist.group.WORLD
    assert isinstance(getattr(world, "transport", None), NcclTransport)
    answer = sums(seat)
    groups.close()
    return answer


def halted_in_the_middle(seat: Seat, address: str, *, pipe: Connection) -> Any:
    """A sum that one rank never joins is given up by all who wait in it, on the device too; then groups form anew.

    Returns the seconds from the halt until the device had come to an end, and the sums after that.
    """
    groups, _ = joined(seat, address)
    before = sums(seat)
    told: list[float] = []

    def obey() -> None:
        assert pipe.recv() == "halt"
        told.append(time.monotonic())
        groups.halt()

    obeying = threading.Thread(target=obey)
    obeying.start()
    gradient = torch.ones(SIZE, device="cuda")
    raised = ""
    if seat.rank:
        pipe.send(("", "waits"))
        try:
            dist.all_reduce(gradient)
            accelerator_of([gradient]).wait()  # what the gate does: the collective's own wait is only enqueued
        except (GenerationHalted, RuntimeError) as error:
            raised = type(error).__name__
    else:
        pipe.send(("", "stays away"))
    obeying.join(DEADLINE)
    took = time.monotonic() - told[0]
    groups.form(Formation(Generation(2), seat.rank, seat.size, address, seat.site), lambda: False)
    answer = (took, raised, groups.broke(), before, sums(seat))
    groups.close()
    return answer
