"""Messages to the key-value store, from workers and agents, over a stream of frames.

A worker speaks to the agent of its node, agents speak to one another. `ask` numbers the requests of a connection; a
reply carries the number of its request, and may overtake others.
"""

import re
from typing import NamedTuple

import msgspec

from regrow.core.ids import Seconds

_GLOO = re.compile(r"([^/]*)//\w+//\d+/(\d+)(?:@\d+)?$")


class GlooAddress(NamedTuple):
    """A key in which gloo publishes where a rank listens: written once, and read by those that connect to it.

    Attributes:
        group: torch's name of the group; "0" is the default group.
        rank: in that group.
    """

    group: str
    rank: int


def gloo_address(key: str) -> GlooAddress | None:
    """Parse the key if it is one of gloo's: `<prefix>/<group>//<device>//<number>/<rank>`, and perhaps placed."""
    match = _GLOO.search(key)
    return None if match is None else GlooAddress(match.group(1), int(match.group(2)))


def placed(name: str, rank: int) -> str:
    """A name for a key that is to live with the agent of the given rank of the world, and to be read straight there."""
    return f"{name}@{rank}"


class StoreMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """A request. `ask`: its number on this connection."""

    ask: int = 0


class StoreHello(StoreMessage, frozen=True, tag=True):
    """First frame of a connection: who does not know the job's token is hung up on.

    `agent`: where the caller can be told to forget what it has cached; empty for a worker, which caches nothing.
    `quiet`: it needs no reply.
    """

    token: str
    agent: str = ""
    quiet: bool = False


class StoreCancel(StoreMessage, frozen=True, tag=True):
    """The answer to request `ask` is wanted no more. Gets no reply."""


class StoreSet(StoreMessage, frozen=True, tag=True):
    """Write a value. `quiet`: there is no reply where that was done."""

    key: str
    value: bytes
    quiet: bool = False


class StoreGet(StoreMessage, frozen=True, tag=True):
    """Read a value, waiting up to `timeout` seconds for it to exist.

    `queue`: a queue that is not empty will do; the reply then has no value, and 1 in `number`.
    `has`: of what ranks publish of themselves: how much the asker has got with other answers; None: it wants no more.
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
    """Add to a counter kept as decimal text; replies its new value in `number`."""

    key: str
    amount: int


class StoreAppend(StoreMessage, frozen=True, tag=True):
    """Add bytes to the end of a value."""

    key: str
    value: bytes


class StoreCheck(StoreMessage, frozen=True, tag=True):
    """Are all these keys there? Replies 1 or 0 in `number`."""

    keys: list[str]


class StoreWait(StoreMessage, frozen=True, tag=True):
    """Wait until all these keys are there."""

    keys: list[str]
    timeout: Seconds


class StoreCompareSet(StoreMessage, frozen=True, tag=True):
    """Write `desired` if the value is `expected` (or is absent and `expected` is empty).

    Replies the value after; where there is none, `expected`.
    """

    key: str
    expected: bytes
    desired: bytes


class StoreDelete(StoreMessage, frozen=True, tag=True):
    """Remove a key; replies in `number` whether it was there."""

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
    """Ask for the length of a queue, returned in `number`."""

    key: str


class StoreCount(StoreMessage, frozen=True, tag=True):
    """Ask for the number of keys that begin with `prefix`, in `number`. `here`: in this agent's memory alone."""

    prefix: str = ""
    here: bool = False


class StoreList(StoreMessage, frozen=True, tag=True):
    """The keys that begin with `prefix`, in `keys`. `here`: in this agent's memory alone."""

    prefix: str = ""
    here: bool = False


class StoreForget(StoreMessage, frozen=True, tag=True):
    """To an agent that was given a copy: the value is about to change. It answers when no copy is left below it."""

    key: str


class StoreTable(StoreMessage, frozen=True, tag=True):
    """One agent to another: the table of a generation with the number `table`, in `value`, or `TIMEOUT`."""

    table: int
    timeout: Seconds


class AnswersNoted(StoreMessage, frozen=True, tag=True):
    """Answers of set-up's collectives, by name, for who builds later. What is there stays as it is.

    `build`: which start of all workers they are of; those of an earlier one are forgotten. `rank`: whose they are.
    `copied`: another agent keeps them too. `quiet`: it needs no reply.
    """

    build: int
    rank: int
    answers: dict[str, bytes]
    copied: bool = False
    quiet: bool = False


class AnswersAsked(StoreMessage, frozen=True, tag=True):
    """Those of these answers that are there, by name in `also`, as soon as one is; `TIMEOUT` where none came in time.

    `names`: the first is what is wanted, unless they are pieces; others would say that it does not come.
    `rank`: whose set-up it is. `here`: in this agent's memory alone.
    """

    build: int
    rank: int
    names: list[str]
    timeout: Seconds
    here: bool = False


class StoreReply(StoreMessage, frozen=True, tag=True):
    """The answer to any request. `error`: empty, or one of the constants below, or a sentence.

    `keep`: the asking agent may cache the value, and will be told when it changes. `also`: other keys and their values,
    of which the same holds, and `has`: what to say next in `StoreGet.has`.
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
"""`StoreReply.error` where a wait reached its deadline."""
NO_COUNTER = "no counter"
"""`StoreReply.error` where something is added to a value that is no number."""
TABLE_BYTES = 1 << 30
"""Most of all keys and values that one agent keeps."""
FIRST_SPAWNED = "first-spawned"
"""Key of an agent with the generation of the first worker that it was told to spawn."""

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
