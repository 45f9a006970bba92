"""Frames over asyncio's streams, as a test's own end of a connection reads them."""

import asyncio
from typing import TypeVar

from regrow.core.ids import Seconds
from regrow.core.wire import FrameCodec

Incoming = TypeVar("Incoming")
_LENGTH_BYTES = 4


async def next_message(codec: FrameCodec[Incoming], reader: asyncio.StreamReader, within: Seconds) -> Incoming | None:
    """The next message; None where the peer has closed. Raises `TimeoutError`."""
    try:
        async with asyncio.timeout(within):
            head = await reader.readexactly(_LENGTH_BYTES)
            received = bytearray(head + await reader.readexactly(int.from_bytes(head, "big")))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    message = codec.next(received)
    return message
