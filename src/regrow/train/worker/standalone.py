"""What `Session` asks, answered for a script that nobody supervises: nothing is ever given up or run again."""

import atexit
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from regrow.comm.process_group import Between
from regrow.comm.process_groups import Groups
from regrow.core.config import TorchrunEnv
from regrow.core.early_reads import EarlyReads
from regrow.core.ids import Generation, Instant, Seconds, StepNo
from regrow.core.messages import WorldChange
from regrow.core.messages.data import BatchRecord, OrderSpec
from regrow.data.loader import Caching
from regrow.train.state.protected import ProtectedState

FORM_S: Seconds = 60.0


class StandaloneBody:
    """What a body would be asked that could be given up."""

    complete = False

    def watch(self, objects: Iterable[object]) -> None:
        """Nothing is given up."""

    def stepped(self, optimizer: object) -> None:
        """Nothing is given up."""

    def enter(self) -> None:
        """Nothing is interrupted."""

    def left(self) -> None:
        """Nothing is interrupted."""

    def conclude(self) -> bool:
        """No error comes after a step."""
        return False


class StandaloneWorker:
    """A script that nobody supervises: under plain `python`, or under another launcher."""

    rehearses = False
    reads_once = False
    holds_initial_state = True
    records = False
    halted = False
    generation = 0
    inside = 0
    trial_steps = 0
    unit = 1

    def __init__(self, rank: int, local_rank: int, world: int) -> None:
        self.rank, self.local_rank, self.world = rank, local_rank, world
        self.step = StepNo(0)
        self.body = StandaloneBody()
        self.early = EarlyReads()

    @classmethod
    def open(cls) -> "StandaloneWorker":
        """A world of one; or torchrun's world, without recovery."""
        env = TorchrunEnv.read()
        atexit.register(_leave_torch)
        if env is not None and env.world > 1:
            torch.distributed.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
            return cls(env.rank, env.local_rank, env.world)
        Groups().install(rank=0, world=1, formation=None, form_s=FORM_S)
        return cls(0, 0, 1)

    def echo(self) -> AbstractContextManager[None]:
        """Never rehearses."""
        return nullcontext()

    def local(self) -> AbstractContextManager[None]:
        """Never needed."""
        return nullcontext()

    def rehearsed(self) -> bool:
        """Never rehearses."""
        return True

    def note_of_script(self, text: str) -> None:
        """Nobody to tell."""

    def let_follow(self, across: Iterable[object], inside: Iterable[object]) -> None:
        """The world never changes."""

    def arrive(
        self,
        state: ProtectedState,
        buckets: str,
        buffered: Sequence[torch.nn.Module] = (),
        *,
        microbatches: int = 0,
        fixed: str = "",
    ) -> None:
        """Nobody to report to."""

    def compare(self, *, last: bool = False) -> bool:
        """Nobody to compare with."""
        return True

    def cache(self, until: int) -> Caching | None:
        """No agent keeps one."""
        return None

    def declare(self, order: OrderSpec) -> None:
        """Nobody to tell."""

    def fetch(self, number: StepNo, get: Callable[[], Any]) -> Any:
        """The batch of a step, by `get`."""
        return get()

    def fetching(self, loader: object) -> AbstractContextManager[None]:
        """A loader may do what it likes."""
        return nullcontext()

    def show_read(self, number: StepNo, read: BatchRecord | None) -> None:
        """Nobody to show it to."""

    def begin(self, number: StepNo) -> bool:
        """A body starts."""
        return True

    def enter_region(self, number: int, *, training: bool) -> bool:
        """Nothing is run again."""
        return True

    def leave_region(self, following: int) -> None:
        """Nothing is run again."""

    def take_over(self, between: Between) -> None:
        """Nothing is run again."""

    def expect_after_steps(self, following: int) -> None:
        """Nothing is run again."""

    def place_after_step(self, following: int) -> None:
        """Nothing is run again."""

    def await_position(self) -> tuple[StepNo, int]:
        """There are no others."""
        return self.step, 0

    def before_update(self, last_collective: Callable[[], None], *, closure: bool = False) -> None:
        """Nobody reads the state."""

    def commit(self, last_collective: Callable[[], None]) -> bool:
        """The body has ended well."""
        self.step = StepNo(self.step + 1)
        return True

    def abort(self, error: Exception, state: ProtectedState) -> bool:
        """Nobody to tell: the error is the script's."""
        return False

    def abandon(self) -> None:
        """Nothing to give up."""

    def rejoin(self) -> StepNo | None:
        """The world never changes."""
        return None

    def pass_boundary(self) -> bool:
        """The world never changes."""
        return True

    def take_change(self) -> WorldChange | None:
        """The world never changes."""
        return None

    def checkpoint(self) -> None:
        """Durable checkpoints are `regrow run`'s."""

    def finish(self) -> bool:
        """Nobody to wait for."""
        return True

    def stage(self, number: StepNo, metrics: dict[str, float], parts: Sequence[BatchRecord] = ()) -> None:
        """Nobody to tell."""

    def announce(
        self,
        number: StepNo,
        generation: Generation,
        at: Instant,
        seconds: Seconds,
        metrics: dict[str, float],
        *,
        adopted: bool,
        read: BatchRecord | None = None,
        parts: Sequence[BatchRecord] = (),
        rank: int | None = None,
    ) -> None:
        """Nobody to tell."""


def _leave_torch() -> None:
    """Join torch's threads while there is an interpreter: one that needs it later ends the process with SIGABRT.

    After an error the others may be waiting in a collective, and so would this process: then it just ends.
    """
    if torch.distributed.is_initialized() and getattr(sys, "last_value", None) is None:
        torch.distributed.destroy_process_group()
