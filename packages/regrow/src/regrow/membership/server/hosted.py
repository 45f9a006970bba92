"""Interface that the coordinator's server hosts: it takes facts and the time, and returns commands."""

from typing import Protocol

import msgspec

from regrow.core.ids import Instant
from regrow.core.job import JobSpec
from regrow.core.messages.unions import Fact
from regrow.membership.orders import Command


class Machine(Protocol):
    """A membership machine, as the server uses it."""

    @property
    def spec(self) -> JobSpec:
        """Specification with which the job was started."""
        ...

    @property
    def world(self) -> int:
        """Ranks of the present world, or of the one that is being formed."""
        ...

    def handle(self, event: Fact, now: Instant) -> list[Command]:
        """Take one fact; return the resulting commands, in order."""
        ...

    def next_deadline(self) -> Instant | None:
        """Latest time at which `TimeAdvanced` must be sent; None: nothing is awaited."""
        ...

    def snapshot(self) -> msgspec.Struct:
        """The job's present state, for people."""
        ...
