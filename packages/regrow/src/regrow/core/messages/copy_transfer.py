"""Messages at an agent's copy store: a worker fetches a copy of state, another agent leaves one.

    anyone: CopyHello                           token; then any number of requests, one after the other

    worker: AskCopy                             which copy
    vault:  CopyOffered | CopyRefused           what it is made of
    worker: SendCopy                            go on
    vault:  for each chunk of the payload: its bytes, then their xxh3_64 (8 bytes, big-endian)
    vault:  CopyWhole                           it was whole from the first byte to the last; absent: all is void

    agent:  KeepCopy                            here is one
    vault:  CopyWanted | CopyRefused            from which chunk on
    agent:  for each chunk: its bytes, then their xxh3_64
    agent:  CopyWhole
    vault:  CopyKept | CopyRefused

Either side ends it by closing. Nothing here is ever unpickled.
"""

import msgspec

from regrow.core.ids import NodeId, Rank, StepNo
from regrow.core.wire import FrameCodec


class CopyHello(msgspec.Struct, frozen=True, tag=True):
    """First frame of whoever comes."""

    token: str


class AskCopy(msgspec.Struct, frozen=True, tag=True):
    """Rank `rank`'s `state@step`, please."""

    rank: Rank
    step: StepNo


class SendCopy(msgspec.Struct, frozen=True, tag=True):
    """Accept the offer: send its bytes."""


class KeepCopy(msgspec.Struct, frozen=True, tag=True):
    """Keep this copy for the other node. `version`: names this very copy, so that an interrupted one can go on."""

    node: NodeId
    rank: Rank
    step: StepNo
    holding: str
    version: str
    payload: int
    """Bytes of all tensors, padding included."""
    inventory: bytes


class CopyOffered(msgspec.Struct, frozen=True, tag=True):
    """The copy is here. `inventory`: a msgpack `Inventory`, which the vault does not read."""

    holding: str
    payload: int
    inventory: bytes


class CopyRefused(msgspec.Struct, frozen=True, tag=True):
    """No; the reason is for people."""

    reason: str


class CopyWanted(msgspec.Struct, frozen=True, tag=True):
    """Send it, from this chunk on: those before are here already."""

    chunk: int


class CopyWhole(msgspec.Struct, frozen=True, tag=True):
    """Nobody changed the copy while it was sent."""


class CopyKept(msgspec.Struct, frozen=True, tag=True):
    """It is here in full."""


CopyRequest = CopyHello | AskCopy | SendCopy | KeepCopy | CopyWhole
CopyReply = CopyOffered | CopyRefused | CopyWanted | CopyWhole | CopyKept


def store_side() -> FrameCodec[CopyRequest]:
    """Frames as the vault reads them."""
    return FrameCodec(CopyRequest)


def caller_side() -> FrameCodec[CopyReply]:
    """Frames as whoever comes to the vault reads them."""
    return FrameCodec(CopyReply)
