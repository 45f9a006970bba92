"""Messages from workers and agents to the key-value store, over a stream of frames.

A worker sends requests to the agent of its node, and agents to each other. `ask` numbers the requests of a connection;
a reply has the number of its request, and may overtake other replies.
"""

import re
from typing import NamedTuple

import msgspec

from regrow.core.ids import Seconds

_GLOO = re.compile(r"([^/]*)//\w+//\d+/(\d+)(?:@\d+)?$")


class GlooAddress(NamedTuple):
    """A key under which gloo publishes a rank's address: written once, and read by the ranks that connect to it.

    Attributes:
        group: torch's name of the group; "0" is the default group.
        rank: rank in that group.
    """

    group: str
    rank: int


def gloo_address(key: str) -> GlooAddress | None:
    """Parse a key of the form `<prefix>/<group>//<device>//<number>/<rank>`, possibly `placed`; None for other keys."""
    match = _GLOO.search(key)
    return None if match is None else GlooAddress(match.group(1), int(match.group(2)))


def placed(name: str, rank: int) -> str:
    """Name of a key that is kept, and read directly, at the agent of rank `rank` of the world."""
    return f"{name}@{rank}"


class StoreMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """A request to the store. `ask`: its number on this connection."""

    ask: int = 0


class StoreHello(StoreMessage, frozen=True, tag=True):
    """First frame of a connection. Callers that do not know the job's token are disconnected.

    `agent`: address to which `StoreForget` can be sent; empty for a worker, which caches nothing.
    `quiet`: the caller needs no reply.
    """

    token: str
    agent: str = ""
    quiet: bool = False


class StoreCancel(StoreMessage, frozen=True, tag=True):
    """Drop request `ask`, whose answer is not needed any more. Gets no reply."""


class StoreSet(StoreMessage, frozen=True, tag=True):
    """Write a value. `quiet`: success gets no reply."""

    key: str
    value: bytes
    quiet: bool = False


class StoreGet(StoreMessage, frozen=True, tag=True):
    """Read a value, waiting up to `timeout` seconds for it to exist.

    `queue`: a non-empty queue of that name counts as well; the reply then has no value, and 1 in `number`.
    `has`: number of values published by ranks that the sender got with other answers so far; None: it wants no more.
    """

    key: str
    timeout: Seconds
    queue: bool = False
    has: int | None = None


class StoreMultiGet(StoreMessage, frozen=True, tag=True):
    """Read several values into `values`, in the order of the keys; waits up to `timeout` seconds for all of them."""

    keys: list[str]
    timeout: Seconds


class StoreMultiSet(StoreMessage, frozen=True, tag=True):
    """Write several values, in the order of the keys."""

    keys: list[str]
    values: list[bytes]


class StoreAdd(StoreMessage, frozen=True, tag=True):
    """Add to a counter, stored as decimal text; the reply has its new value in `number`."""

    key: str
    amount: int


class StoreAppend(StoreMessage, frozen=True, tag=True):
    """Append bytes to a value."""

    key: str
    value: bytes


class StoreCheck(StoreMessage, frozen=True, tag=True):
    """Check whether all these keys exist; the reply has 1 or 0 in `number`."""

    keys: list[str]


class StoreWait(StoreMessage, frozen=True, tag=True):
    """Wait until all these keys exist."""

    keys: list[str]
    timeout: Seconds


class StoreCompareSet(StoreMessage, frozen=True, tag=True):
    """Write `desired` if the value is `expected` (or if there is no value and `expected` is empty).

    The reply has the value after that; if there is none, `expected`.
    """

    key: str
    expected: bytes
    desired: bytes


class StoreDelete(StoreMessage, frozen=True, tag=True):
    """Remove a key; the reply has 1 in `number` if it existed, else 0."""

    key: str


class StorePush(StoreMessage, frozen=True, tag=True):
    """Put a value at the end of a queue."""

    key: str
    value: bytes


class StorePop(StoreMessage, frozen=True, tag=True):
    """Take the first value of a queue, waiting up to `timeout` seconds for one."""

    key: str
    timeout: Seconds


class StoreLength(StoreMessage, frozen=True, tag=True):
    """Read the length of a queue; the reply has it in `number`."""

    key: str


class StoreCount(StoreMessage, frozen=True, tag=True):
    """Count the keys that begin with `prefix`; the reply has `number`. `here`: only those in this agent's memory."""

    prefix: str = ""
    here: bool = False


class StoreList(StoreMessage, frozen=True, tag=True):
    """List the keys that begin with `prefix`; the reply has `keys`. `here`: only those in this agent's memory."""

    prefix: str = ""
    here: bool = False


class StoreForget(StoreMessage, frozen=True, tag=True):
    """To an agent with a cached copy: the value is about to change. It answers when no copy is left below it."""

    key: str


class StoreTable(StoreMessage, frozen=True, tag=True):
    """One agent to another: send me the table with the number `table`. The reply has it in `value`, or is `TIMEOUT`."""

    table: int
    timeout: Seconds


class AnswersNoted(StoreMessage, frozen=True, tag=True):
    """Answers of the set-up's collectives, by name, for workers that build later. Existing answers are not replaced.

    `build`: number of the start of all workers to which the answers belong; earlier ones are dropped. `rank`: the rank
    that got them. `copied`: another agent keeps them too. `quiet`: the sender needs no reply.
    """

    build: int
    rank: int
    answers: dict[str, bytes]
    copied: bool = False
    quiet: bool = False


class AnswersAsked(StoreMessage, frozen=True, tag=True):
    """Ask for these answers, as soon as one of them exists; the reply has them in `also`, or is `TIMEOUT`.

    `names`: the first is the wanted answer (or all are its pieces); any other would show that the first will not come.
    `rank`: the rank that builds. `here`: only those in this agent's memory.
    """

    build: int
    rank: int
    names: list[str]
    timeout: Seconds
    here: bool = False


class StoreReply(StoreMessage, frozen=True, tag=True):
    """The answer to any request. `error`: empty, or one of the constants below, or a sentence.

    `keep`: the agent that asked may cache the value, and is notified when it changes. `also`: other keys with their
    values, which the agent may cache too. `has`: the value for the next `StoreGet.has`.
    """

    value: bytes = b""
    number: int = 0
    error: str = ""
    values: list[bytes] = []
    keys: list[str] = []
    keep: bool = False
    also: dict[str, bytes] = {}
    has: int = 0


TIMEOUT = "timeout"
"""`StoreReply.error` of a wait that reached its deadline."""
NO_COUNTER = "no counter"
"""`StoreReply.error` of an addition to a value that is not a number."""
TABLE_BYTES = 1 << 30
"""Largest total size of the keys and values that one agent keeps."""
FIRST_SPAWNED = "first-spawned"
"""Key of an agent; its value is the generation of the first worker that it was ordered to spawn."""

StoreRequest = (
    StoreHello
    | StoreCancel
    | StoreSet
    | StoreGet
    | StoreMultiGet
    | StoreMultiSet
    | StoreAdd
    | StoreAppend
    | StoreCheck
    | StoreWait
    | StoreCompareSet
    | StoreDelete
    | StorePush
    | StorePop
    | StoreLength
    | StoreCount
    | StoreList
    | StoreForget
    | StoreTable
    | AnswersNoted
    | AnswersAsked
)
