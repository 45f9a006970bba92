"""What a worker tells of its steps: those that it has committed, how long it waited for them, and their numbers."""

import logging
import time
from functools import partial
from typing import Any, NamedTuple

import torch

from regrow.core.ids import Generation, Instant, Rank, Seconds, StepNo
from regrow.core.messages import facts
from regrow.core.messages.data import BatchRecord
from regrow.devices.accelerators import on_accelerator
from regrow.train.batches import Batches
from regrow.train.step import Step
from regrow.train.worker.participation import Participation

_log = logging.getLogger("regrow.steps")
if _log.level == logging.NOTSET:
    # Every rank has a line for every step: where a script configures logging, these are not what it asked to see.
    _log.setLevel(logging.WARNING)


class _Unsent(NamedTuple):
    """A commit that the agent has not been told: a log after the body may still add to it."""

    step: Step
    at: Instant
    seconds: Seconds
    generation: Generation
    adopted: bool
    read: BatchRecord | None
    parts: list[BatchRecord]
    inside: frozenset[str]
    """The numbers that its body has logged."""
    data_wait: Seconds
    stall: Seconds
    own: Seconds


class Announcing:
    """Says what becomes of a session's steps.

    Args:
        member: whom it is said to.
    """

    def __init__(self, member: Participation) -> None:
        self._member = member
        self._unsent: _Unsent | None = None
        self._last: dict[str, float] | None = None
        """The numbers of the last step; None: this worker has told of none."""
        self._data_wait = self._stall = 0.0

    def checkpoint(self) -> None:
        """At a step's boundary: take the copies of the state that are due; training stands still for so long."""
        since = time.monotonic()
        self._member.waiting.checkpoint()
        self._stall = time.monotonic() - since

    def fetch(self, batches: Batches, number: StepNo) -> Any:
        """The batch of a step, and how long that took. Raises what the loader raises."""
        since = time.monotonic()
        self._member.fetches(number)
        batch = batches.batch(number)
        self._data_wait = time.monotonic() - since
        self._member.body.reads = partial(batches.told, number)
        return batch

    def logged(self, step: Step, batches: Batches | None) -> None:
        """Numbers of a step were logged; those of one that is being computed count even if this worker dies in it."""
        self._member.body.logged(step.staged)
        if not step.committed and not any(
            isinstance(value, torch.Tensor) and on_accelerator(value) for value in step.staged.values()
        ):
            # Reading a tensor of a device would stall the device in mid-step: those wait for the commit.
            member, parts = self._member, batches.parts(step.number) if batches else []
            generation = Generation(member.generation)
            member.send(facts.WorkerStaged(member.worker, generation, step.number, step.numbers(), list(parts)))

    def committed(self, step: Step, begun_at: Instant, batches: Batches | None, *, adopted: bool) -> None:
        """The step has happened. Said at the next `send`.

        Args:
            step: whose numbers may still grow.
            begun_at: when its body started.
            batches: know what was read for it.
            adopted: it happened on other ranks, with what this one had computed.
        """
        now, generation = time.monotonic(), Generation(self._member.generation)
        read, parts = (batches.record(step.number), batches.parts(step.number)) if batches else (None, [])
        inside = frozenset(step.staged)
        computed = self._member.body.own_time
        waits = (self._data_wait, self._stall, self._data_wait + computed if computed else 0.0)
        self._unsent = _Unsent(step, now, now - begun_at, generation, adopted, read, parts, inside, *waits)

    def send(self) -> None:
        """Say what has not been said."""
        if self._unsent is None:
            return
        unsent, self._unsent = self._unsent, None
        number, numbers = unsent.step.number, self._own(unsent)
        self._last = numbers
        self._member.send(
            facts.WorkerCommitted(
                self._member.worker,
                unsent.generation,
                number,
                unsent.at,
                unsent.seconds,
                numbers,
                adopted=unsent.adopted,
                data=unsent.read,
                parts=list(unsent.parts),
                rank=Rank(unsent.step.rank),
                data_wait=unsent.data_wait,
                stall=unsent.stall,
                own=unsent.own,
            )
        )
        _log.info("step %d: %s", number, numbers)

    def _own(self, unsent: _Unsent) -> dict[str, float]:
        """The numbers of this step, and none of the one before.

        The body of an adopted step was cut off, perhaps before it had assigned what is logged behind it: then that is
        what the last step has left, or, in a worker's first step, its rehearsal. A number missing is better than a
        wrong one.
        """
        numbers = unsent.step.numbers()
        if not unsent.adopted:
            return numbers
        last = self._last
        fresh = {name for name, n in numbers.items() if last is not None and n != last.get(name)}
        return {name: n for name, n in numbers.items() if name in unsent.inside or name in fresh}
