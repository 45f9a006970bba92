"""A worker's reports of its steps: which are committed, how long it waited for them, and the numbers logged."""

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, TypeGuard

import msgspec
import torch

from regrow.core.ids import Generation, Instant, Rank, Seconds
from regrow.core.messages import facts
from regrow.core.messages.data import BatchRecord
from regrow.devices.accelerators import on_accelerator
from regrow.devices.stream_points import LateNumber, StreamPoint, late
from regrow.train.batches import Batches
from regrow.train.preparation import Preparation
from regrow.train.step import Step
from regrow.train.worker.accelerator import Accelerator, Processor
from regrow.train.worker.participation import Participation

_log = logging.getLogger("regrow.steps")
if _log.level == logging.NOTSET:
    # Every rank logs a line for every step, which a script that configures logging did not ask to see.
    _log.setLevel(logging.WARNING)


class _Unsent(NamedTuple):
    """A commit not yet reported to the agent, since a `log` after the body may still add numbers."""

    step: Step
    at: Instant
    seconds: Seconds
    generation: Generation
    adopted: bool
    read: BatchRecord | None
    parts: list[BatchRecord]
    inside: frozenset[str]
    """Names of the numbers that the step's body has logged."""
    data_wait: Seconds
    stall: Seconds
    own: Seconds


class _PendingCommit(NamedTuple):
    """A commit whose numbers and errors are still on the device: reported when the device has passed `point`."""

    fact: facts.WorkerCommitted
    numbers: Mapping[str, float | LateNumber]
    point: StreamPoint


_AHEAD = 1
"""Commits that may wait for the device at a step's boundary. One keeps the device busy, as the next step is enqueued
meanwhile; more would gain nothing."""


class Announcing:
    """Reports a session's steps to the agent.

    The host runs ahead of an accelerator. A commit is reported once the device has finished the step: at the next gate
    or boundary, and at the latest before this worker joins another generation. See decision 0082.

    Args:
        worker: sends the reports.
    """

    def __init__(self, worker: Participation) -> None:
        self._worker = worker
        self.accelerator: Accelerator = Processor()
        """Device that computes the steps."""
        self._unsent: _Unsent | None = None
        self._late: dict[str, LateNumber] = {}
        """Numbers on the device that the newest step has logged."""
        self._pending: deque[_PendingCommit] = deque()
        self._last: dict[str, float] | None = None
        """Numbers of the last reported step; None before the first report."""

    def logged(self, step: Step, batches: Batches | None) -> None:
        """Note logged numbers; those of a step that is being computed are kept even if this worker dies in it."""
        self._worker.body.logged(step.staged)
        for name, value in step.staged.items():
            if _on_device(value) and late(value) and not self._has(name, value):
                self._late[name] = LateNumber(value)
        if not step.committed and not any(_on_device(value) for value in step.staged.values()):
            # Reading a tensor of a device would stall the device in mid-step, so such numbers wait for the gate.
            self._stage(step, step.numbers(), batches)

    def ready(self, step: Step | None, batches: Batches | None) -> None:
        """Report the numbers of a step that has all its gradients, as others may now commit it without this worker.

        Numbers on a device are sent only if it has computed all of them by now.
        """
        self.report_finished()
        if step is None or step.committed or self._worker.world == 1:
            return
        ours = [value for value in step.staged.values() if _on_device(value)]
        if not ours or not all(map(late, ours)):
            return
        numbers = self._taken(step)
        if all(not isinstance(number, LateNumber) or number.known() for number in numbers.values()):
            self._stage(step, _values(numbers), batches)

    def _stage(self, step: Step, numbers: dict[str, float], batches: Batches | None) -> None:
        worker, parts = self._worker, batches.parts(step.at) if batches else []
        generation = Generation(worker.generation)
        worker.send(facts.WorkerStaged(worker.worker_id, generation, step.at, numbers, list(parts)))

    def _has(self, name: str, value: torch.Tensor) -> bool:
        return name in self._late and self._late[name].is_of(value)

    def _taken(self, step: Step) -> dict[str, float | LateNumber]:
        """The numbers of a step as they are now; numbers on a device are read later, without a wait for the device."""
        taken: dict[str, float | LateNumber] = {}
        for name, value in step.staged.items():
            if not _on_device(value) or not late(value):
                taken[name] = float(value)
                continue
            if not self._has(name, value):
                self._late[name] = LateNumber(value)
            taken[name] = self._late[name]
        return taken

    def committed(self, step: Step, prepared: Preparation, batches: Batches | None, *, adopted: bool) -> None:
        """Note a committed step, which the next `send` reports.

        Args:
            step: may still get more numbers.
            prepared: has the times of the step.
            batches: have records of the step's reads.
            adopted: other ranks committed the step, with this rank's gradients.
        """
        now, generation = time.monotonic(), Generation(self._worker.generation)
        read, parts = (batches.record(step.at), batches.parts(step.at)) if batches else (None, [])
        inside = frozenset(step.staged)
        computed = self._worker.body.own_time
        waits = (prepared.data_wait, prepared.stall, prepared.data_wait + computed if computed else 0.0)
        self._unsent = _Unsent(step, now, now - prepared.begun_at, generation, adopted, read, parts, inside, *waits)

    def send(self) -> None:
        """Report the newest commit, and earlier ones, as soon as the device has finished them."""
        unsent, self._unsent = self._unsent, None
        if unsent is None:
            self.report_finished()
            return
        if unsent.adopted:
            self.flush()  # `_own` compares this step's numbers with those of the step before
        taken = self._taken(unsent.step)
        self._late.clear()
        if unsent.adopted:
            taken = dict(self._own(unsent, _values(taken)))
        self.announce(self._fact(unsent), taken)

    def announce(self, fact: facts.WorkerCommitted, numbers: Mapping[str, float | LateNumber] | None = None) -> None:
        """Report a commit once the device has finished the step; `numbers`: its metrics."""
        self._pending.append(_PendingCommit(fact, numbers or {}, self.accelerator.point()))
        if self._worker.body.in_flight:  # a collective cut off by an abort would look finished
            self.accelerator.wait()
            self.flush()
            return
        self.report_finished()
        if self._pending:
            newest = self._pending[-1]
            known = {n: v for n, v in newest.numbers.items() if not isinstance(v, LateNumber) or v.known()}
            said = (fact.worker, fact.generation, fact.step, _values(known), fact.parts, fact.data)
            self._worker.send(facts.WorkerStaged(*said, untold=True))

    def report_finished(self) -> None:
        """Report the commits that the device has finished. Raises the device's error if it has failed."""
        while self._pending and (len(self._pending) > _AHEAD or self._pending[0].point.passed()):
            self._announce_oldest()

    def flush(self) -> None:
        """Wait for the device and report all commits, before this worker joins a generation or ends.

        Raises the device's error if it has failed.
        """
        while self._pending:
            self._announce_oldest()

    def flushed(self, error: Exception) -> Exception:
        """Flush after `error`. Returns the error to handle: the device's own if the device has failed, else `error`."""
        try:
            self.flush()
        except RuntimeError as failed:
            return failed
        return error

    def _announce_oldest(self) -> None:
        self._pending[0].point.wait()
        fact, numbers, _ = self._pending[0]
        self._last = _values(numbers)
        self._pending.popleft()
        self._worker.send(msgspec.structs.replace(fact, metrics=self._last))
        _log.info("step %d: %s", fact.step, self._last)

    def _fact(self, unsent: _Unsent) -> facts.WorkerCommitted:
        return facts.WorkerCommitted(
            self._worker.worker_id,
            unsent.generation,
            unsent.step.at,
            unsent.at,
            unsent.seconds,
            adopted=unsent.adopted,
            data=unsent.read,
            parts=list(unsent.parts),
            rank=Rank(unsent.step.rank),
            data_wait=unsent.data_wait,
            stall=unsent.stall,
            own=unsent.own,
        )

    def _own(self, unsent: _Unsent, numbers: dict[str, float]) -> dict[str, float]:
        """The numbers of an adopted step, without those left over from the step before.

        The body was cut off, perhaps before it assigned a variable that is logged after the body: that variable still
        has its value of the last step, or of the rehearsal. A missing number is better than a wrong one.
        """
        last = self._last
        fresh = {name for name, n in numbers.items() if last is not None and n != last.get(name)}
        return {name: n for name, n in numbers.items() if name in unsent.inside or name in fresh}


def _on_device(value: torch.Tensor | float) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and on_accelerator(value)


def _values(numbers: Mapping[str, float | LateNumber]) -> dict[str, float]:
    return {name: n.value() if isinstance(n, LateNumber) else n for name, n in numbers.items()}
