"""What a worker and the agent's key-value store say to one another, over a stream of frames."""

import msgspec

from regrow.core.ids import Seconds


class StoreHello(msgspec.Struct, frozen=True, tag=True):
    """First frame of a connection: who does not know the job's token is hung up on."""

    token: str


class StoreSet(msgspec.Struct, frozen=True, tag=True):
    """Write a value."""

    key: str
    value: bytes


class StoreGet(msgspec.Struct, frozen=True, tag=True):
    """Read a value, waiting up to `timeout` seconds for it to exist."""

    key: str
    timeout: Seconds


class StoreAdd(msgspec.Struct, frozen=True, tag=True):
    """Add to a counter kept as decimal text; replies its new value in `number`."""

    key: str
    amount: int


class StoreCheck(msgspec.Struct, frozen=True, tag=True):
    """Are all these keys there? Replies 1 or 0 in `number`."""

    keys: list[str]


class StoreWait(msgspec.Struct, frozen=True, tag=True):
    """Wait until all these keys are there."""

    keys: list[str]
    timeout: Seconds


class StoreCompareSet(msgspec.Struct, frozen=True, tag=True):
    """Write `desired` if the value is `expected` (or is absent and `expected` is empty); replies the value after."""

    key: str
    expected: bytes
    desired: bytes


class StoreDelete(msgspec.Struct, frozen=True, tag=True):
    """Remove a key; replies in `number` whether it was there."""

    key: str


class StoreCount(msgspec.Struct, frozen=True, tag=True):
    """How many keys there are, in `number`."""


class StoreReply(msgspec.Struct, frozen=True, tag=True):
    """The answer to any request. `error`: empty, or `timeout`, or a sentence."""

    value: bytes = b""
    number: int = 0
    error: str = ""


StoreRequest = (
    StoreHello | StoreSet | StoreGet | StoreAdd | StoreCheck | StoreWait | StoreCompareSet | StoreDelete | StoreCount
)
