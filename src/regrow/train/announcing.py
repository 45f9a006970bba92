"""What a worker tells of its steps: those that it has committed, and numbers of the one that it is in."""

import logging
import time
from typing import NamedTuple

import torch

from regrow.core.data_messages import BatchRecord
from regrow.core.ids import Generation, Instant, Seconds
from regrow.train.alone import Alone
from regrow.train.member import Member
from regrow.train.step import Step

_log = logging.getLogger("regrow")


class _Unsent(NamedTuple):
    """A commit that the agent has not been told: a log after the body may still add to it."""

    step: Step
    at: Instant
    seconds: Seconds
    generation: Generation
    adopted: bool
    read: BatchRecord | None


class Announcing:
    """Says what becomes of a session's steps.

    Args:
        member: whom it is said to.
    """

    def __init__(self, member: Member | Alone) -> None:
        self._member = member
        self._unsent: _Unsent | None = None

    def logged(self, step: Step) -> None:
        """Numbers of a step were logged; those of one that is being computed count even if this worker dies in it."""
        if not step.committed and not any(
            isinstance(value, torch.Tensor) and value.is_cuda for value in step.staged.values()
        ):
            # Reading a CUDA tensor would stall the device in mid-step: those wait for the commit.
            self._member.stage(step.number, step.numbers())

    def committed(self, step: Step, begun_at: Instant, read: BatchRecord | None, *, adopted: bool) -> None:
        """The step has happened. Said at the next `send`.

        Args:
            step: whose numbers may still grow.
            begun_at: when its body started.
            read: the record of its batch.
            adopted: it happened on other ranks, with what this one had computed.
        """
        now, generation = time.monotonic(), Generation(self._member.generation)
        self._unsent = _Unsent(step, now, now - begun_at, generation, adopted, read)

    def send(self) -> None:
        """Say what has not been said."""
        if self._unsent is None:
            return
        (step, at, seconds, generation, adopted, read), self._unsent = self._unsent, None
        numbers = step.numbers()
        self._member.announce(step.number, generation, at, seconds, numbers, adopted=adopted, read=read)
        _log.info("step %d: %s", step.number, numbers)
