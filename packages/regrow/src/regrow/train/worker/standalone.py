"""A worker without an agent: no step is ever given up or run again."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from regrow.comm.groups import Groups
from regrow.comm.torch_private.idle_threads import await_idle_threads
from regrow.core.config import TorchrunEnv
from regrow.core.early_reads import EarlyReads
from regrow.core.ids import Generation, Seconds, StepNo, WorkerId
from regrow.core.messages.trainings import TrainingPlace
from regrow.core.process.forks import at_exit
from regrow.devices import accelerators
from regrow.train.worker.participation import ProofParty

FORM_S: Seconds = 60.0
LEAVE_S: Seconds = 2.0


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: there is no agent to report to, no step is given up, and the world never changes."""


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _no(*_: Any, **__: Any) -> bool:
    return False


def _as_it_is(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return nullcontext()


class StandaloneBody:
    """A body that is never given up: an error in it is the script's."""

    complete = entered = in_flight = awaits_causes = False
    watch = logged = enter = before_update = stepped = left = abandon = leave_restartable = _nothing
    begin_step = enter_restartable = _yes
    conclude = abort = _no
    own_time: Seconds = 0.0
    reads: Callable[[], str] = str
    waits: Callable[[], None] = _nothing
    ready: Callable[[], None] = _nothing

    def __init__(self) -> None:
        self.step = StepNo(0)

    def commit(self, last_collective: Callable[[], None]) -> bool:
        """Count the step whose body ended without an error."""
        self.step = StepNo(self.step + 1)
        return True


class StandaloneWaiting:
    """Never waits for other ranks; only `regrow run` writes durable checkpoints."""

    checkpoint = rejoin = take_change = _nothing
    finish = _yes


class StandaloneGroups:
    """Groups that stay as the script has made them."""

    generation = Generation(0)
    on_leaving: Callable[[], None] | None = None
    echo = _as_it_is
    let_follow = take_over = _nothing


class StandaloneWorker:
    """A script under plain `python`, or under another launcher."""

    worker_id = WorkerId("")
    rehearses = False
    reads_once = False
    holds_initial_state = True
    newcomer = False
    records = False
    proofs: ProofParty | None = None
    halted = over = leaves_others = False
    generation = 0
    restart_index = 0
    trial_steps, rewrites = 0, True
    unit = nproc = 1
    one_node = True

    echo = fetching = beside = _as_it_is
    rehearsed = compare = pass_boundary = _yes
    note_of_script = send = node_store = arrive = cache = fetches = show_read = _nothing
    expect_after_steps = place_after_step = _nothing

    def __init__(self, rank: int, local_rank: int, world: int) -> None:
        self.rank, self.local_rank, self.world = rank, local_rank, world
        self.body, self.waiting, self.groups = StandaloneBody(), StandaloneWaiting(), StandaloneGroups()
        self.early, self.training = EarlyReads(), TrainingPlace()

    @classmethod
    def open(cls) -> "StandaloneWorker":
        """Make a world of one, or join torchrun's world, without recovery."""
        env = TorchrunEnv.read()
        at_exit(_leave_torch)
        if env is not None and env.world > 1:
            torch.distributed.init_process_group(_backends())
            return cls(env.rank, env.local_rank, env.world)
        Groups().install(rank=0, world=1, formation=None, form_s=FORM_S)
        return cls(0, 0, 1)

    def turn(self) -> None:
        """Run the next training in this process too, from its step 0: see `Participation.turn`."""
        self.body.step = StepNo(0)

    @property
    def step(self) -> StepNo:
        """The step that this worker will run next."""
        return self.body.step

    def await_position(self) -> tuple[StepNo, int]:
        """This worker's own position, as there are no others."""
        return self.step, 0


def _backends() -> str:
    """Torch's own backends, for the CPU, and for the accelerator if there is one for which torch knows a backend."""
    kind = accelerators.kind() if torch.accelerator.is_available() else ""
    try:
        return f"{kind}:{torch.distributed.get_default_backend_for_device(kind)},cpu:gloo" if kind else "gloo"
    except ValueError:
        return "gloo"


def _leave_torch() -> None:
    """Let torch's threads end, or sleep, before the interpreter does: a thread that needs it later causes SIGABRT.

    After an error the others may wait in a collective, in which this process would wait too: then it just ends.
    """
    if torch.distributed.is_initialized() and getattr(sys, "last_value", None) is None:
        torch.distributed.destroy_process_group()
    await_idle_threads(LEAVE_S)
