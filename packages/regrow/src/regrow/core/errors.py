"""The one error tree: all exceptions that are caught outside the file that raises them.

Every error names its cause, its place and a cure. `PUBLIC` lists those that a user's script or program may get.
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
"""Values of `OSError.errno` for a shortage that may be over soon. Other errors are refusals, which stay."""


REFUSALS = frozenset({ENOSYS, EPERM, EACCES, EOPNOTSUPP, EINVAL})
"""Values of `OSError.errno` for a call that the kernel lacks, or that a system call filter (seccomp) rejects."""


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
    """The agent has closed the channel: this process has no one left to work for and should end."""


class CoordinatorGone(RegrowError):
    """No process answers at the coordinator's address."""


class NoPlaceYet(UsageError):
    """The job has no place for a node while another node, which may leave, has it."""


class StoreRefusal(RegrowError):
    """The key-value store refuses a client's request; the message goes back to the client."""


class StoreNodeLost(RegrowError):
    """Another agent, which keeps keys, cannot be reached, has ended, or does not answer."""


class GenerationHalted(RegrowError):
    """The generation in which this call was made has ended; the step will run again. Absorbed by `with step`."""


class StepGivenUp(GenerationHalted):
    """Another rank has a reason to run the step again, and reports that reason itself."""


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
    """Before its loop a newcomer receives something else than the worker that it replaces: it would not be equal."""


class Torn(StateError):
    """A segment of shared memory holds no complete copy of state, or another copy than the requested one."""


class DamagedCopy(Torn):
    """Bytes of a copy do not match the checksum that was taken when it was made."""


class NoMemoryForCopy(RegrowError):
    """There is not enough memory for another copy of state."""


class HydrationError(RegrowError):
    """State could not be received from the living peers."""


class CheckpointError(RegrowError):
    """A durable checkpoint is missing, incomplete, or does not fit."""


class OtherFormat(CheckpointError):
    """The checkpoint may be whole, but this version cannot read it."""


class DataError(RegrowError):
    """Training data cannot be read: a line is malformed, or a file has changed since it was opened."""


class NoRoom(RegrowError):
    """The disk or the shared memory is full; what is cached stays."""


class CacheUnusable(RegrowError):
    """The cache's folder is read-only, another user's, or gone. Training goes on without the cache."""


class Damaged(RegrowError):
    """The file is not a whole entry of this identity and key, and was removed. `cause` says what was wrong."""


class Unfit(RegrowError):
    """A producer of batches cannot make batches for that worker; the message says why."""


class NotCacheable(RegrowError):
    """The batch holds something that cannot be reproduced exactly. `reason` says what it is, and where in the batch."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotCarried(UsageError):
    """A value whose state cannot be read or written back. `of`: the object that has it, if it is not one itself."""

    def __init__(self, path: str, value: object, reason: str, *, of: object = None) -> None:
        self.path, self.value = path, value if of is None else of
        self.more: list[NotCarried] = []
        """The same error for other values, found in the same look."""
        name = re.split(r"[.\[]", path, maxsplit=1)[0]
        super().__init__(
            f"{path} ({type(value).__name__}) cannot be protected: {reason}",
            hint=f"give `{name}` state_dict() and load_state_dict(), or get_state() and set_state(), for all that "
            "steps change in it",
        )


class NotPlain(Exception):
    """A script's variable holds something that is not plain, or contains itself: it is not kept. Not an error."""


class TooLarge(Exception):
    """A script's variable has more leaves than regrow follows: it is not kept. Not an error."""


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
