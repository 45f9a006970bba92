"""Brings a worker into a new generation: its groups, its state, and the step to continue with."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from regrow.agent.workers.link import WorkerLink, placed
from regrow.comm.groups import Formation, Groups
from regrow.comm.links import Site
from regrow.core.config import WorkerEnv, publish_rank
from regrow.core.errors import GenerationHalted, StateError
from regrow.core.ids import Generation, Instant, Rank, Seconds, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.copies import CopySource
from regrow.core.messages.vocabulary import FaultStage
from regrow.core.phase import Phase
from regrow.hydration.client import Hydration, HydrationReport
from regrow.hydration.copies.restore import Restoration
from regrow.hydration.inventory import StateSink
from regrow.hydration.server import HydrationServer
from regrow.step.machine import Adopted, Resumed
from regrow.train import own_values
from regrow.train.state.buddy_copies import BuddyCopies
from regrow.train.state.frozen import FrozenState
from regrow.train.state.protected import ProtectedState
from regrow.train.state.staged import StagedState
from regrow.train.worker.accelerator import Accelerator
from regrow.train.worker.comparison import Comparison
from regrow.train.worker.control import Control
from regrow.train.worker.fault_injection import FaultInjector
from regrow.train.worker.replica_digests import Sampler

HYDRATE_S: Seconds = 600.0
PROOF_S: Seconds = 10.0
"""Longest wait of an update for a newcomer that reads the state only for a shadow proof."""


def site_of(env: WorkerEnv) -> Site:
    """Addresses at which a worker may listen for its peers."""
    return Site(env.socket_dir if env.one_machine else None, env.advertise, env.token)


@dataclass
class Recovery:
    """Brings a worker from one generation into the next.

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
    copies: BuddyCopies
    accelerator: Accelerator
    form_s: Seconds
    comparison: Comparison | None = None
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._receiving: Hydration | Restoration | None = None
        self.restart_index = 0
        """Number of the restartable function that all ranks run again before they go on; 0: none."""
        self.held_up: Seconds = 0.0
        """Time that the newest update has waited for readers of this worker's state."""
        self.sharded = False
        """True if ranks of this generation hold different parts of the state."""
        self._joined_before = not self.link.env.begins

    def first_look(self) -> dict[str, int]:
        """Digests of the state that this worker built, for the coordinator to compare; empty if it has no replica."""
        if self.sampler is None or self.link.env.world == 1:
            return {}
        found = self.sampler.look()
        return {} if found is None else found[0] | found[1]

    def stop(self) -> None:
        """End a reception of state that is under way. May be called from any thread."""
        with self._lock:
            receiving = self._receiving
        if receiving is not None:
            receiving.cancel()

    def join(self, form: orders.FormGeneration) -> Resumed | Adopted:
        """Join this membership.

        Raises `GenerationHalted` if the membership is given up meanwhile; `RegrowError`, `RuntimeError` or `OSError`
        if this worker cannot reach its peers or their state.
        """
        self.link.board.enter(Phase.RECOVERING, step=form.step, generation=form.generation)
        self._take_place(form)
        self.faults.replace(form.faults)
        self.restart_index, self.control.over = form.restart_index, self.control.over or form.over
        self.sharded = len({member.holding for member in form.members}) > 1
        holder = form.rank in form.holders
        if self.comparison is not None:
            self.comparison.join(form)
            if holder and form.rewind:
                self.comparison.go_back(form)
        if self.sampler is not None:
            self.sampler.join(form, again=self._joined_before)
        self._joined_before = True
        if holder and self.control.torn:
            raise StateError(f"rank {form.rank} should have state@{form.step}, but its own was torn")
        if holder:
            self._offer(form)
        self.faults.inject(FaultStage.FORM, form.step)
        variables = self.state.variables
        variables.mine = own_values.read(form.own)
        form_s, report = self._enter_groups(form) if holder else self._receive(form)
        if self.comparison is not None and not holder:
            self.comparison.received()
        self.copies.rewind(form.step)
        outcome = self.control.resume(form.generation, form.step, sharded=self.sharded, restarts=form.restart_index > 0)
        if outcome is None:
            raise GenerationHalted(f"generation {form.generation} was given up before it began")
        self.link.send(
            facts.WorkerResumed(
                self.link.env.worker,
                form.generation,
                form_s=form_s,
                hydrate_s=report.seconds,
                hydrated_bytes=report.bytes,
                ways=report.ways,
                at=time.monotonic(),
                unlike=None if report.unlike is None else variables.carried(report.unlike) + variables.anew,
                kept=variables.kept if form.own is not None and form.own.sure else [],
            )
        )
        return outcome

    def _offer(self, form: orders.FormGeneration) -> None:
        if len(form.holders) == len(form.members):
            return
        # At once, since nothing that this worker does before its next update changes the state that newcomers read.
        # Newcomers that join at functions between two steps run all of those, so they need the state of the commit.
        between = self.state.between
        with between.as_committed(form.step, over=form.over) if form.restart_index else contextlib.nullcontext():
            self.frozen.freeze(form.step, whole_body=form.whole_body)
        self.server.offer(form.generation, form.step, self.accelerator.point())

    def withdraw(self, deadline: Instant) -> None:
        """Before an update, wait until the state's readers are served, or until `deadline`; then stop offering it."""
        if self.server.offering:
            since = time.monotonic()
            self.server.withdraw(min(deadline, since + PROOF_S) if self.server.for_proofs else deadline)
            self.frozen.thaw()
            self.held_up = time.monotonic() - since

    def _take_place(self, form: orders.FormGeneration) -> None:
        env, world = self.link.env, len(form.members)
        if (env.rank, env.local_rank, env.world) != (form.rank, form.local_rank, world):
            self.link.take_place(placed(env, rank=form.rank, local_rank=form.local_rank, world=world))
            publish_rank(form.rank, form.local_rank, world)
            self.link.early.take_rank(form.rank)

    def _form_groups(self, form: orders.FormGeneration) -> Seconds:
        if self.groups.serves(form.generation):
            return 0.0
        env = self.link.env
        formation = Formation(form.generation, form.rank, len(form.members), env.store, site_of(env))
        return self.groups.form(formation, lambda: self.control.is_over(form.generation))

    def _enter_groups(self, form: orders.FormGeneration) -> tuple[Seconds, HydrationReport]:
        form_s = self._form_groups(form)
        self.faults.inject(FaultStage.HYDRATE, form.step)
        return form_s, HydrationReport(0, 0.0, 0)

    def _receive(self, form: orders.FormGeneration) -> tuple[Seconds, HydrationReport]:
        """Form the groups and receive state.

        A newcomer does both at the same time, since holders send state without groups. A worker that has state, or
        goes back to a copy, forms its groups first: that ends calls of an older generation, so its device is idle.
        """
        if form.restore is not None or self.control.holds_state:
            form_s, _ = self._enter_groups(form)
            return form_s, self._hydrate(form) if form.restore is None else self._restore(form, form.restore)
        took: list[Seconds] = []
        report = self._hydrate(form, beside=lambda: took.append(self._enter_groups(form)[0]))
        return took[0], report

    def _restore(self, form: orders.FormGeneration, source: CopySource) -> HydrationReport:
        """Replace the state by a copy in an agent's memory."""
        has_state = self.control.holds_state
        if has_state:
            self.control.replace(form.generation)
        deadline = time.monotonic() + HYDRATE_S
        try:
            report = self._run(form, Restoration(self.state, source, token=self.link.env.token, deadline=deadline))
        except BaseException:
            if has_state:
                self.control.fail()  # the state is torn from here on; the copy remains for the next attempt
            raise
        if has_state:
            self.control.replaced(form.step)
        return report if source.rank == form.rank else msgspec.structs.replace(report, unlike=[])

    def _hydrate(self, form: orders.FormGeneration, beside: Callable[[], None] | None = None) -> HydrationReport:
        holders = {Rank(rank) for rank in form.holders}
        mine = next(member.holding for member in form.members if member.rank == form.rank)
        endpoints = [m.endpoint for m in form.members if m.rank in holders and m.holding == mine]
        sink: StateSink = self.state
        if self.control.holds_state:
            sink = StagedState(
                self.state, replace=lambda: self.control.replace(form.generation), replaced=self.control.replaced
            )
        reception = Hydration(
            sink,
            step=StepNo(form.step),
            generation=Generation(form.generation),
            token=self.link.env.token,
            endpoints=endpoints,
            deadline=time.monotonic() + HYDRATE_S,
            hydration=self.link.env.spec.hydration,
            beside=beside,
        )
        return self._run(form, reception)

    def _run(self, form: orders.FormGeneration, reception: Hydration | Restoration) -> HydrationReport:
        with self._lock:
            self._receiving = reception
        if self.control.is_over(form.generation):
            reception.cancel()
        # Other threads write the received bytes, so no work that the script has enqueued may still be under way.
        self.accelerator.wait()
        try:
            return reception.run()
        finally:
            with self._lock:
                self._receiving = None
