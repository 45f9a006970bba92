"""One rank of `scripts/train_parallel.py` over groups of ours, halted in the middle of steps."""

import argparse
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from tests.process.comm_world import DEADLINE, Seat
from tests.scripts.placing import take_place
from tests.scripts.train_parallel import MAKERS, Training, batch_of, parser, value
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from regrow.comm.groups import Formation, Groups
from regrow.comm.observers import CallObserver, CountedGroup
from regrow.comm.torch_private import ddp, fsdp, pipeline
from regrow.core.errors import GenerationHalted
from regrow.core.ids import Generation

STEPS = 4


@dataclass
class Halter(CallObserver):
    """Halts the groups of all ranks when the parent says so, and lets one rank say when it reaches a certain call."""

    groups: Groups
    pipe: Connection
    at: int | None = None
    """The number of the collective of this rank at which it asks for the halt."""
    calls: int = 0
    halted: threading.Event = field(default_factory=threading.Event)

    def obey(self) -> None:
        try:
            while self.pipe.recv() == "halt":
                self.groups.halt()
                self.halted.set()
        except EOFError:
            return

    def starts(self, group: CountedGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.pipe.send(("", "halt"))
            assert self.halted.wait(DEADLINE)


class Rank:
    """Builds, rehearses and trains as a session would, without state to hydrate."""

    def __init__(self, seat: Seat, address: str, arguments: list[str], pipe: Connection) -> None:
        take_place(lambda: seat.rank)
        self.take_rank, self.address = seat, address
        self.args: argparse.Namespace = parser.parse_args(arguments)
        self.groups = Groups()
        self.halter = Halter(self.groups, pipe)
        self.generation = 0
        self.unsettled: list[DistributedDataParallel] = []

    def formation(self) -> Formation:
        self.generation += 1
        return Formation(
            Generation(self.generation), self.take_rank.rank, self.take_rank.size, self.address, self.take_rank.site
        )

    def build(self, *, alone: bool) -> None:
        """Alone: as a newcomer does, whose collectives are answered locally."""
        formation = None if alone else self.formation()
        self.groups.install(rank=self.take_rank.rank, world=self.take_rank.size, formation=formation, form_s=DEADLINE)
        torch.manual_seed(1)
        self.training: Training = MAKERS[self.args.mode](self.args)
        self.parameters = list(self.training.model.parameters())
        self.optimizer = AdamW(self.parameters, lr=3e-3)
        self.replicas = ddp.replicas([self.training.model])
        self.roots = fsdp.roots([self.training.model])
        with self.groups.echo():
            self.run(0, update=False)
            assert not ddp.settle_buckets(self.replicas)
        self.optimizer.zero_grad()

    def run(self, step: int, *, update: bool = True) -> float:
        with self.groups.echo():
            self.unsettled = ddp.settle_buckets(self.unsettled)
        torch.manual_seed(step)
        loss = value(self.training.forward_backward(*batch_of(step, self.training.replica)))
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def recover(self, error: BaseException | None) -> None:
        """Do a session's work between two attempts of a step."""
        if error is not None:
            pipeline.reset_unfinished(error)
        self.unsettled += ddp.reset_unfinished(self.replicas)
        fsdp.reset_unfinished(self.roots)
        self.optimizer.zero_grad()
        self.groups.form(self.formation(), lambda: False)
        self.halter.halted.clear()

    def meet(self, at: str) -> None:
        """Wait until every rank is here: whoever was the first to leave a collective may halt the last one in it."""
        keys = self.take_rank.store("meet")
        keys.set(f"{at}/{self.take_rank.rank}", "")
        keys.wait([f"{at}/{rank}" for rank in range(self.take_rank.size)], timedelta(seconds=DEADLINE))

    def state(self) -> list[torch.Tensor]:
        """Parameters and optimizer state of this rank."""
        kept = [*self.parameters, *(item for at in self.optimizer.state.values() for item in at.values())]
        return [item.to_local() if isinstance(item, DTensor) else item for item in kept]

    def has(self, state: list[torch.Tensor]) -> bool:
        """True if this rank's state has those bits."""
        return all(torch.equal(mine, other) for mine, other in zip(self.state(), state, strict=True))

    def load(self, parameters: list[np.ndarray[Any, Any]]) -> None:
        """Take over parameters, as a hydration would."""
        with torch.no_grad():
            for item, kept in zip(self.state(), parameters, strict=True):
                item.copy_(torch.from_numpy(kept))
        fsdp.reshard(self.roots)

    def undisturbed(self) -> tuple[list[float], list[torch.Tensor]]:
        """The losses of all steps and the state after them; this rank is then as it was before."""
        before = [item.detach().clone().cpu().numpy() for item in self.state()]
        losses = [self.run(step) for step in range(STEPS)]
        after = [item.detach().clone() for item in self.state()]
        self.optimizer.state.clear()
        self.load(before)
        return losses, after


def halted_everywhere(seat: Seat, address: str, arguments: list[str], *, pipe: Connection) -> tuple[bool, bool]:
    """All steps, each given up once, at another of its collectives; whether losses and state are as if undisturbed."""
    rank = Rank(seat, address, arguments, pipe)
    rank.build(alone=False)
    threading.Thread(target=rank.halter.obey, daemon=True).start()
    rank.groups.observers = (rank.halter,)
    losses, after = rank.undisturbed()
    calls = rank.halter.calls // STEPS
    halted = []
    for step in range(STEPS):
        rank.meet(f"step {step}")
        rank.halter.calls = 0
        # Another rank and another call each time: in the forward, in the backward, at the last call.
        mine = step % seat.size == seat.rank
        rank.halter.at = 1 + (calls - 1) * (step + 1) // STEPS if mine else None
        ended: Exception | None = None
        try:
            rank.run(step, update=False)
        except (GenerationHalted, OSError, RuntimeError) as error:
            ended = error
        assert rank.halter.halted.wait(DEADLINE)
        rank.halter.at = None
        rank.recover(ended)
        halted.append(rank.run(step))
    return halted == losses, rank.has(after)


def halted_everywhere_without_torchs_reset(
    seat: Seat, address: str, arguments: list[str], *, pipe: Connection
) -> tuple[bool, bool]:
    """The same under a torch that has no `FSDPModule.reset_iter_state`, as 2.11 and 2.12."""
    if hasattr(FSDPModule, "reset_iter_state"):
        del FSDPModule.reset_iter_state
    return halted_everywhere(seat, address, arguments, pipe=pipe)


def survive(seat: Seat, address: str, arguments: list[str], *, pipe: Connection) -> tuple[bool, bool]:
    """Lose a peer in the middle of a step, and train on with a newcomer in its place."""
    rank = Rank(seat, address, arguments, pipe)
    rank.build(alone=False)
    losses, after = rank.undisturbed()
    threading.Thread(target=rank.halter.obey, daemon=True).start()
    pipe.send(("", ([item.detach().cpu().numpy() for item in rank.state()], losses)))
    while True:
        try:
            rank.run(0, update=False)
            rank.optimizer.zero_grad()
        except (GenerationHalted, OSError, RuntimeError) as error:
            assert rank.halter.halted.wait(DEADLINE)
            rank.recover(error)
            break
    again = [rank.run(step) for step in range(STEPS)]
    return again == losses, rank.has(after)


def join(
    seat: Seat,
    address: str,
    arguments: list[str],
    state: list[np.ndarray[Any, Any]],
    losses: list[float],
    *,
    pipe: Connection,
) -> bool:
    """Build and rehearse while the others train, take over the state, and train on with them."""
    rank = Rank(seat, address, arguments, pipe)
    rank.build(alone=True)
    pipe.send(("", "built"))
    assert pipe.recv() == "form"
    rank.generation = 1
    rank.load(state)
    rank.groups.form(rank.formation(), lambda: False)
    return [rank.run(step) for step in range(STEPS)] == losses


def halted_in_a_prefetch(seat: Seat, address: str, arguments: list[str], *, pipe: Connection) -> tuple[bool, bool]:
    """A gather that was asked for ahead never ends: rank 0 does not take part, and all are halted."""
    rank = Rank(seat, address, arguments, pipe)
    rank.build(alone=False)
    threading.Thread(target=rank.halter.obey, daemon=True).start()
    losses, after = rank.undisturbed()
    if seat.rank:
        for root in rank.roots:
            root.unshard(async_op=True)
    pipe.send(("", "asked"))
    assert rank.halter.halted.wait(DEADLINE)
    rank.recover(None)
    return [rank.run(step) for step in range(STEPS)] == losses, rank.has(after)


def overwritten_between_steps(seat: Seat, address: str, arguments: list[str], *, pipe: Connection) -> bool:
    """True if a forward sees the new shards alone; a root keeps whole copies of the old ones."""
    rank = Rank(seat, address, arguments, pipe)
    rank.build(alone=False)
    x, _ = batch_of(0, seat.rank)
    model = rank.training.model.eval()
    with torch.no_grad():
        model(x)
        rank.load([item.cpu().numpy() + 1 for item in rank.state()])
        seen = model(x)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return torch.equal(seen, model(x))
