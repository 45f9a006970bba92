"""A worker's part in shadow proofs: a rank gives its state and its trace, a newcomer takes its place for a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from regrow.agent.workers.link import WorkerLink, placed
from regrow.comm.groups import Groups
from regrow.comm.observers import Tape
from regrow.core.config import publish_rank
from regrow.core.errors import GenerationHalted, RegrowError
from regrow.core.ids import NO_STATE, Rank, Seconds, StepNo
from regrow.core.messages.replacements import ProveReplacement, ReplacementFact, ReplacementProven
from regrow.core.messages.vocabulary import Role
from regrow.hydration.client import Hydration
from regrow.hydration.trace_client import TraceRequest
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.body import Body
from regrow.train.worker.control import Control

COME_S: Seconds = 120.0
"""Longest time of a rank until its next step, and longest time of that step."""


class ShadowProofs:
    """The worker's side of a proof.

    Args:
        link: to the agent.
        control: knows the orders.
        groups: of this worker.
        body: of the present step.
    """

    def __init__(self, link: WorkerLink, control: Control, groups: Groups, body: Body) -> None:
        self._link, self._control, self._groups, self._body = link, control, groups, body
        self._asking: Hydration | TraceRequest | None = None
        self._counted: Seconds = 0.0
        """Part of this process's computing time that was reported."""
        control.on_wanted = self._stop

    # --- the rank -----------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> str:
        """Detail in which a newcomer wants this worker's next step; empty: no newcomer does."""
        recovery = self._body.recovery
        if recovery is None or recovery.server.offering or self._control.halted:
            return ""
        return recovery.server.proof_wanted

    def offer(self, step: StepNo) -> None:
        """The state stands before `step`, and is read until its update."""
        recovery = self._body.recovery
        if recovery is not None:
            recovery.held_up = 0.0
            try:
                recovery.frozen.freeze(step, whole_body=self._body.whole_body)
            except RegrowError:  # of a state that cannot be told, of which people hear elsewhere
                recovery.server.publish(None)
                return
            recovery.server.offer_proof(self._control.generation, step, recovery.accelerator.point())

    @property
    def held_up(self) -> Seconds:
        """Time that the update has waited for readers since the offer."""
        return self._body.recovery.held_up if self._body.recovery is not None else 0.0

    def publish(self, trace: bytes | None) -> None:
        """Publish the trace of the offered step; None: it was given up."""
        if self._body.recovery is not None:
            self._body.recovery.server.publish(trace)

    def listen(self, tape: Tape | None) -> None:
        """Let this hear of all collectives from now on."""
        self._groups.tape = tape

    # --- the newcomer -------------------------------------------------------------------------------------------

    def await_order(self) -> ProveReplacement | None:
        """Wait for something to prove; None: this worker has a place, or is released."""
        if self._link.env.role is Role.RANK or self._body.recovery is None:
            return None
        return self._control.await_proof()

    @property
    def over(self) -> bool:
        """True if the present proof must be given up because this worker is needed."""
        return self._control.waited_for

    @contextmanager
    def in_place(self, order: ProveReplacement) -> Iterator[None]:
        """Within this, this worker is that rank, as far as its script can see."""
        env = self._link.env
        self._control.proving = True
        self._take_rank(order.rank, order.local_rank, order.world or env.world)
        try:
            yield
        finally:
            self.listen(None)
            self._take_rank(Rank(env.rank), env.local_rank, env.world)
            self._control.proving = False
            self._body.interrupt.clear()

    def _take_rank(self, rank: Rank, local_rank: int, world: int) -> None:
        env = self._link.env
        if (env.rank, env.local_rank, env.world) != (rank, local_rank, world):
            self._link.take_place(placed(env, rank=rank, local_rank=local_rank, world=world))
            publish_rank(rank, local_rank, world)
            self._groups.take_rank(rank, world)

    def receive(self, state: ProtectedState, order: ProveReplacement, *, how: str) -> StepNo:
        """Get the rank's state before its next step, whose number is returned. Raises what `Hydration.run` does."""
        asking = Hydration(
            state,
            step=NO_STATE,
            generation=order.generation,
            token=self._link.env.token,
            endpoints=[order.endpoint],
            deadline=time.monotonic() + COME_S,
            proof=how,
        )
        self._ask(asking)
        state.variables.withheld = frozenset(order.own)
        try:
            prompt = self._link.prompt  # the rank waits for this, whatever else the machine does
            prompt.run(asking.run) if prompt is not None else asking.run()
        finally:
            self._asking = None
            state.variables.withheld = frozenset()
        return asking.step

    def trace_of(self, order: ProveReplacement, step: StepNo) -> bytes:
        """Trace of the rank's computation in the step. Raises `HydrationError`, `GenerationHalted`."""
        asking = TraceRequest(order.endpoint, self._link.env.token, order.generation, step)
        self._ask(asking)
        try:
            return asking.run(time.monotonic() + COME_S)
        finally:
            self._asking = None

    def _ask(self, asking: Hydration | TraceRequest) -> None:
        self._asking = asking
        if self.over:
            raise GenerationHalted("this worker is needed")

    def report(self, fact: ReplacementFact) -> None:
        """Say what came of it. One that was made for this counts all that it has computed, its building included."""
        if isinstance(fact, ReplacementProven) and self._link.env.role is Role.PROVER:
            spent = time.process_time()
            fact, self._counted = msgspec.structs.replace(fact, seconds=spent - self._counted), spent
        self._link.send(fact)

    def _stop(self) -> None:
        """This worker is needed. From the control thread."""
        if not self._control.proving:
            return
        self._body.interrupt.set()
        asking = self._asking
        if asking is not None:
            asking.cancel()
