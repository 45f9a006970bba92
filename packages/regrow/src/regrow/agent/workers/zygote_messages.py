"""Messages between an agent and its zygote: one packet each over an inherited socket pair."""

import msgspec

from regrow.core.config import Script, WorkerEnv
from regrow.core.ids import Instant, Seconds, WorkerId


class ZygoteSetup(msgspec.Struct, frozen=True, tag=True):
    """First packet: the modules to import and the workers to guard.

    `guarded`: process ids of an earlier zygote's workers; `path_entry`: first entry of `sys.path`, for `preload`.
    """

    agent: int
    preload: list[str]
    path_entry: str | None
    one_thread: bool
    guarded: list[int]


class SpawnRequest(msgspec.Struct, frozen=True, tag=True):
    """Order to fork a worker; the packet carries channel, board, standard output and standard error, in this order.

    `variables` are added to the environment in which the zygote was started. `at`: time on the monotonic clock.
    """

    env: WorkerEnv
    script: Script
    variables: dict[str, str]
    at: Instant = 0.0


class ForgetWorker(msgspec.Struct, frozen=True, tag=True):
    """Notice that a worker and its session are gone: its process id may soon belong to another process."""

    pid: int


class EndZygote(msgspec.Struct, frozen=True, tag=True):
    """Order to end the zygote, as no more workers are needed."""


class ZygoteReady(msgspec.Struct, frozen=True, tag=True):
    """Report that imports are done. More than one thread makes a fork unsafe.

    `missing`: reason why `regrow.train` could not be imported. `started`: modules of `preload` and their threads.
    """

    threads: int
    seconds: Seconds
    missing: str = ""
    started: str = ""


class ZygoteFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that imports failed; the zygote ends."""

    kind: str
    message: str
    traceback: str


class Spawned(msgspec.Struct, frozen=True, tag=True):
    """Report that the worker's process exists and is about to be the agent's child."""

    worker: WorkerId
    pid: int


class SpawnFailed(msgspec.Struct, frozen=True, tag=True):
    """Report that the kernel refused to fork the worker."""

    worker: WorkerId
    reason: str


ZygoteOrder = ZygoteSetup | SpawnRequest | ForgetWorker | EndZygote
ZygoteFact = ZygoteReady | ZygoteFailed | Spawned | SpawnFailed

PACKET_BYTES = 1 << 20
DESCRIPTORS = 4
