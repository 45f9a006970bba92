"""What the coordinator's server hosts: something that takes facts and the time, and says what is to be done."""

from typing import Protocol

import msgspec

from regrow.core.ids import Instant
from regrow.core.job import JobSpec
from regrow.core.messages.unions import Fact
from regrow.membership.orders import Command


class Machine(Protocol):
    """What the server asks of the membership machine."""

    @property
    def spec(self) -> JobSpec:
        """What the job was started with."""
        ...

    @property
    def world(self) -> int:
        """Ranks of the present world, or of the one that is being formed."""
        ...

    def handle(self, event: Fact, now: Instant) -> list[Command]:
        """Take in one fact; return what is to be done, in order."""
        ...

    def next_deadline(self) -> Instant | None:
        """When `TimeAdvanced` must be sent at the latest."""
        ...

    def snapshot(self) -> msgspec.Struct:
        """What the job looks like, for people."""
        ...
