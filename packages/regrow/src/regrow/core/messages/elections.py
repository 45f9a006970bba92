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

    `term`, `writer`: of the coordinator that wrote it, and its node. `number`: counted by that one. `memory`: an
    encoded `WrittenMemory`; empty for a launcher that is no voter.
    """

    term: int
    number: int
    voters: list[Voter]
    writer: NodeId
    memory: bytes = b""

    @property
    def version(self) -> tuple[int, int]:
        """The larger, the newer."""
        return (self.term, self.number)

    @property
    def quorum(self) -> int:
        """Number of votes that elect."""
        return len(self.voters) // 2 + 1


class LauncherPresent(msgspec.Struct, frozen=True):
    """`POST /launcher`: this launcher is there.

    `term`, `number`: of the handover that it has. `beat`: of the coordinator's last answer, which it repeats.
    """

    voter: Voter
    term: int = 0
    number: int = 0
    beat: Instant | None = None


class CoordinatorPresent(msgspec.Struct, frozen=True):
    """The answer. `beat`: when it was sent, by the coordinator's clock. `handover`: one that is newer, if there is."""

    term: int
    beat: Instant
    lease: Seconds
    handover: Handover | None = None
    ended: bool = False


class VoteAsked(msgspec.Struct, frozen=True):
    """`POST /vote`: who asks would be coordinator in this term. `version`: of the handover that it has.

    `trial`: it only asks whether it would be elected, so that one who would not disturbs nobody. `voter`: by name, who
    is asked; another process that has its address by now has not promised what that one has. `address`: of who asks;
    there the voter learns whether that one was elected.
    """

    term: int
    name: str
    version: tuple[int, int]
    trial: bool = False
    voter: str = ""
    address: str = ""

    def to(self, voter: str) -> "VoteAsked":
        """The same, of this voter."""
        return msgspec.structs.replace(self, voter=voter)


class VoteAnswered(msgspec.Struct, frozen=True):
    """`term`: the newest that the voter has heard of."""

    granted: bool
    term: int


class WitnessWord(msgspec.Struct, frozen=True):
    """Permanent word of a witness, in one of its places: the launcher it stands for.

    `term`, `name`: of a coordinator that counts on it, or of a launcher that it elects. `version`: of the handover that
    this one has.
    """

    term: int
    name: str
    version: tuple[int, int]


class Leader(msgspec.Struct, frozen=True):
    """The present coordinator. `address`: its URL. `voted`: the term in which the sender has voted last, or would."""

    term: int
    address: str
    voted: int = 0
