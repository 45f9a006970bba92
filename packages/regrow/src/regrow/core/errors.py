"""The one error tree. Every error names cause, place and cure."""

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


class HydrationError(RegrowError):
    """State could not be received from the living peers."""


class CheckpointError(RegrowError):
    """A durable checkpoint is missing, torn, or does not fit."""


class DataError(RegrowError):
    """Training data cannot be read: a line is malformed, or a file has changed since it was opened."""
