"""A `torch.distributed.Store` whose keys are in the memory of the job's agents, and so outlive every worker.

A worker connects only to the agent of its own node, which finds the agent that keeps each key.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

from regrow.comm.torch_private import group_names
from regrow.comm.torch_private.internals import Store
from regrow.core.errors import GenerationHalted, ProtocolError
from regrow.core.ids import Seconds
from regrow.core.messages.store import (
    NO_COUNTER,
    TIMEOUT,
    AnswersNoted,
    StoreAdd,
    StoreAppend,
    StoreCheck,
    StoreCompareSet,
    StoreCount,
    StoreDelete,
    StoreGet,
    StoreHello,
    StoreLength,
    StoreList,
    StoreMessage,
    StoreMultiGet,
    StoreMultiSet,
    StorePop,
    StorePush,
    StoreReply,
    StoreSet,
    StoreWait,
    gloo_address,
    placed,
)
from regrow.core.net import connect, hang_up
from regrow.core.wire import FrameCodec

ANSWER_S: Seconds = 120.0
"""Extra time that an answer may take, beyond the wait that the caller has requested."""
FOREVER_S: Seconds = 24 * 3600.0
"""Time limit used for torch's zero, which means no deadline."""
_IDLE = 2
_READ_BYTES = 64 << 10
_CODEC: FrameCodec[StoreReply] = FrameCodec(StoreReply)
"""One codec for all connections: it has no state, and is made before workers are forked."""


class _Connection:
    """One connection to the agent, for one request at a time. Nothing is sent before the first request."""

    def __init__(self, address: str, token: str) -> None:
        self._sock: socket.socket = connect(address)
        self._sock.setblocking(False)
        self._ready = select.poll()
        self._ready.register(self._sock, select.POLLIN)
        self._greeting = _CODEC.frame(StoreHello(token, quiet=True))
        self._received = bytearray()
        self._quiet = 0

    def send(self, request: StoreSet | AnswersNoted, within: Seconds) -> None:
        """Send a request without awaiting the answer; a failure is the connection's next answer. Raises as `ask`."""
        self._quiet += 1
        self._send(msgspec.structs.replace(request, ask=self._quiet, quiet=True), time.monotonic() + within)

    def ask(self, request: StoreMessage, within: Seconds) -> StoreReply:
        """Send a request; returns its answer. Raises `OSError`, `ProtocolError`, or `ValueError` if it was closed."""
        until = time.monotonic() + within
        self._send(request, until)
        while (reply := _CODEC.next(self._received)) is None:
            self._await(select.POLLIN, until)
            more = self._sock.recv(_READ_BYTES)
            if not more:
                raise ConnectionResetError("it has closed the connection")
            self._received += more
        return reply

    def _send(self, request: StoreMessage, until: float) -> None:
        left, self._greeting = memoryview(self._greeting + _CODEC.frame(request)), b""
        while left:
            try:
                left = left[self._sock.send(left) :]
            except BlockingIOError:
                self._ready.modify(self._sock, select.POLLOUT)
                self._await(select.POLLOUT, until)
                self._ready.modify(self._sock, select.POLLIN)

    def _await(self, event: int, until: float) -> None:
        if not self._ready.poll(max(0.0, 1000 * (until - time.monotonic()))):
            raise TimeoutError("it does not answer" if event == select.POLLIN else "it takes nothing more")

    def hang_up(self) -> None:
        """End a blocked request; the caller of that request closes the connection."""
        hang_up(self._sock)

    def close(self) -> None:
        """Close the connection, on which no request may be open."""
        self._sock.close()


class Connections:
    """Connections to one agent, one for each concurrent request; some are kept for later requests.

    Args:
        address: address of the store that this node's agent serves.
        token: the job's token.
    """

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._pid = os.getpid()

    def take(self) -> _Connection:
        """A connection for one request. Raises `OSError` or `ProtocolError`."""
        with self._lock:
            if self._pid != os.getpid():
                self._idle, self._pid = [], os.getpid()  # a fork must not use its parent's connections
            if self._idle:
                return self._idle.pop()
        return _Connection(self._address, self._token)

    @contextmanager
    def lent(self) -> Iterator[_Connection]:
        """Context with a connection for one request. Raises `OSError` or `ProtocolError`."""
        connection = self.take()
        with ExitStack() as failed:
            failed.callback(connection.close)
            yield connection
            failed.pop_all()
        self.give_back(connection)

    def give_back(self, connection: _Connection) -> None:
        """Return a connection after its request was answered."""
        with self._lock:
            if len(self._idle) < _IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close the unused connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class AgentStore(Store):
    """The store of one generation. May be used by any number of threads, including C++ ones.

    torch looks for overridden methods in this object, so it must be referenced for as long as C++ uses it.

    Args:
        address: address of the store that this node's agent serves.
        token: the job's token.
        prefix: put before every key; contains the generation, so that addresses of dead workers are never found.
        connections: shared with other stores; by default the store has its own.
    """

    timeout: timedelta
    """Default wait of `get` and similar methods: torch's property, set by `set_timeout`."""

    def __init__(self, address: str, token: str, prefix: str, *, connections: Connections | None = None) -> None:
        super().__init__()
        self._prefix = prefix
        self._closed = False
        self._shared = connections is not None
        self._connections = connections or Connections(address, token)
        self._lock = threading.Lock()
        self._in_use: set[_Connection] = set()
        self._addresses: dict[str, bytes] = {}
        """Addresses of ranks, by their key at the agents, that came with other answers and are kept until requested."""
        self._has: dict[str, int] = {}
        """Number of addresses that have come, by group."""
        self._ranks: dict[str, Sequence[int]] = {}
        """The world's ranks in each group for which this rank has published an address, by the start of its keys."""

    # --- requests ----------------------------------------------------------------------------------------------

    def _ask(self, request: StoreMessage, wait: Seconds = 0.0) -> StoreReply:
        with self._connection() as connection:
            reply = connection.ask(request, wait + ANSWER_S)
            if reply.ask != request.ask:
                raise DistStoreError(reply.error)  # an earlier quiet request's; this connection is closed now
        if reply.error == TIMEOUT:
            raise DistStoreError(f"wait timeout after {wait:g} s: {_named(request)}")
        if reply.error == NO_COUNTER:
            raise ValueError(f"the value is no number: {_named(request)}")
        if reply.error:
            raise DistStoreError(f"{_named(request)}: {reply.error}")
        return reply

    def _send(self, request: StoreSet) -> None:
        with self._connection() as connection:
            connection.send(request, ANSWER_S)

    @contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """A connection for one request; kept for the next unless the request fails or the store was closed."""
        try:
            connection = self._connections.take()
        except (OSError, ProtocolError) as error:
            raise self._ended(error) from error
        whole = False
        try:
            with self._lock:
                if self._closed:
                    raise GenerationHalted("the store of this generation is closed")
                self._in_use.add(connection)
            yield connection
            whole = True
        except (OSError, ValueError, ProtocolError) as error:
            raise self._ended(error) from error
        finally:
            with self._lock:
                self._in_use.discard(connection)
                whole = whole and not self._closed
            if whole:
                self._connections.give_back(connection)
            else:
                connection.close()

    def _ended(self, error: Exception) -> Exception:
        if self._closed:
            return GenerationHalted("the store of this generation is closed")
        return DistNetworkError(f"the store of this node's agent cannot be reached: {error}")

    def _key(self, key: str) -> str:
        """Name of a key at the agents: an address is kept by the agent of its rank, if the group's ranks are known."""
        name = self._prefix + key
        if not self._ranks:
            return name
        group, _, rank = key.rpartition("/")
        ranks = self._ranks.get(group)
        if ranks is None or not rank.isdecimal() or int(rank) >= len(ranks):
            return name
        return placed(name, ranks[int(rank)])

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._key(key) for key in keys]

    def _callers_key(self, name: str) -> str:
        """The key in the form in which callers of this store know it."""
        key, at, _ = name.removeprefix(self._prefix).rpartition("@")
        return key if at and self._key(key) == name else name.removeprefix(self._prefix)

    def _limit(self, timeout: timedelta | None = None) -> Seconds:
        # The base class has the timeout: C++ sets it there, without calling a method of this class.
        return (timeout if timeout is not None else self.timeout).total_seconds() or FOREVER_S

    # --- values ------------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        address = gloo_address(key)
        if address is None:
            self._ask(StoreSet(self._key(key), _bytes(value)))
            return
        ranks = group_names.ranks_of(address.group)
        if ranks:
            self._ranks[key.rpartition("/")[0]] = ranks
        self._send(StoreSet(self._key(key), _bytes(value)))  # without waiting for the agent: readers wait for the value

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it up to the store's timeout. Raises `DistStoreError`."""
        limit, name = self._limit(), self._key(key)
        if gloo_address(name) is None:
            return self._ask(StoreGet(name, limit), limit).value
        brought = self._addresses.pop(name, None)
        return self._address(name, limit) if brought is None else brought

    def _address(self, name: str, limit: Seconds) -> bytes:
        """The address of a rank; the agent sends other addresses of the group that it knows along with it."""
        group = name.rpartition("/")[0]
        reply = self._ask(StoreGet(name, limit, has=self._has.get(group, 0)), limit)
        self._addresses.update(reply.also)
        self._has[group] = reply.has
        return reply.value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value. Raises `ValueError` if the value is not a number."""
        return self._ask(StoreAdd(self._key(key), amount)).number

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._ask(StoreAppend(self._key(key), _bytes(value)))

    def check(self, keys: list[str]) -> bool:
        """True if all keys exist."""
        return bool(self._ask(StoreCheck(self._keys(keys))).number)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. Raises `DistStoreError`."""
        limit = self._limit(timeout)
        names = self._keys(keys)
        if len(names) == 1 and gloo_address(names[0]) is not None:  # gloo reads it next: this halves the requests
            if names[0] not in self._addresses:
                self._addresses[names[0]] = self._address(names[0], limit)
            return
        self._ask(StoreWait(names, limit), limit)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected`, or if there is no value and `expected` is empty.

        Returns the value after that; `expected` if there is none.
        """
        return self._ask(StoreCompareSet(self._key(key), _bytes(expected), _bytes(desired))).value

    def delete_key(self, key: str) -> bool:
        """Remove a key; True if it existed."""
        return bool(self._ask(StoreDelete(self._key(key))).number)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several values, waiting for all of them up to the store's timeout. Raises `DistStoreError`."""
        limit = self._limit()
        return self._ask(StoreMultiGet(self._keys(keys), limit), limit).values

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Write several values, one after the other."""
        self._ask(StoreMultiSet(self._keys(keys), [_bytes(value) for value in values]))

    def num_keys(self) -> int:
        """Number of keys in this store, on all nodes; queues are not counted."""
        return self._ask(StoreCount(self._prefix)).number

    def list_keys(self) -> list[str]:
        """The keys of this store, on all nodes; queues are not included."""
        return [self._callers_key(key) for key in self._ask(StoreList(self._prefix)).keys]

    # --- queues: torch's C++ does not forward these to a store in Python, so not through a `PrefixStore` ----------

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        self._ask(StorePush(self._key(key), _bytes(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take a queue's first value, waiting for one up to the store's timeout.

        Raises `DistStoreError`; with `block=False`, `QueueEmptyError` for an empty queue.
        """
        limit = self._limit() if block else 0.0
        try:
            return self._ask(StorePop(self._key(key), limit), limit).value
        except DistStoreError as error:
            if block:
                raise
            raise QueueEmptyError(f"queue {key!r} is empty") from error

    def queue_len(self, key: str) -> int:
        """Number of values in a queue."""
        return self._ask(StoreLength(self._key(key))).number

    # --- the rest ----------------------------------------------------------------------------------------------

    def has_extended_api(self) -> bool:
        """True: this store has `append`, `multi_get` and `multi_set`."""
        return True

    def clone(self) -> Any:
        """This same store, since threads may share it."""
        return self

    # The names under which C++ looks up these two methods.
    deleteKey = delete_key
    getNumKeys = num_keys

    def close(self) -> None:
        """Close the connections; a blocked request ends with `GenerationHalted`."""
        with self._lock:
            self._closed = True
            in_use = list(self._in_use)
        for connection in in_use:
            connection.hang_up()
        if not self._shared:
            self._connections.close()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _named(request: StoreMessage) -> str:
    """A request with its keys and without its values, for messages."""
    fields = msgspec.structs.asdict(request)
    keys = fields.get("keys") or [fields.get("key", fields.get("prefix", ""))]
    return f"{type(request).__name__} of {', '.join(map(repr, keys[:3]))}{' …' if len(keys) > 3 else ''}"
