"""The one error tree: all exceptions that are caught outside the file that raises them.

Every error names its cause, its place and a cure. `PUBLIC` lists the errors that a user's script or program may get.
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
"""Values of `OSError.errno` for a shortage that may be over soon. All other errors are permanent refusals."""


REFUSALS = frozenset({ENOSYS, EPERM, EACCES, EOPNOTSUPP, EINVAL})
"""Values of `OSError.errno` for a call that the kernel lacks, or that a system call filter (seccomp) rejects."""


def passes(error: BaseException | None) -> bool:
    """True if the error is a shortage that may pass, so that another attempt may succeed."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in PASSING:
            return True
        error = error.__cause__
    return False


class RegrowError(Exception):
    """Base of all errors that regrow raises on purpose.

    Args:
            cause: what went wrong, and where.
            hint: advice to the reader.
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
    """The agent has closed the channel: this process has no agent left to work for, and should end."""


class CoordinatorGone(RegrowError):
    """No process answers at the coordinator's address."""


class NoPlaceYet(UsageError):
    """The job has no room for this node yet, because another node, which may leave, has the place."""


class StoreRefusal(RegrowError):
    """The key-value store refuses a client's request; the client gets the message."""


class StoreNodeLost(RegrowError):
    """Another agent, which keeps some of the keys, cannot be reached, has ended, or does not answer."""


class GenerationHalted(RegrowError):
    """The generation in which this call was made has ended; the step will run again. Absorbed by `with step`."""


class StepGivenUp(GenerationHalted):
    """Raised on a rank that must abandon its step because another rank reports a reason to run the step again."""


class CollectiveMisuse(RegrowError):
    """The script's own call of a collective is wrong: its dtype, operation or shape, or it differs from another rank's.

    It is an error of the script, like one in its body, and not a symptom of a peer's failure.
    """


class NotFinite(RegrowError):
    """A loss or a gradient of this rank is NaN or infinite, in a job that was asked to check for that."""


class SumNotFinite(NotFinite):
    """A sum over ranks is NaN or infinite, and it is not known which rank caused it."""


class StateError(RegrowError):
    """Protected state cannot be named or encoded, or does not match between two workers."""


class SetUpDiffers(RegrowError):
    """Before its loop, a newcomer received other data than the worker that it replaces, so it would not be equal."""


class Torn(StateError):
    """A segment of shared memory holds no complete copy of state, or a different copy from the requested one."""


class DamagedCopy(Torn):
    """Bytes of a copy do not match the checksum that was taken when it was made."""


class NoMemoryForCopy(RegrowError):
    """There is not enough memory for another copy of state."""


class HydrationError(RegrowError):
    """State could not be received from the living peers."""


class CheckpointError(RegrowError):
    """A durable checkpoint is missing, incomplete, or does not fit."""


class OtherFormat(CheckpointError):
    """The checkpoint may be complete, but this version cannot read its format."""


class DataError(RegrowError):
    """Training data cannot be read: a line is malformed, or a file has changed since it was opened."""


class NoRoom(RegrowError):
    """The disk or the shared memory is full. Entries that are already cached stay."""


class CacheUnusable(RegrowError):
    """The cache's folder is read-only, belongs to another user, or is gone. Training goes on without the cache."""


class Damaged(RegrowError):
    """A file of the cache is not a complete entry of this identity and key, and was removed. `cause` says why."""


class Unfit(RegrowError):
    """A producer of batches cannot make batches for a certain worker; the message gives the reason."""


class NotCacheable(RegrowError):
    """The batch contains something that cannot be reproduced exactly. `reason` names it and its place in the batch."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotCarried(UsageError):
    """A value's state cannot be read or written back. `of`: the object whose state it is; None: the value itself."""

    def __init__(self, path: str, value: object, reason: str, *, of: object = None) -> None:
        self.path, self.value = path, value if of is None else of
        self.more: list[NotCarried] = []
        """The same error for other values, found in the same inspection."""
        name = re.split(r"[.\[]", path, maxsplit=1)[0]
        super().__init__(
            f"{path} ({type(value).__name__}) cannot be protected: {reason}",
            hint=f"give `{name}` state_dict() and load_state_dict(), or get_state() and set_state(), for all that "
            "steps change in it",
        )


class NotPlain(Exception):
    """A script's variable is not plain data, or contains itself, so it is not kept. Not an error for the user."""


class TooLarge(Exception):
    """A script's variable has more leaves than regrow inspects, so it is not kept. Not an error for the user."""


class Rehearsed(BaseException):
    """The training function has reached its first update: the rehearsal ends. Not an error; no handler may catch it."""


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
