"""An exception as text for users, without the frames of the machinery around the script."""

import linecache
import sysconfig
import traceback

from regrow.core.errors import RegrowError
from regrow.core.messages.vocabulary import ErrorReport
from regrow.core.process.own_code import is_own_file
from regrow.core.process.shortage import short_of_processes

_MACHINERY = ("<frozen runpy>", "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_LIBRARIES = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_TEXT_LIMIT = 64 << 10
_MESSAGE_LIMIT = 8 << 10


def report(error: BaseException) -> ErrorReport:
    """Type, message, trimmed traceback and `file:line` of the innermost frame of the user's own code.

    Frames of regrow stay if an unintended error comes from one, because only they show the cause.
    """
    linecache.checkcache()
    shown = traceback.TracebackException.from_exception(error)
    where = _where(error, shown)
    _trim(shown, error, set())
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    short = short_of_processes(error)
    return ErrorReport(
        type=name,
        message=_shortened(f"{shown}: {short}" if short else str(shown), _MESSAGE_LIMIT),
        traceback=_shortened("".join([*shown.format(), f"{short}\n" if short else ""]), _TEXT_LIMIT),
        where=where,
    )


def _is_ours(filename: str) -> bool:
    return is_own_file(filename) or filename in _MACHINERY


def _where(error: BaseException, shown: traceback.TracebackException) -> str:
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in shown.stack if not _is_ours(frame.filename)]
    own_code = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    chosen = own_code or frames
    return f"{chosen[-1].filename}:{chosen[-1].lineno}" if chosen else ""


def _trim(shown: traceback.TracebackException, error: BaseException | None, seen: set[int]) -> None:
    if id(shown) in seen:
        return
    seen.add(id(shown))
    if not _is_of_ours(shown, error):
        kept = [frame for frame in shown.stack if not _is_ours(frame.filename)]
        shown.stack = traceback.StackSummary.from_list(kept)
    # Pairs of a shown part of the traceback and the exception of which it is a part.
    related = [
        (shown.__cause__, error and error.__cause__),
        (shown.__context__, error and error.__context__),
        *zip(getattr(shown, "exceptions", None) or [], getattr(error, "exceptions", None) or [], strict=False),
    ]
    for other, its in related:
        if other is not None:
            _trim(other, its, seen)


def _is_of_ours(shown: traceback.TracebackException, error: BaseException | None) -> bool:
    """True if the innermost frame is regrow's and the error is not one that regrow raises for people."""
    return bool(shown.stack) and is_own_file(shown.stack[-1].filename) and not isinstance(error, RegrowError)


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - limit} characters left out ...\n{text[-half:]}"
