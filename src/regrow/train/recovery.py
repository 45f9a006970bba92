"""What a worker does to stand in a new generation: groups, state, the step to go on with."""

import threading
import time
from dataclasses import dataclass

from regrow.agent.link import WorkerLink, placed
from regrow.comm.groups import Formation, Groups
from regrow.comm.mesh import Site
from regrow.core.board import Phase
from regrow.core.config import WorkerEnv, publish_rank
from regrow.core.errors import GenerationHalted
from regrow.core.ids import Generation, Instant, Rank, Seconds, StepNo
from regrow.core.messages import FaultStage, FormGeneration, WorkerResumed
from regrow.hydration.client import Hydration
from regrow.hydration.inventory import StateSink
from regrow.hydration.server import HydrationServer
from regrow.step.machine import Adopted, Resumed
from regrow.train.control import Control
from regrow.train.faults import FaultInjector
from regrow.train.frozen import FrozenState
from regrow.train.protect import ProtectedState
from regrow.train.staged import StagedState

HYDRATE_S: Seconds = 600.0


def site_of(env: WorkerEnv) -> Site:
    """Where a worker may listen for its peers."""
    return Site(env.socket_dir if env.nodes == 1 else None, env.advertise, env.token)


@dataclass
class Recovery:
    """Carries a worker from one generation into the next.

    Args:
        form_s: deadline for re-forming the groups, in seconds.
    """

    link: WorkerLink
    control: Control
    groups: Groups
    state: ProtectedState
    frozen: FrozenState
    server: HydrationServer
    faults: FaultInjector
    form_s: Seconds

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._receiving: Hydration | None = None

    def stop(self) -> None:
        """End a reception of state that is under way; from any thread."""
        with self._lock:
            receiving = self._receiving
        if receiving is not None:
            receiving.cancel()

    def join(self, form: FormGeneration) -> Resumed | Adopted:
        """Stand in this membership.

        Raises `GenerationHalted` when it is given up meanwhile; `RegrowError`, `RuntimeError` or `OSError` when this
        worker cannot reach its peers or their state.
        """
        self.link.board.enter(Phase.RECOVERING, step=form.step, generation=form.generation)
        self._take_place(form)
        self.faults.replace(form.faults)
        holder = form.rank in form.holders
        if holder:
            self._offer(form)
        self.faults.strike(FaultStage.FORM, form.step)
        form_s = self._form_groups(form)
        self.faults.strike(FaultStage.HYDRATE, form.step)
        hydrate_s, received = (0.0, 0) if holder else self._hydrate(form)
        outcome = self.control.resume(form.generation, form.step)
        if outcome is None:
            raise GenerationHalted(f"generation {form.generation} was given up before it began")
        self.link.send(
            WorkerResumed(
                self.link.env.worker,
                form.generation,
                form_s=form_s,
                hydrate_s=hydrate_s,
                hydrated_bytes=received,
            )
        )
        return outcome

    def _offer(self, form: FormGeneration) -> None:
        if len(form.holders) == len(form.members):
            return
        # At once: nothing that this worker does before its next update changes what the newcomers read.
        self.frozen.freeze(form.step)
        self.server.offer(form.generation, form.step)

    def withdraw(self, deadline: Instant) -> None:
        """The update is about to begin: nobody may read this worker's state any more."""
        if self.server.offering:
            self.server.withdraw(deadline)
            self.frozen.thaw()

    def _take_place(self, form: FormGeneration) -> None:
        env = self.link.env
        if (env.rank, env.local_rank) != (form.rank, form.local_rank):
            self.link.take_place(placed(env, rank=form.rank, local_rank=form.local_rank))
            publish_rank(form.rank, form.local_rank)

    def _form_groups(self, form: FormGeneration) -> Seconds:
        if self.groups.serves(form.generation):
            return 0.0
        env = self.link.env
        formation = Formation(form.generation, form.rank, len(form.members), form.store, site_of(env))
        return self.groups.form(formation, lambda: self.control.is_over(form.generation))

    def _hydrate(self, form: FormGeneration) -> tuple[Seconds, int]:
        holders = {Rank(rank) for rank in form.holders}
        endpoints = [member.endpoint for member in form.members if member.rank in holders]
        sink: StateSink = self.state
        if self.control.holds_state:
            sink = StagedState(
                self.state,
                replace=lambda: self.control.replace(form.generation),
                replaced=self.control.replaced,
            )
        reception = Hydration(
            sink,
            step=StepNo(form.step),
            generation=Generation(form.generation),
            token=self.link.env.token,
            endpoints=endpoints,
            deadline=time.monotonic() + HYDRATE_S,
        )
        with self._lock:
            self._receiving = reception
        if self.control.is_over(form.generation):
            reception.cancel()
        try:
            report = reception.run()
        finally:
            with self._lock:
                self._receiving = None
        return report.seconds, report.bytes
