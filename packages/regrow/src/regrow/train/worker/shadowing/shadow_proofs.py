"""A worker's part in shadow proofs: a rank sends its state and its trace, a newcomer takes its place for a step."""

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
"""Longest wait for a rank's next step, and for the end of that step."""


class ShadowProofs:
    """The worker's side of a proof.

    Args:
        link: the channel to the agent.
        control: receives the orders.
        groups: this worker's groups.
        body: the body of the present step.
    """

    def __init__(self, link: WorkerLink, control: Control, groups: Groups, body: Body) -> None:
        self._link, self._control, self._groups, self._body = link, control, groups, body
        self._asking: Hydration | TraceRequest | None = None
        self._counted: Seconds = 0.0
        """Processor time of this process that was reported already."""
        control.on_wanted = self._stop

    # --- the rank -----------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> str:
        """Level of detail of the trace that a newcomer wants of this worker's next step; empty if none is wanted."""
        recovery = self._body.recovery
        if recovery is None or recovery.server.offering or self._control.halted:
            return ""
        return recovery.server.proof_wanted

    def offer(self, step: StepNo) -> None:
        """Offer the state before `step`, to be read until the step's update."""
        recovery = self._body.recovery
        if recovery is not None:
            recovery.held_up = 0.0
            try:
                recovery.frozen.freeze(step, whole_body=self._body.whole_body)
            except RegrowError:  # the state cannot be sent, which is reported elsewhere
                recovery.server.publish(None)
                return
            recovery.server.offer_proof(self._control.generation, step, recovery.accelerator.point())

    @property
    def held_up(self) -> Seconds:
        """Time that the update waited for readers since the offer."""
        return self._body.recovery.held_up if self._body.recovery is not None else 0.0

    def publish(self, trace: bytes | None) -> None:
        """Publish the trace of the offered step; None if it was given up."""
        if self._body.recovery is not None:
            self._body.recovery.server.publish(trace)

    def listen(self, tape: Tape | None) -> None:
        """Send all collectives to this tape from now on."""
        self._groups.tape = tape

    # --- the newcomer -------------------------------------------------------------------------------------------

    def await_order(self) -> ProveReplacement | None:
        """Wait for an order to prove a replacement; None if this worker has a rank, or is released."""
        if self._link.env.role is Role.RANK or self._body.recovery is None:
            return None
        return self._control.await_proof()

    @property
    def over(self) -> bool:
        """True if the present proof must be given up because this worker is needed."""
        return self._control.waited_for

    @contextmanager
    def in_place(self, order: ProveReplacement) -> Iterator[None]:
        """Context in which this worker appears to its script as the rank to be proven."""
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
        """Receive the rank's state before its next step; returns that step's number. Raises as `Hydration.run`."""
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
            prompt = self._link.prompt  # so that the rank waits for the reception, even if the machine is busy
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
        """Report the result of a proof. A worker made for proofs adds its processor time, its start included."""
        if isinstance(fact, ReplacementProven) and self._link.env.role is Role.PROVER:
            spent = time.process_time()
            fact, self._counted = msgspec.structs.replace(fact, seconds=spent - self._counted), spent
        self._link.send(fact)

    def _stop(self) -> None:
        """Cut off the proof, as this worker is needed. Called by the control thread."""
        if not self._control.proving:
            return
        self._body.interrupt.set()
        asking = self._asking
        if asking is not None:
            asking.cancel()
