"""An OpenAI-compatible server that returns a fixed answer at once, to measure the head of a batch.

`python benchmarks/instant_worker.py`: prints its port.
"""

import asyncio
import re
import signal

_ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":0,"model":"instant","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"an answer of a few words, as a small model gives it"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":8,"completion_tokens":11,"total_tokens":19}}'
)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_REPLY = _HEAD % len(_ANSWER) + _ANSWER
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class InstantWorker(asyncio.Protocol):
    """One connection: a reply for each complete request."""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        if isinstance(transport, asyncio.WriteTransport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer complete requests."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, end + 2)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < size:
                return
            self._buffer = self._buffer[size:]
            if self._transport is not None:
                self._transport.write(_REPLY)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(InstantWorker, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()


if __name__ == "__main__":
    asyncio.run(_serve())
