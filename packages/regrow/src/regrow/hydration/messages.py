"""The conversation between a receiver and one holder: a few frames, then raw bytes.

    receiver: AskState                     who I am, which generation, which step
    holder:   StateOffered | StateRefused  what there is, or why not
    receiver: SendSpans                    give me these bytes            (any number of times)
    holder:   for each chunk of `plan.chunked`: its bytes, then their xxh3_64 (8 bytes, big-endian)

With `SendSpans.direct` a chunk begins with its place in the holder's memory (address and device, 8 bytes each,
big-endian), and where there is one, its bytes are left out: the receiver reads them there (`direct`).

While this connection lasts, others may be added to it, at any address of the holder:

    receiver: AskFlow                      I am the reader with this ticket
    holder:   FlowOpened | StateRefused    and then as after StateOffered

A newcomer that shows that it computes what the holder does asks so for the state before the holder's next step, and
then, by another connection, what it has computed in that step:

    receiver: AskTrace                     what you have computed in this step
    holder:   TraceGiven | StateRefused

Either side ends it by closing. Nothing here is ever unpickled.
"""

import msgspec

from regrow.core.ids import Generation, Seconds, StepNo
from regrow.core.wire import FrameCodec
from regrow.hydration.inventory import Inventory
from regrow.hydration.plan import ByteSpan


class AskState(msgspec.Struct, frozen=True, tag=True):
    """First frame of a receiver. `patience`: how long the holder may take to come to this generation and step.

    `proof`: the state before whatever step is the holder's next is wanted, and a trace of that; `plain`, or `closely`.
    `direct`: kinds of reads by which the receiver can take bytes by itself, best first.
    """

    token: str
    generation: Generation
    step: StepNo
    patience: Seconds
    proof: str = ""
    direct: list[str] = []


class AskFlow(msgspec.Struct, frozen=True, tag=True):
    """First frame of a further connection of a receiver, which was offered the state over another."""

    token: str
    ticket: str


class AskTrace(msgspec.Struct, frozen=True, tag=True):
    """First frame of who has received the state before a step for a proof, and wants to know what came of it."""

    token: str
    generation: Generation
    step: StepNo
    patience: Seconds


class SendSpans(msgspec.Struct, frozen=True, tag=True):
    """Send these bytes, in chunks of at most `chunk` bytes; none: the reader needs none of its connections any more."""

    spans: list[ByteSpan]
    chunk: int
    direct: bool = False


class Direct(msgspec.Struct, frozen=True):
    """A kind of reads that the holder agrees to, empty for none, with the reason where one was wanted.

    `passport`: bytes for the library that reads; nothing else looks into them.
    """

    kind: str = ""
    passport: bytes = b""
    why: str = ""


class StateOffered(msgspec.Struct, frozen=True, tag=True):
    """The holder has the state, and keeps it still while the connection lasts.

    `ticket`: for further connections; empty: none is taken. `ways`: endpoints at the holder's other addresses.
    """

    inventory: Inventory
    ticket: str = ""
    ways: list[str] = []
    direct: Direct = Direct()


class FlowOpened(msgspec.Struct, frozen=True, tag=True):
    """The connection belongs to the receiver with that ticket."""


class TraceGiven(msgspec.Struct, frozen=True, tag=True):
    """Trace of the holder's computation in the step, in the form in which it is compared."""

    trace: bytes


class StateRefused(msgspec.Struct, frozen=True, tag=True):
    """The holder does not give its state; the reason is for people."""

    reason: str


Request = AskState | AskFlow | AskTrace | SendSpans
Reply = StateOffered | FlowOpened | TraceGiven | StateRefused
holder_side: FrameCodec[Request] = FrameCodec(Request)
receiver_side: FrameCodec[Reply] = FrameCodec(Reply)
