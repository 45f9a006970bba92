"""How a process takes part in a job: what `Session` asks, answered by a worker of a job or by a script alone."""

import atexit
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import xxhash

from regrow.agent.link import WorkerLink
from regrow.agent.report import report
from regrow.comm.groups import Formation, Groups
from regrow.core.board import Phase
from regrow.core.config import TorchrunEnv
from regrow.core.errors import GenerationHalted
from regrow.core.ids import Generation, Instant, Seconds, StepNo
from regrow.core.messages import (
    FaultKind,
    FaultStage,
    Role,
    WorkerCommitted,
    WorkerFaulted,
    WorkerFinished,
    WorkerReady,
    WorkerStaged,
)
from regrow.hydration.server import HydrationServer
from regrow.step.machine import Adopted, Committed
from regrow.train.control import Control
from regrow.train.durable import DurableState
from regrow.train.faults import FaultInjector
from regrow.train.frozen import FrozenState
from regrow.train.interrupt import ForwardInterrupt
from regrow.train.protect import ProtectedState
from regrow.train.recovery import Recovery, site_of

FORM_S: Seconds = 60.0
WITHDRAW_S: Seconds = 60.0


class Member:
    """A worker that an agent started."""

    rehearses = True

    def __init__(self, link: WorkerLink, groups: Groups) -> None:
        self._link, self._groups = link, groups
        self._state: ProtectedState | None = None
        self._recovery: Recovery | None = None
        self._durable: DurableState | None = None
        self._rehearsing = self._updated = self._begun = False
        self._born = time.monotonic()
        self.control = Control(link, stop=self._stop, arm=lambda fault: self._faults.arm(fault))
        self._interrupt = ForwardInterrupt(lambda: self.control.interruptible)
        self._faults = FaultInjector(link, groups, lambda: self._state.parameters() if self._state else [])

    @classmethod
    def open(cls, link: WorkerLink) -> "Member":
        """Make the groups of this worker's generation (echo groups for a newcomer) and start to take orders."""
        env, groups = link.env, Groups()
        member = cls(link, groups)
        formation = None
        if env.role is Role.RANK:
            formation = Formation(env.generation, env.rank, env.world, env.store, site_of(env))
        link.excused = lambda: member.control.halted or groups.refused or groups.broke()
        member.control.start()
        groups.install(rank=env.rank, world=env.world, formation=formation, form_s=FORM_S)
        groups.on_collective = lambda name: link.board.call()
        return member

    # --- who this is -------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank now."""
        return self._link.env.rank

    @property
    def local_rank(self) -> int:
        """This worker's rank on its node."""
        return self._link.env.local_rank

    @property
    def world(self) -> int:
        """Ranks in the world."""
        return self._link.env.world

    @property
    def generation(self) -> int:
        """The membership that this worker runs in."""
        return self.control.generation

    @property
    def step(self) -> StepNo:
        """The step that this worker stands before."""
        return self.control.step

    @property
    def halted(self) -> bool:
        """Whether the generation is over."""
        return self.control.halted

    # --- before the first step ---------------------------------------------------------------------------------

    @property
    def holds_initial_state(self) -> bool:
        """Whether what the script built here counts, and is not overwritten by peers or a checkpoint."""
        return self._link.env.role is Role.RANK

    @contextmanager
    def echo(self) -> Iterator[None]:
        """A rehearsal: collectives are answered locally, updates are the rehearsal's own."""
        self._rehearsing = True
        try:
            with self._groups.echo():
                yield
        finally:
            self._rehearsing = False

    def local(self) -> AbstractContextManager[None]:
        """Within this, collectives are answered locally."""
        return self._groups.echo()

    def rehearsed(self) -> bool:
        """Whether the rehearsed body updated protected state through an optimizer."""
        return self._updated

    def arrive(self, state: ProtectedState, buckets: str) -> None:
        """Report to the coordinator: built and warm."""
        env = self._link.env
        self._state = state
        frozen = FrozenState(state)
        server = HydrationServer(
            frozen, token=env.token, socket_dir=env.socket_dir, bind=env.bind, advertise=env.advertise, nodes=env.nodes
        )
        endpoint = server.open()
        atexit.register(server.close)
        self._recovery = Recovery(
            self._link, self.control, self._groups, state, frozen, server, self._faults, form_s=FORM_S
        )
        state_at = StepNo(-1)
        if env.checkpoint_dir is not None:
            self._durable = DurableState(Path(env.checkpoint_dir), env.checkpoint_every)
        if env.role is Role.RANK:
            state_at = self._durable.load(state) if self._durable is not None and env.resume else StepNo(0)
        layout = xxhash.xxh3_64_hexdigest(f"{state.layout()}|{buckets}".encode())
        self._link.board.enter(Phase.WAITING)
        built_s = time.monotonic() - self._born
        self._link.send(WorkerReady(env.worker, state_at, endpoint, layout, built_s))

    # --- steps -------------------------------------------------------------------------------------------------

    def fetch(self, number: StepNo, get: Callable[[], Any]) -> Any:
        """The batch of a step, by `get`."""
        self._link.board.enter(Phase.DATA, step=number, generation=self.control.generation)
        self._faults.strike(FaultStage.DATA, number)
        return get()

    def begin(self, number: StepNo) -> bool:
        """A body starts; False when the generation is over."""
        self._interrupt.clear()
        if not self.control.begin():
            return False
        self._begun = True
        self._faults.enter(number)
        self._link.board.enter(Phase.COMPUTING)
        return True

    def before_update(self, last_collective: Callable[[], None]) -> None:
        """Protected state is about to change. Raises `GenerationHalted` when it must stay as it is.

        Args:
            last_collective: what all ranks still have to exchange before they update.
        """
        if self._rehearsing:
            self._updated = True
            return
        if not self._begun or self._recovery is None or self.control.updating:
            return
        self._groups.draining = True
        try:
            last_collective()
        finally:
            self._groups.draining = False
        if self.control.halted and (self._groups.refused or self._groups.broke()):
            raise GenerationHalted(f"step {self.control.step} was given up before its gradients were there")
        self._faults.strike(FaultStage.UPDATE, self.control.step)
        self._recovery.withdraw(time.monotonic() + WITHDRAW_S)
        if not self.control.update():
            raise GenerationHalted(f"step {self.control.step} was given up before its update")
        self._link.board.enter(Phase.UPDATING)

    def commit(self) -> bool:
        """The body has ended well; False when it must run again all the same."""
        self._faults.leave()
        self._faults.strike(FaultStage.COMMIT, self.control.step)
        self._link.board.enter(Phase.OUTSIDE)
        done = isinstance(self.control.commit(), Committed)
        if done:
            self._begun = False
        return done

    def abort(self, error: Exception, state: ProtectedState) -> bool:
        """The attempt failed: put back what it changed, and say so if nobody knows yet."""
        self._faults.leave()
        self._link.board.enter(Phase.RECOVERING)
        news, step = not self.control.halted, self.control.step
        symptom = isinstance(error, GenerationHalted) or self._groups.broke()
        if self._begun and not self.control.updating:
            state.rollback()
        self._begun = False
        self.control.fail()
        if news:
            kind = FaultKind.COLLECTIVE if symptom else FaultKind.BODY
            fact = WorkerFaulted(self._link.env.worker, self.control.generation, step, kind, report(error))
            self._link.send(fact)
        return True

    def abandon(self) -> None:
        """The script leaves in the middle of a body, by `SystemExit` or an interrupt."""
        self._faults.leave()
        self._begun = False
        self.control.fail()

    def rejoin(self) -> StepNo | None:
        """Wait for a membership and stand in it; the step that this worker adopted from its peers, if any."""
        recovery = self._recovery
        if recovery is None:
            raise GenerationHalted("this worker has not arrived yet")
        while True:
            form = self.control.await_form()
            try:
                outcome = recovery.join(form)
            except GenerationHalted:
                continue
            except Exception as error:  # noqa: BLE001  whatever it is, the coordinator must hear of it and decide
                if not self.control.is_over(form.generation):
                    fact = WorkerFaulted(
                        self._link.env.worker, form.generation, form.step, FaultKind.HYDRATION, report(error)
                    )
                    self._link.send(fact)
                continue
            return outcome.step if isinstance(outcome, Adopted) else None

    def checkpoint(self, state: ProtectedState) -> None:
        """At a step's boundary: begin to write a durable checkpoint if it is time for one."""
        if self._durable is not None and self.rank == 0:
            self._durable.tick(state, self.control.step)

    def finish(self) -> bool:
        """No step is left. Wait until no rank needs this one's state; False when a new membership must be formed."""
        if self._link.failed:
            return True
        self._link.board.enter(Phase.WAITING)
        if self.control.halted:
            return False
        self._link.send(WorkerFinished(self._link.env.worker, self.control.generation, self.control.step))
        if not self.control.await_release():
            return False
        if self._durable is not None and self._state is not None and self.rank == 0:
            self._durable.finish(self._state, self.control.step)
        return True

    # --- the log -----------------------------------------------------------------------------------------------

    def stage(self, number: StepNo, metrics: dict[str, float]) -> None:
        """Numbers of a step that has not committed."""
        self._link.send(WorkerStaged(self._link.env.worker, Generation(self.generation), number, metrics))

    def announce(
        self,
        number: StepNo,
        generation: Generation,
        at: Instant,
        seconds: Seconds,
        metrics: dict[str, float],
        *,
        adopted: bool,
    ) -> None:
        """A step was committed."""
        self._link.send(
            WorkerCommitted(self._link.env.worker, generation, number, at, seconds, metrics, adopted=adopted)
        )

    def _stop(self) -> None:
        """The generation is over: end all that the training thread may be blocked in. From the control thread."""
        self._groups.halt()
        self._interrupt.set()
        if self._recovery is not None:
            self._recovery.stop()


class Alone:
    """A script that nobody supervises: under plain `python`, or under another launcher."""

    rehearses = False
    holds_initial_state = True
    halted = False
    generation = 0

    def __init__(self, rank: int, local_rank: int, world: int) -> None:
        self.rank, self.local_rank, self.world = rank, local_rank, world
        self.step = StepNo(0)

    @classmethod
    def open(cls) -> "Alone":
        """A world of one; or torchrun's world, without recovery."""
        env = TorchrunEnv.read()
        if env is not None and env.world > 1:
            torch.distributed.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
            return cls(env.rank, env.local_rank, env.world)
        Groups().install(rank=0, world=1, formation=None, form_s=FORM_S)
        atexit.register(_leave_torch)
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

    def arrive(self, state: ProtectedState, buckets: str) -> None:
        """Nobody to report to."""

    def fetch(self, number: StepNo, get: Callable[[], Any]) -> Any:
        """The batch of a step, by `get`."""
        return get()

    def begin(self, number: StepNo) -> bool:
        """A body starts."""
        return True

    def before_update(self, last_collective: Callable[[], None]) -> None:
        """Nobody reads the state."""

    def commit(self) -> bool:
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

    def checkpoint(self, state: ProtectedState) -> None:
        """Durable checkpoints are `regrow run`'s."""

    def finish(self) -> bool:
        """Nobody to wait for."""
        return True

    def stage(self, number: StepNo, metrics: dict[str, float]) -> None:
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
    ) -> None:
        """Nobody to tell."""


def _leave_torch() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
