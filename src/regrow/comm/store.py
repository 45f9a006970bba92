"""A `torch.distributed.Store` whose keys live in an agent's memory, and so outlive every worker."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec

from regrow.comm.private import Store
from regrow.core.errors import DeadlineExceeded, GenerationHalted, ProtocolError
from regrow.core.store_messages import (
    StoreAdd,
    StoreCheck,
    StoreCompareSet,
    StoreCount,
    StoreDelete,
    StoreGet,
    StoreHello,
    StoreReply,
    StoreSet,
    StoreWait,
)
from regrow.core.wire import BlockingChannel, FrameCodec, connect

DEFAULT_WAIT = timedelta(seconds=300)


class AgentStore(Store):
    """The store of one generation.

    Args:
        address: where the agent that keeps the keys listens.
        token: the job's token.
        prefix: put before every key; carries the generation, so that no one finds the addresses of the dead.
    """

    def __init__(self, address: str, token: str, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix
        self._wait = DEFAULT_WAIT
        self._closed = False
        codec: FrameCodec[StoreReply] = FrameCodec(StoreReply)
        sock = connect(address)
        sock.settimeout(None)  # every request carries its own deadline, kept by the agent
        self._channel: BlockingChannel[StoreReply] = BlockingChannel(sock, codec)
        self._replies: Iterator[StoreReply] = self._channel.messages()
        self._ask(StoreHello(token))

    def _ask(self, request: msgspec.Struct) -> StoreReply:
        try:
            self._channel.send(request)
            reply = next(self._replies, None)
        except (OSError, ValueError) as error:
            raise self._ended(f"the agent's store cannot be reached: {error}") from error
        if reply is None:
            raise self._ended("the agent's store has closed the connection")
        if reply.error == "timeout":
            raise DeadlineExceeded(f"no such key within the time given: {request}")
        if reply.error:
            raise ProtocolError(f"the agent's store refuses: {reply.error}")
        return reply

    def _ended(self, cause: str) -> Exception:
        return GenerationHalted("the store of this generation is closed") if self._closed else ProtocolError(cause)

    def _key(self, key: str) -> str:
        return self._prefix + key

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask(StoreSet(self._key(key), value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it up to the store's timeout."""
        return self._ask(StoreGet(self._key(key), self._wait.total_seconds())).value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        return self._ask(StoreAdd(self._key(key), amount)).number

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask(StoreCheck([self._key(key) for key in keys])).number)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._ask(StoreWait([self._key(key) for key in keys], (timeout or self._wait).total_seconds()))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` if the value is `expected`; the value after."""
        return self._ask(StoreCompareSet(self._key(key), expected.encode(), desired.encode())).value

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._ask(StoreDelete(self._key(key))).number)

    def num_keys(self) -> int:
        """How many keys the agent holds."""
        return self._ask(StoreCount()).number

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait where no timeout is given."""
        self._wait = timeout

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait where no timeout is given."""
        return self._wait

    def has_extended_api(self) -> bool:
        """No append, multi_get or multi_set yet."""
        return False

    def clone(self) -> Any:
        """The same store: requests of several threads are not interleaved, since torch holds the GIL while it asks."""
        return self

    def close(self) -> None:
        """Hang up; a blocked request ends with `GenerationHalted`."""
        self._closed = True
        self._channel.close()
