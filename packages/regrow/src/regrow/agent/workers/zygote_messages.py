"""Messages between an agent and its zygote: one packet each over an inherited socket pair."""

import msgspec

from regrow.core.config import Script, WorkerEnv
from regrow.core.ids import Instant, Seconds, WorkerId


class ZygoteSetup(msgspec.Struct, frozen=True, tag=True):
    """First packet: what to import and whom to guard.

    `guarded`: workers of an earlier zygote; `path_entry`: first entry of `sys.path`, for `preload`.
    """

    agent: int
    preload: list[str]
    path_entry: str | None
    one_thread: bool
    guarded: list[int]


class SpawnRequest(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker; the packet carries channel, board, standard output and standard error, in this order.

    `variables` come on top of the environment that the zygote was started in. `at`: when, on the monotonic clock.
    """

    env: WorkerEnv
    script: Script
    variables: dict[str, str]
    at: Instant = 0.0


class ForgetWorker(msgspec.Struct, frozen=True, tag=True):
    """This worker and its session are gone: its number may belong to someone else soon."""

    pid: int


class EndZygote(msgspec.Struct, frozen=True, tag=True):
    """No more workers are wanted."""


class ZygoteReady(msgspec.Struct, frozen=True, tag=True):
    """Imports are done. More than one thread makes a fork unsafe.

    `missing`: why `regrow.train` is not among them. `started`: which module of `preload` has started which threads.
    """

    threads: int
    seconds: Seconds
    missing: str = ""
    started: str = ""


class ZygoteFailed(msgspec.Struct, frozen=True, tag=True):
    """Imports failed; the zygote ends."""

    kind: str
    message: str
    traceback: str


class Spawned(msgspec.Struct, frozen=True, tag=True):
    """The worker's process exists and is about to be the agent's child."""

    worker: WorkerId
    pid: int


class SpawnFailed(msgspec.Struct, frozen=True, tag=True):
    """The kernel refused."""

    worker: WorkerId
    reason: str


ZygoteOrder = ZygoteSetup | SpawnRequest | ForgetWorker | EndZygote
ZygoteFact = ZygoteReady | ZygoteFailed | Spawned | SpawnFailed

PACKET_BYTES = 1 << 20
DESCRIPTORS = 4
