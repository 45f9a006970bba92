"""The one error tree: all exceptions that are caught outside the file that raises them.

Every error names cause, place and cure. `PUBLIC` are those that a script or a program of the user's may meet.
"""

import re
from errno import (
    EACCES,
    EAGAIN,
    EDQUOT,
    EINTR,
    EINVAL,
    EMFILE,
    ENFILE,
    ENOBUFS,
    ENOMEM,
    ENOSPC,
    ENOSYS,
    EOPNOTSUPP,
    EPERM,
)

PASSING = frozenset({EMFILE, ENFILE, ENOMEM, EAGAIN, ENOSPC, EDQUOT, ENOBUFS, EINTR})
"""Of `OSError.errno`: what is short now may be there again soon. Others are refusals, which stay."""


REFUSALS = frozenset({ENOSYS, EPERM, EACCES, EOPNOTSUPP, EINVAL})
"""Of a call that a kernel does not have, or a filter of system calls (seccomp) does not let through."""


def passes(error: BaseException | None) -> bool:
    """True if trying again may help."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in PASSING:
            return True
        error = error.__cause__
    return False


class RegrowError(Exception):
    """Base of all errors that regrow raises on purpose.

    Args:
        cause: what went wrong, and where.
        hint: what the reader can do about it.
    """

    def __init__(self, cause: str, *, hint: str = "") -> None:
        super().__init__(f"{cause} ({hint})" if hint else cause)
        self.cause = cause
        self.hint = hint


class UsageError(RegrowError):
    """The command line, the environment or an API call is wrong; nothing was started or changed."""


class ProtocolError(RegrowError):
    """A peer sent something that this version does not understand, or the wrong token."""


class DeadlineExceeded(RegrowError):
    """A wait reached its deadline."""


class AgentGone(RegrowError):
    """The agent has closed the channel: this process has no one left to work for and should end."""


class CoordinatorGone(RegrowError):
    """Nobody answers at the coordinator's address."""


class NoPlaceYet(UsageError):
    """The job has no place for a node as long as another one has it, which may leave."""


class StoreRefusal(RegrowError):
    """The key-value store does not do what a client asks; the sentence goes back to the client."""


class StoreNodeLost(RegrowError):
    """Another agent, which keeps keys, cannot be reached, or has ended, or does not answer."""


class GenerationHalted(RegrowError):
    """The membership under this call was given up; the step will run again. Absorbed by `with step`."""


class StepGivenUp(GenerationHalted):
    """Another rank has a reason to run the step again, and tells it itself."""


class CollectiveMisuse(RegrowError):
    """The script's own call of a collective is wrong: its dtype, operation or shape, or another rank calls another.

    It is the script's error, as one in its body is, and not a symptom of a peer's.
    """


class NotFinite(RegrowError):
    """A loss or a gradient of this rank is NaN or infinite, in a job that was asked to check for that."""


class SumNotFinite(NotFinite):
    """The same of a sum over ranks, and from which of them it came is not known."""


class StateError(RegrowError):
    """Protected state cannot be named, encoded, or does not fit between two workers."""


class SetUpDiffers(RegrowError):
    """A newcomer hears something else before its loop than the worker whose rank it takes: it would not be equal."""


class Torn(StateError):
    """A segment of shared memory holds no whole copy of state, or another one than was asked for."""


class DamagedCopy(Torn):
    """Bytes of a copy do not match the checksum that was taken when it was made."""


class NoMemoryForCopy(RegrowError):
    """There is not enough memory for another copy of state."""


class HydrationError(RegrowError):
    """State could not be received from the living peers."""


class CheckpointError(RegrowError):
    """A durable checkpoint is missing, torn, or does not fit."""


class OtherFormat(CheckpointError):
    """The checkpoint may be whole, and this version does not read it."""


class DataError(RegrowError):
    """Training data cannot be read: a line is malformed, or a file has changed since it was opened."""


class NoRoom(RegrowError):
    """The disk or the shared memory is full; what is cached stays."""


class CacheUnusable(RegrowError):
    """The cache's folder cannot be written or read: it is read-only, not ours, or gone. Training goes on without it."""


class Damaged(RegrowError):
    """The file is no whole entry of this identity and key; it has been removed. `cause` says what was wrong."""


class Unfit(RegrowError):
    """A producer of batches makes nothing for that worker, and says why."""


class NotCacheable(RegrowError):
    """The batch holds something that cannot be given again exactly as it is. `reason` says what, and where in it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotCarried(UsageError):
    """A value whose state cannot be read, or not be written again. `of`: what has it, where it is no thing itself."""

    def __init__(self, path: str, value: object, reason: str, *, of: object = None) -> None:
        self.path, self.value = path, value if of is None else of
        self.more: list[NotCarried] = []
        """Of other values, seen in the same look."""
        name = re.split(r"[.\[]", path, maxsplit=1)[0]
        super().__init__(
            f"{path} ({type(value).__name__}) cannot be protected: {reason}",
            hint=f"give `{name}` state_dict() and load_state_dict(), or get_state() and set_state(), for all that "
            "steps change in it",
        )


class NotPlain(Exception):
    """A variable of the script's holds something that is not plain, or itself: it is not kept. No error."""


class TooLarge(Exception):
    """A variable of the script's has more leaves than are followed: it is not kept. No error."""


class Rehearsed(BaseException):
    """The training's function has come to its first update: the rehearsal is over. No error; no handler may take it."""


PUBLIC = (
    RegrowError,
    UsageError,
    ProtocolError,
    DeadlineExceeded,
    CollectiveMisuse,
    NotFinite,
    StateError,
    SetUpDiffers,
    HydrationError,
    CheckpointError,
    DataError,
)
"""Errors that reach scripts and callers of regrow's functions; frozen in a test."""
