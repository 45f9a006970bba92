"""Messages at an agent's copy store: a worker fetches a copy of state, another agent stores one.

    caller: CopyHello                           token; then any number of requests, one after the other

    worker: AskCopy                             names the copy
    store:  CopyOffered | CopyRefused           describes its contents
    worker: SendCopy                            accepts
    store:  for each chunk of the payload: its bytes, then their xxh3_64 (8 bytes, big-endian)
    store:  CopyWhole                           the copy did not change meanwhile; without this, all is void

    agent:  KeepCopy                            offers a copy
    store:  CopyWanted | CopyRefused            names the first missing chunk
    agent:  for each chunk: its bytes, then their xxh3_64
    agent:  CopyWhole
    store:  CopyKept | CopyRefused

Either side ends the exchange by closing the connection. Nothing here is ever unpickled.
"""

import msgspec

from regrow.core.ids import NodeId, Rank, StepNo
from regrow.core.wire import FrameCodec


class CopyHello(msgspec.Struct, frozen=True, tag=True):
    """First message of every caller."""

    token: str


class AskCopy(msgspec.Struct, frozen=True, tag=True):
    """Ask for rank `rank`'s `state@step`."""

    rank: Rank
    step: StepNo


class SendCopy(msgspec.Struct, frozen=True, tag=True):
    """Accept the offer: the store then sends the bytes."""


class KeepCopy(msgspec.Struct, frozen=True, tag=True):
    """Keep this copy for the sender's node. `version` identifies it, so that an interrupted transfer can go on."""

    node: NodeId
    rank: Rank
    step: StepNo
    holding: str
    version: str
    payload: int
    """Size of all tensors in bytes, padding included."""
    inventory: bytes


class CopyOffered(msgspec.Struct, frozen=True, tag=True):
    """The store has the copy. `inventory`: an `Inventory` in msgpack, which the store itself does not read."""

    holding: str
    payload: int
    inventory: bytes


class CopyRefused(msgspec.Struct, frozen=True, tag=True):
    """The request is refused; the reason is for people."""

    reason: str


class CopyWanted(msgspec.Struct, frozen=True, tag=True):
    """Send the copy from this chunk on: the store already has the earlier chunks."""

    chunk: int


class CopyWhole(msgspec.Struct, frozen=True, tag=True):
    """The copy did not change while it was sent."""


class CopyKept(msgspec.Struct, frozen=True, tag=True):
    """The store has the complete copy."""


CopyRequest = CopyHello | AskCopy | SendCopy | KeepCopy | CopyWhole
CopyReply = CopyOffered | CopyRefused | CopyWanted | CopyWhole | CopyKept


def store_side() -> FrameCodec[CopyRequest]:
    """Codec of the copy store, which reads requests."""
    return FrameCodec(CopyRequest)


def caller_side() -> FrameCodec[CopyReply]:
    """Codec of a caller of the copy store, which reads replies."""
    return FrameCodec(CopyReply)
