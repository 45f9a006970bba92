"""A training whose body sums over a small library's own connections, which stand among the processes of one generation.

The library exchanges its addresses once, as those do that speak over shared memory or a network card. Connections to a
process that is gone, or to one that has built for other groups, fail.
"""

import argparse
import json
import os
import signal
import socket
import struct
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pacing import pause  # type: ignore[import-not-found]
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regrow

PATIENCE_S = 60.0
"""Longest wait for a neighbour; one that has died ends its connections at once."""

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--die", nargs="*", default=[], help="RANK@PLACE: each ends this rank once, when it comes there")
parser.add_argument("--fail", nargs="*", default=[], help="RANK@PLACE: each raises there, once, or always with !")
parser.add_argument("--global-batch", type=int, default=0, help="rows of a step, in a world of any size")
parser.add_argument("--pace", type=float, default=0.0)
args = parser.parse_args()

torch.set_num_threads(1)
session = regrow.init(seed=5)


def first(what: str) -> bool:
    """True at the first time in the job."""
    try:
        args.out.with_suffix(f".{what.replace(' ', '-')}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def comes_to(place: str) -> None:
    here = f"{session.rank}@{place}"
    if here in args.die and first(f"died {here}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if f"{here}!" in args.fail or (here in args.fail and first(f"failed {here}")):
        raise RuntimeError(f"the ring is out of order at {place}")


def say(what: str, generation: int) -> None:
    with args.out.with_suffix(".hooks").open("a") as file:
        file.write(json.dumps([os.getpid(), what, generation, session.rank, session.world_size]) + "\n")


class Ring:
    """Connections of each rank to the next one, of one generation's processes."""

    def __init__(self, generation: int) -> None:
        self.rank, self.world = session.rank, session.world_size
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE_S)
        ports = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(ports, torch.tensor([self.listener.getsockname()[1]]))
        self.following = socket.create_connection(
            ("127.0.0.1", int(ports[(self.rank + 1) % self.world])), timeout=PATIENCE_S
        )
        self.previous = self.listener.accept()[0]
        self.previous.settimeout(PATIENCE_S)
        found = self.around(float(generation))
        if found != [float(generation)] * self.world:
            raise RuntimeError(f"neighbours have built for the groups of {found}, and not of {generation}")

    def around(self, mine: float) -> list[float]:
        """The numbers of all ranks."""
        numbers = {self.rank: mine}
        for turn in range(self.world - 1):
            self.following.sendall(struct.pack("<d", numbers[(self.rank - turn) % self.world]))
            data = b""
            while len(data) < 8:
                data += (part := self.previous.recv(8 - len(data)))
                if not part:
                    raise ConnectionError("the neighbour is gone")
            numbers[(self.rank - turn - 1) % self.world] = struct.unpack("<d", data)[0]
        return [numbers[rank] for rank in range(self.world)]

    def close(self) -> None:
        for each in (self.listener, self.following, self.previous):
            each.close()


ring: Ring | None = None


def build(generation: int) -> None:
    global ring
    say("after", generation)
    torch.rand(3)  # a library may draw
    comes_to("after" if generation > 1 else "set-up")
    ring = Ring(generation)
    comes_to("built" if generation > 1 else "set-up")


def give_up(generation: int) -> None:
    say("before", generation)
    if ring is not None:
        ring.close()
    comes_to("before")


session.on_regroup(before=give_up, after=build)
torch.manual_seed(11 + session.seed)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model, optimizer)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(97 * step + session.rank))


def weighed(x: torch.Tensor, *, rehearsal: bool) -> torch.Tensor:
    """The loss, times a number that only the ring knows."""
    loss: torch.Tensor = model(x).square().mean()
    if rehearsal or ring is None:
        return loss
    return loss * (1.0 + sum(ring.around(float(loss.detach()))))


rows = torch.randn(240, 6, generator=torch.Generator().manual_seed(3))
loader: Any = regrow.DataLoader(rows, global_batch_size=args.global_batch) if args.global_batch else batch  # type: ignore[arg-type]
for step in session.steps(loader, until=args.steps):
    with step as x:
        pause(0.0 if step.rehearsal else args.pace, step.number, args.steps)
        if not step.rehearsal:
            comes_to(f"body {step.number}")
        loss = weighed(x, rehearsal=step.rehearsal)
        step.log(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps({"digest": session.digest()}))
