"""The protocol between a receiver and one holder: a few frames, then raw bytes.

    receiver: AskState                     sends its token, generation and step
    holder:   StateOffered | StateRefused  describes the state, or gives the reason
    receiver: SendSpans                    requests bytes                 (any number of times)
    holder:   for each chunk of `plan.chunked`: its bytes, then their xxh3_64 (8 bytes, big-endian)

With `SendSpans.direct` a chunk begins with its place in the holder's memory (address and device, 8 bytes each,
big-endian). If there is a place, the bytes are left out: the receiver reads them there (`direct`).

While this connection lasts, others may be added to it, at any address of the holder:

    receiver: AskFlow                      sends the ticket of the first connection
    holder:   FlowOpened | StateRefused    and then as after StateOffered

A newcomer that proves that it computes the same as the holder requests, in this way, the state before the holder's
next step, and then, over another connection, the results of that step:

    receiver: AskTrace                     requests the results of this step
    holder:   TraceGiven | StateRefused

Either side ends the exchange by closing the connection. Nothing here is ever unpickled.
"""

import msgspec

from regrow.core.ids import Generation, Seconds, StepNo
from regrow.core.wire import FrameCodec
from regrow.hydration.inventory import Inventory
from regrow.hydration.plan import ByteSpan


class AskState(msgspec.Struct, frozen=True, tag=True):
    """First frame of a receiver. `patience`: time that the holder may take to reach this generation and step.

    `proof`: requests the state before the holder's next step, and a trace of that step; `plain`, or `closely`.
    `direct`: kinds of reads that the receiver can do by itself, the best first.
    """

    token: str
    generation: Generation
    step: StepNo
    patience: Seconds
    proof: str = ""
    direct: list[str] = []


class AskFlow(msgspec.Struct, frozen=True, tag=True):
    """First frame of a further connection of a receiver, to which the state was offered over another connection."""

    token: str
    ticket: str


class AskTrace(msgspec.Struct, frozen=True, tag=True):
    """First frame of a newcomer that has received the state before a step for a proof: requests the step's results."""

    token: str
    generation: Generation
    step: StepNo
    patience: Seconds


class SendSpans(msgspec.Struct, frozen=True, tag=True):
    """Send these bytes, in chunks of at most `chunk` bytes. No spans: the reader is done with all its connections."""

    spans: list[ByteSpan]
    chunk: int
    direct: bool = False


class Direct(msgspec.Struct, frozen=True):
    """The kind of reads to which the holder agrees, empty for none, with the reason if some were requested.

    `passport`: bytes for the library that reads; regrow does not interpret them.
    """

    kind: str = ""
    passport: bytes = b""
    why: str = ""


class StateOffered(msgspec.Struct, frozen=True, tag=True):
    """The holder has the state, and does not change it while the connection lasts.

    `ticket`: admits further connections; empty: none is accepted. `ways`: endpoints at the holder's other addresses.
    """

    inventory: Inventory
    ticket: str = ""
    ways: list[str] = []
    direct: Direct = Direct()


class FlowOpened(msgspec.Struct, frozen=True, tag=True):
    """The further connection was accepted for the receiver with that ticket."""


class TraceGiven(msgspec.Struct, frozen=True, tag=True):
    """Trace of the holder's computation in the step, in the form in which it is compared."""

    trace: bytes


class StateRefused(msgspec.Struct, frozen=True, tag=True):
    """The holder does not send its state; the reason is for people."""

    reason: str


Request = AskState | AskFlow | AskTrace | SendSpans
Reply = StateOffered | FlowOpened | TraceGiven | StateRefused
holder_side: FrameCodec[Request] = FrameCodec(Request)
receiver_side: FrameCodec[Reply] = FrameCodec(Reply)
