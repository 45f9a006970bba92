"""Messages at an agent's copy store: a worker fetches a copy of state, another agent leaves one.

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

Either side ends it by closing. Nothing here is ever unpickled.
"""

import msgspec

from regrow.core.ids import NodeId, Rank, StepNo
from regrow.core.wire import FrameCodec


class CopyHello(msgspec.Struct, frozen=True, tag=True):
    """First frame of every caller."""

    token: str


class AskCopy(msgspec.Struct, frozen=True, tag=True):
    """Request rank `rank`'s `state@step`."""

    rank: Rank
    step: StepNo


class SendCopy(msgspec.Struct, frozen=True, tag=True):
    """Accept the offer: send its bytes."""


class KeepCopy(msgspec.Struct, frozen=True, tag=True):
    """Keep this copy for the other node. `version`: identifies the copy, so that an interrupted transfer can go on."""

    node: NodeId
    rank: Rank
    step: StepNo
    holding: str
    version: str
    payload: int
    """Bytes of all tensors, padding included."""
    inventory: bytes


class CopyOffered(msgspec.Struct, frozen=True, tag=True):
    """The copy is here. `inventory`: a msgpack `Inventory`, which the store does not read."""

    holding: str
    payload: int
    inventory: bytes


class CopyRefused(msgspec.Struct, frozen=True, tag=True):
    """The request is refused; the reason is for people."""

    reason: str


class CopyWanted(msgspec.Struct, frozen=True, tag=True):
    """Send the copy from this chunk on: the store has those before it."""

    chunk: int


class CopyWhole(msgspec.Struct, frozen=True, tag=True):
    """Nobody changed the copy while it was sent."""


class CopyKept(msgspec.Struct, frozen=True, tag=True):
    """The copy is stored in full."""


CopyRequest = CopyHello | AskCopy | SendCopy | KeepCopy | CopyWhole
CopyReply = CopyOffered | CopyRefused | CopyWanted | CopyWhole | CopyKept


def store_side() -> FrameCodec[CopyRequest]:
    """Frames as the copy store reads them."""
    return FrameCodec(CopyRequest)


def caller_side() -> FrameCodec[CopyReply]:
    """Frames as a caller of the copy store reads them."""
    return FrameCodec(CopyReply)
