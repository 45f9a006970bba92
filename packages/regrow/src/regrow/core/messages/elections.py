"""Messages between launchers, and to the coordinator, by which another coordinator can take over."""

import msgspec

from regrow.core.ids import Instant, NodeId, Seconds


class Voter(msgspec.Struct, frozen=True):
    """A launcher that may vote and be elected. `name`: of this one process. `address`: its `host:port`."""

    name: str
    node: NodeId
    address: str


class Handover(msgspec.Struct, frozen=True):
    """The data that a launcher needs to take over: the voters, and the coordinator's memory.

    `term`, `writer`: term and node of the coordinator that wrote it. `number`: that coordinator's counter of handovers.
    `memory`: an encoded `WrittenMemory`; empty for a launcher that is no voter.
    """

    term: int
    number: int
    voters: list[Voter]
    writer: NodeId
    memory: bytes = b""

    @property
    def version(self) -> tuple[int, int]:
        """Key by which handovers are ordered: a larger version is newer."""
        return (self.term, self.number)

    @property
    def quorum(self) -> int:
        """Number of votes needed to be elected."""
        return len(self.voters) // 2 + 1


class LauncherPresent(msgspec.Struct, frozen=True):
    """`POST /launcher`: this launcher is alive.

    `term`, `number`: of the handover that it has. `beat`: copied from the coordinator's last answer.
    """

    voter: Voter
    term: int = 0
    number: int = 0
    beat: Instant | None = None


class CoordinatorPresent(msgspec.Struct, frozen=True):
    """Answer to `LauncherPresent`. `beat`: when it was sent, by the coordinator's clock. `handover`: a newer one."""

    term: int
    beat: Instant
    lease: Seconds
    handover: Handover | None = None
    ended: bool = False


class VoteAsked(msgspec.Struct, frozen=True):
    """`POST /vote`: the sender asks to be coordinator in this term. `version`: of the handover that it has.

    `trial`: the sender only asks whether it would be elected, so that a losing candidate disturbs nobody. `voter`: name
    of the receiver: a different process may now have that address, and has not made the receiver's promises. `address`:
    of the sender, from which the voter learns whether the sender was elected.
    """

    term: int
    name: str
    version: tuple[int, int]
    trial: bool = False
    voter: str = ""
    address: str = ""

    def to(self, voter: str) -> "VoteAsked":
        """A copy of the request, for this voter."""
        return msgspec.structs.replace(self, voter=voter)


class VoteAnswered(msgspec.Struct, frozen=True):
    """Answer to `VoteAsked`. `term`: the newest term that the voter knows."""

    granted: bool
    term: int


class WitnessWord(msgspec.Struct, frozen=True):
    """Permanent vote that a witness keeps in one of its places: the launcher that it supports.

    `term`, `name`: of a coordinator that relies on the witness, or of a launcher that the witness elects. `version`: of
    that process's handover.
    """

    term: int
    name: str
    version: tuple[int, int]


class Leader(msgspec.Struct, frozen=True):
    """The present coordinator. `address`: its URL. `voted`: newest term in which the sender has voted or may vote."""

    term: int
    address: str
    voted: int = 0
