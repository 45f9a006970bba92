"""A loop's part in shadow proofs: as the rank that is recorded, and as the newcomer that shadows one of its steps."""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import nn

from regrow.comm.torch_private import grad_scalers
from regrow.comm.torch_private.internals import compiled_module
from regrow.core.errors import GenerationHalted, RegrowError
from regrow.core.ids import Rank, Seconds, StepNo
from regrow.core.messages.replacements import (
    ProveReplacement,
    ReplacementProven,
    ReplacementRefuted,
    ReplacementUnproven,
)
from regrow.devices.accelerators import is_accelerator
from regrow.hydration.proofs import CLOSELY, PLAIN
from regrow.train.loop_context import LoopContext
from regrow.train.proving.answers import GivenAnswers, KeptAnswers
from regrow.train.proving.hidden import hooks
from regrow.train.proving.naming import refutation
from regrow.train.proving.recorder import Recorder
from regrow.train.proving.surroundings import BodyListener, surroundings
from regrow.train.proving.trace import Computation, Difference, Trace, counts, differences
from regrow.train.script.callers import script_frames
from regrow.train.state.naming import unwrapped
from regrow.train.state.protected import ProtectedState
from regrow.train.state.rollback import copied_gradients, give_gradients
from regrow.train.step import Step, StepOwner
from regrow.train.worker.participation import ProofParty
from regrow.train.worker.replica_digests import digests

_WHOLE_BYTES = 1 << 30
"""If the state is larger, only some blocks of it are compared after the update."""
_SHORT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


class ShadowedLoop(StepOwner, Protocol):
    """The loop whose steps are recorded, or shadow those of another rank."""

    def substitute(self, step: Step | None) -> None:
        """Set the step that the script runs instead of this worker's own; None when that is over."""

    def skips_the_rest(self, step: Step, innermost: FrameType) -> None:
        """Go to the next iteration of the loop without the code after the step's body."""

    def cut_off(self, error: BaseException) -> None:
        """Prepare for the next body after an error has ended one."""


class _Ran(NamedTuple):
    """Result of one step that a newcomer ran as a rank's shadow."""

    step: StepNo
    rank: Trace
    newcomer: Trace
    found: list[Difference]
    seconds: Seconds


class Shadow:
    """Runs the proofs of one loop, and records steps for those of newcomers.

    Args:
        loop: the loop that runs the steps.
        context: context of the loop.
    """

    def __init__(self, loop: ShadowedLoop, context: LoopContext) -> None:
        self._loop, self._context = loop, context
        self._recorder: Recorder | None = None
        self._how = PLAIN
        self._spent: Seconds = 0.0
        self._error: BaseException | None = None
        self._listener: BodyListener | None = None
        self._proving = False
        self.can_skip = False
        """True if the code after a body can be skipped, by the text of the script's loop."""

    # --- both ----------------------------------------------------------------------------------------------------

    def enters(self) -> None:
        """Begin to record a body, which the script enters, if its step is recorded."""
        recorder, proofs = self._recorder, self._context.worker.proofs
        if recorder is None or proofs is None:
            return
        since = time.monotonic()
        state = self._context.protected()
        if self._how == CLOSELY:
            left_out = [*self._context.objects, *state.parameters(), state]
            hooked = dict(hooks(self._modules()))
            recorder.trace.around = hooked | surroundings(script_frames(sys._getframe(1)), left_out)
        recorder.watch(state.looker.parameters, self._modules() if self._how == CLOSELY else ())
        proofs.listen(recorder)
        self._spent += time.monotonic() - since
        if self._proving and self._how == CLOSELY:
            self._listener = BodyListener()
            self._listener.start(script_frames(sys._getframe(1)))

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for thing in self._context.objects:
            if isinstance(thing, nn.Module) and compiled_module(thing) is None:
                yield from ((name or "the model", each) for name, each in unwrapped(thing).named_modules())

    def logged(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """Record numbers that the body has logged."""
        if self._recorder is not None:
            self._recorder.logged(numbers)

    def read(self, batch: object, what: str) -> None:
        """Record a micro-batch that the body has read itself."""
        if self._recorder is not None:
            self._recorder.batch(batch, what)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of work that does not belong to the body and is not recorded."""
        recorder = self._recorder
        if recorder is not None:
            recorder.paused = True
        try:
            yield
        finally:
            if recorder is not None and recorder is self._recorder:
                recorder.paused = False

    def left(self, error: BaseException | None) -> None:
        """End the record of a body, which the script has left."""
        recorder, proofs = self._recorder, self._context.worker.proofs
        if recorder is None or proofs is None:
            return
        if self._listener is not None:
            self._listener.stop()
            recorder.trace.used, recorder.trace.called = self._listener.reads()
            self._listener = None
        proofs.listen(None)
        since = time.monotonic()
        if error is None:
            recorder.ended(self._changed)
        else:
            recorder.stop()
        self._spent += time.monotonic() - since

    def _changed(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Digests of the updated state, without buffers, which each rank or the end of the step changes too."""
        state = self._context.protected()
        buffers = frozenset(state.buffers_of_no(()))
        sample = self._recorder.trace.step if self._recorder and state.nbytes() > _WHOLE_BYTES else None
        return digests(state, buffers, sample=sample)

    # --- the rank -------------------------------------------------------------------------------------------------

    def begins(self, number: StepNo, batch: object) -> None:
        """Called before a step of this worker's own: record it for a newcomer if one wants it."""
        proofs = self._context.worker.proofs
        if proofs is None or not (how := proofs.wanted):
            return
        since = time.monotonic()
        proofs.offer(number)
        trace = Trace(number)
        self._recorder, self._how = Recorder(trace, KeptAnswers(trace)), how
        self._recorder.batch(batch)
        self._spent = time.monotonic() - since

    def ends(self, *, well: bool) -> None:
        """Publish the record of this worker's own step, or that it was given up, if it was not committed (`well`)."""
        recorder, proofs = self._recorder, self._context.worker.proofs
        if recorder is None or proofs is None or self._proving:
            return
        self._recorder = None
        recorder.stop()
        proofs.listen(None)
        since = time.monotonic()
        trace = recorder.trace
        trace.failed = recorder.failed
        trace.held = self._spent + proofs.held_up
        proofs.publish(msgspec.msgpack.encode(trace) if well else None)
        self._spent = 0.0
        trace.held += time.monotonic() - since

    # --- the newcomer ---------------------------------------------------------------------------------------------

    def prove(self) -> Iterator[Step]:
        """Run the proofs that are ordered while a newcomer waits, until it gets a rank."""
        proofs = self._context.worker.proofs
        while proofs is not None and (order := proofs.await_order()) is not None:
            why = self.cannot()
            if why:
                self._unproven(order, why, permanent=True)
                continue
            yield from self._proof(order)

    def cannot(self) -> str:
        """Reason for people why nothing can be compared here; empty if it can."""
        if self._context.regroups:
            return "the objects that it builds with session.on_regroup connect ranks, and a shadow is not a rank"
        if self._context.worker.reads_once:
            return "its batches come from an iterator, which cannot be asked for one again"
        if self._context.draws.used:
            return "its body draws from outside by step.external, which a shadow must not"
        if any(is_accelerator(each.device) for each in self._context.protected().parameters()):
            return "its kernels on an accelerator need not repeat themselves bit for bit"
        if not self.can_skip:
            return "the code after the body of its loop cannot be skipped in a shadow, as it is no plain `for` loop"
        return ""

    def _proof(self, order: ProveReplacement) -> Iterator[Step]:
        """Run a proof, and repeat it if something differs: only a difference found twice counts against newcomers."""
        first = yield from self._attempt(order, PLAIN)
        if first is None:
            return
        if not counts(first.found):
            self._proven(order, first)
            return
        if why := self.cannot():  # the body may have shown it
            self._unproven(order, why, permanent=True)
            return
        second = yield from self._attempt(order, CLOSELY)
        if second is None:
            return
        if not counts(second.found):
            self._unproven(order, f"{first.found[0].label} differed at step {first.step}, and nothing did once more")
            return
        if (why := _not_comparable(second)) or (why := _not_comparable(first)):
            self._unproven(order, why, permanent=True)
            return
        reason = refutation(second.rank, second.newcomer, second.found, rank_number=order.rank)
        self._refute(ReplacementRefuted, order, second.step, reason)

    def _attempt(self, order: ProveReplacement, how: str) -> Generator[Step, None, _Ran | None]:
        state, since = self._context.protected(), time.monotonic()
        variables = state.variables
        variables.requests_step()
        before, gradients = variables.take(), copied_gradients(state.parameters())
        try:
            ran = yield from self._run(order, how, state, since)
        except GenerationHalted:
            return None  # this worker is needed
        except RegrowError as error:
            self._unproven(order, str(error))
            return None
        except _SHORT_OF_MEMORY as error:
            self._unproven(order, f"there is no memory for it ({error})"[:200])
            return None
        finally:
            self._recorder, self._proving, self._error = None, False, None
            self._loop.substitute(None)
            variables.put_back(before)
            # A body that was cut off has left gradients, to which the next body would add, and its scaler in mid-step.
            give_gradients(state.parameters(), gradients)
            grad_scalers.begin_anew(self._context.objects)
        return ran

    def _run(
        self, order: ProveReplacement, how: str, state: ProtectedState, since: float
    ) -> Generator[Step, None, _Ran | None]:
        proofs, batches = self._context.worker.proofs, self._context.data()
        if proofs is None:
            return None
        step: Step | None = None
        with self._in_place(proofs, order):
            number = proofs.receive(state, order, how=how)
            theirs = msgspec.msgpack.decode(proofs.trace_of(order, number), type=Trace)
            begun = time.monotonic()
            trace = Trace(number)
            self._recorder = recorder = Recorder(trace, GivenAnswers(theirs), over=lambda: proofs.over)
            self._how, self._proving, self._error = how, True, None
            raised = ""
            try:
                batches.seek(number)
                batch = batches.batch(number)
                recorder.batch(batch)
                step = Step(self._loop, number, batch, rehearsal=True, proof=True)
            except _SHORT_OF_MEMORY:
                raise
            except Exception as error:  # noqa: BLE001  anything that a script's loader raises
                raised = f"its loader raises {type(error).__name__}: {error}"
            if step is not None:
                self._loop.substitute(step)
                yield step
                raised = self._raised()
        trace.failed = recorder.failed
        found = differences(theirs, trace)
        if raised:
            # Report the first difference before the error, or the error itself.
            found = [each for each in found if each.newcomer != "not there"][:1]
            found.append(Difference(Computation.RAISED, raised[:400], "", ""))
        return _Ran(number, theirs, trace, found, time.monotonic() - begun)

    @contextmanager
    def _in_place(self, proofs: ProofParty, order: ProveReplacement) -> Iterator[None]:
        """Context in which this worker has the rank of the order, with collectives that are answered locally."""
        try:
            with proofs.in_place(order), self._context.worker.echo():
                self._context.follow_place()
                yield
        finally:
            self._context.follow_place()

    def _raised(self) -> str:
        """Describe the error that ended the body. Raises `GenerationHalted` if this worker is needed."""
        error, proofs = self._error, self._context.worker.proofs
        if isinstance(error, GenerationHalted) or (proofs is not None and proofs.over):
            raise GenerationHalted("this worker is needed")
        if isinstance(error, _SHORT_OF_MEMORY):
            raise error
        return "" if error is None else f"its body raises {type(error).__name__}: {error}"

    def shadowed(self, step: Step, error: BaseException | None, innermost: FrameType) -> bool:
        """End a body that ran as another rank's shadow, and skip the code after it; True if its error is absorbed."""
        self.left(error)
        self._error = error
        if error is not None and not isinstance(error, Exception):
            return False
        if error is not None:
            self._loop.cut_off(error)
        self._loop.skips_the_rest(step, innermost)
        return error is not None

    # --- reports --------------------------------------------------------------------------------------------------

    def _proven(self, order: ProveReplacement, ran: _Ran) -> None:
        worker, proofs = self._context.worker, self._context.worker.proofs
        if ran.rank.failed or ran.newcomer.failed:
            self._unproven(order, f"what it computes cannot be looked at: {ran.rank.failed or ran.newcomer.failed}")
            return
        for each in ran.found[:1]:
            worker.note_of_script(
                f"{_describe(each, order.rank)} at the same step: "
                "a clock, or what each process has for itself; all that it computes is the same"
            )
        if proofs is not None:
            fact = ReplacementProven(
                worker.worker_id, order.generation, order.rank, ran.step, ran.rank.held, ran.seconds
            )
            proofs.report(fact)

    def _unproven(self, order: ProveReplacement, reason: str, *, permanent: bool = False) -> None:
        worker = self._context.worker
        if worker.proofs is not None:
            worker.proofs.report(ReplacementUnproven(worker.worker_id, order.generation, order.rank, reason, permanent))

    def _refute(self, kind: Callable[..., ReplacementRefuted], order: ProveReplacement, step: StepNo, why: str) -> None:
        worker = self._context.worker
        if worker.proofs is not None:
            worker.proofs.report(kind(worker.worker_id, order.generation, order.rank, step, why))


def _not_comparable(ran: _Ran) -> str:
    """Reason why a difference does not count against newcomers; empty if it counts."""
    if ran.rank.threads != ran.newcomer.threads:
        return (
            f"the rank computes with {ran.rank.threads} threads and a newcomer with {ran.newcomer.threads}: "
            "sums have another order"
        )
    return ""


def _describe(found: Difference, rank: Rank) -> str:
    """A difference in words, without long values."""
    if found.rank and found.newcomer:
        return f"{found.label} is {found.rank} on rank {rank} and {found.newcomer} in a newcomer"
    return f"{found.label} differs between rank {rank} and a newcomer"
