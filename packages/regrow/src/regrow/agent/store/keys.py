"""The keys and values that one agent keeps. They outlive every worker and end with their generation."""

import asyncio
import re
from collections import deque
from collections.abc import Iterable

from regrow.core.errors import StoreRefusal
from regrow.core.ids import Generation
from regrow.core.messages.store import NO_COUNTER, TABLE_BYTES
from regrow.core.wire import MAX_FRAME_BYTES

_VALUE_LIMIT = MAX_FRAME_BYTES - (64 << 10)
"""Largest size of a value in bytes, as a reply must fit into a frame."""
_GENERATION = re.compile(r"g(\d+)/")
_NUMBER = re.compile(rb"\s*([+-]?\d+)")


def generation_of(key: str) -> Generation | None:
    """The generation of a key; None if the key names none."""
    match = _GENERATION.match(key)
    return None if match is None else Generation(int(match.group(1)))


class KeyTable:
    """The keys of one agent. Keys of a generation have the prefix `g<number>/` and are dropped with it.

    Values and queues have separate names: a key may be both.

    Args:
        limit: most bytes of all keys and values together.
    """

    def __init__(self, *, limit: int = TABLE_BYTES) -> None:
        self._limit = limit
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._bytes = 0
        self._oldest = Generation(0)
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._values)

    # --- values ------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """The value of a key; None if there is none."""
        self.refuse_old(key)
        return self._values.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Write a value and wake its waiters."""
        former = self._values.get(key)
        self._grow(key, value, len(value) - len(former) if former is not None else len(key) + len(value))
        self._values[key] = value
        self._wake(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; text after its digits is dropped, as in torch's stores."""
        match = _NUMBER.match(self.get(key) or b"0")
        if match is None:
            raise StoreRefusal(NO_COUNTER)
        number = int(match.group(1)) + amount
        self.put(key, str(number).encode())
        return number

    def append(self, key: str, more: bytes) -> None:
        """Append to a value."""
        self.put(key, (self.get(key) or b"") + more)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write if the value is as expected; returns the value after that, or `expected` if there is none."""
        found = self.get(key)
        if found == expected or (found is None and not expected):
            self.put(key, desired)
            return desired
        return expected if found is None else found

    def delete(self, key: str) -> bool:
        """Delete a key; True if it existed."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._bytes -= len(key) + len(value)
        return True

    def keys(self, prefix: str = "") -> list[str]:
        """The keys with this prefix, without queues."""
        return [key for key in self._values if key.startswith(prefix)]

    # --- queues ------------------------------------------------------------------------------------------------

    def push(self, key: str, value: bytes) -> None:
        """Append a value to a queue."""
        self._grow(key, value, len(key) + len(value))
        self._queues.setdefault(key, deque()).append(value)
        self._wake(key)

    def pop(self, key: str) -> bytes | None:
        """Take a queue's first value; None if it is empty."""
        self.refuse_old(key)
        queue = self._queues.get(key)
        if not queue:
            return None
        value = queue.popleft()
        self._bytes -= len(key) + len(value)
        if not queue:
            del self._queues[key]
        return value

    def length(self, key: str) -> int:
        """Number of values in a queue."""
        self.refuse_old(key)
        return len(self._queues.get(key, ()))

    # --- waiting -----------------------------------------------------------------------------------------------

    def is_there(self, key: str) -> bool:
        """True if the key has a value or a queue that is not empty."""
        self.refuse_old(key)
        return key in self._values or key in self._queues

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Those of these keys that do not exist."""
        return [key for key in keys if not self.is_there(key)]

    def arrival(self, key: str) -> "asyncio.Future[None]":
        """Future that is done when a missing key is written; fails when its generation ends. Cancel it to stop waiting.

        Not a coroutine: it waits from the call on, so that no write between a check and the wait is missed.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, set()).add(waiter)
        waiter.add_done_callback(lambda done: self._forget(key, done))
        return waiter

    def _forget(self, key: str, waiter: "asyncio.Future[None]") -> None:
        if not waiter.cancelled():
            waiter.exception()  # Otherwise asyncio logs an error if the waiter has just left.
        waiters = self._waiters.get(key)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[key]

    def _wake(self, key: str) -> None:
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    # --- bounds ------------------------------------------------------------------------------------------------

    def drop_before(self, oldest: Generation) -> None:
        """Drop the keys of earlier generations, and refuse them from now on."""
        if oldest <= self._oldest:
            return
        self._oldest = oldest
        for key in [key for key in self._values if self.is_old(key)]:
            self.delete(key)
        for key in [key for key in self._queues if self.is_old(key)]:
            self._bytes -= sum(len(key) + len(value) for value in self._queues.pop(key))
        for key in [key for key in self._waiters if self.is_old(key)]:
            for waiter in self._waiters.pop(key):
                if not waiter.done():
                    waiter.set_exception(StoreRefusal(self._over(key)))

    def is_old(self, key: str) -> bool:
        """True if the key's generation is over."""
        generation = generation_of(key)
        return generation is not None and generation < self._oldest

    def refuse_old(self, key: str) -> None:
        """Raise `StoreRefusal` if the key's generation is over."""
        if self.is_old(key):
            raise StoreRefusal(self._over(key))

    def _over(self, key: str) -> str:
        return f"the generation of {key!r} is over: the oldest kept is {self._oldest}"

    def _grow(self, key: str, value: bytes, by: int) -> None:
        self.refuse_old(key)
        if len(value) > _VALUE_LIMIT:
            raise StoreRefusal(f"the value of {key!r} has {len(value)} bytes; the most is {_VALUE_LIMIT}")
        if self._bytes + by > self._limit:
            raise StoreRefusal(
                f"the store is full: {key!r} would make it {self._bytes + by} bytes, the most is {self._limit}"
            )
        self._bytes += by
