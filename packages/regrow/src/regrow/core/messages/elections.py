"""Messages of launchers to the coordinator and to one another, so that another coordinator can take over."""

import msgspec

from regrow.core.ids import Instant, NodeId, Seconds


class Voter(msgspec.Struct, frozen=True):
    """A launcher that may vote, and be elected. `name`: of this very process. `address`: its `host:port`."""

    name: str
    node: NodeId
    address: str


class Handover(msgspec.Struct, frozen=True):
    """Knowledge that a launcher needs to take over: the voters, and the coordinator's memory.

    `term`, `writer`: term and node of the coordinator that wrote it. `number`: its counter of handovers. `memory`: an
    encoded `WrittenMemory`; empty for a launcher that is no voter.
    """

    term: int
    number: int
    voters: list[Voter]
    writer: NodeId
    memory: bytes = b""

    @property
    def version(self) -> tuple[int, int]:
        """Order of handovers; a larger version is newer."""
        return (self.term, self.number)

    @property
    def quorum(self) -> int:
        """Number of votes needed to win."""
        return len(self.voters) // 2 + 1


class LauncherPresent(msgspec.Struct, frozen=True):
    """`POST /launcher`: this launcher is alive.

    `term`, `number`: of the handover that it has. `beat`: repeated from the coordinator's last answer.
    """

    voter: Voter
    term: int = 0
    number: int = 0
    beat: Instant | None = None


class CoordinatorPresent(msgspec.Struct, frozen=True):
    """The answer. `beat`: when it was sent, by the coordinator's clock. `handover`: a newer one, if there is any."""

    term: int
    beat: Instant
    lease: Seconds
    handover: Handover | None = None
    ended: bool = False


class VoteAsked(msgspec.Struct, frozen=True):
    """`POST /vote`: the sender asks to be coordinator in this term. `version`: of the handover that it has.

    `trial`: it only asks whether it would be elected, so that a launcher that would not disturbs nobody. `voter`: name
    of the receiver; another process that has its address by now has not made that one's promises. `address`: of the
    sender, from which the voter learns whether it was elected.
    """

    term: int
    name: str
    version: tuple[int, int]
    trial: bool = False
    voter: str = ""
    address: str = ""

    def to(self, voter: str) -> "VoteAsked":
        """The same request, to this voter."""
        return msgspec.structs.replace(self, voter=voter)


class VoteAnswered(msgspec.Struct, frozen=True):
    """The answer to `VoteAsked`. `term`: the newest that the voter knows."""

    granted: bool
    term: int


class WitnessWord(msgspec.Struct, frozen=True):
    """Permanent vote of a witness, in one of its places: the launcher that it supports.

    `term`, `name`: of a coordinator that relies on it, or of a launcher that it elects. `version`: of that one's
    handover.
    """

    term: int
    name: str
    version: tuple[int, int]


class Leader(msgspec.Struct, frozen=True):
    """The present coordinator. `address`: its URL. `voted`: the last term in which the sender voted, or would vote."""

    term: int
    address: str
    voted: int = 0
