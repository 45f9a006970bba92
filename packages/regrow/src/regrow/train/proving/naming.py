"""Explains why a newcomer differs from a rank: names the first difference, and its likely cause in the script.

Pure.
"""

import re

from regrow.core.ids import Rank
from regrow.train.proving.trace import Computation, Difference, SeenAround, Trace

_Differing = tuple[str, SeenAround | None, SeenAround | None]
_MOST = 3
_MOST_CALLS = 2
_RANKS = re.compile(r"rank|is_main|is_master|is_chief", re.IGNORECASE)
_LAST = re.compile(r"((?:\(\))?\.)?([A-Za-z_][A-Za-z_0-9]*)$")
"""The last name of a path: after a dot an attribute, but after `().` a variable of the function."""
_HIDDEN = ("switch", "hooks", "patched", "context", "digest", "file", "database")
_ORDER = (
    *("generator", "clock", *_HIDDEN, "environment", "count", "number", "setting", "text"),
    *("tensor", "cache", "memo", "list"),
)
"""Order in which differences are named: values that a body reads come before those that it only gathers."""
_LIKELY = {
    "generator": "a generator of random numbers that is not protected",
    "clock": "a clock",
    "environment": "the environment",
    "count": "a counter",
    "number": "a statistic, or a number that was computed once",
    "setting": "a value found once, when the script was set up",
    "text": "data read once, when the script was set up (a file, the environment, a set-up collective)",
    "tensor": "a statistic, or data read or made once (a file, a set-up collective)",
    "cache": "a cache",
    "memo": "a cache of a function",
    "list": "data gathered since, or read once",
    "switch": "a setting that the script has switched since",
    "hooks": "registered since",
    "patched": "a function that was put in the place of another since",
    "context": "a context variable",
    "digest": "a running hash",
    "file": "an open file, which is read on from its position",
    "database": "a database of this process alone",
}


def refutation(rank: Trace, newcomer: Trace, found: list[Difference], *, rank_number: Rank) -> str:
    """Place and cause of a difference, for people.

    Args:
        rank: detailed trace of the rank.
        newcomer: trace of its shadow.
        found: the differences, in order.
        rank_number: the rank that was shadowed.
    """
    first = next((each for each in found if each.kind is not Computation.LOGGED), found[0])
    where = f"at step {rank.step} a newcomer in the place of rank {rank_number}"
    text = f"{where} would not compute the same: {_what(first, rank_number)}"
    causes = likely(rank, newcomer, rank_number)
    if causes:
        return f"{text}. Likely causes: {'; '.join(causes)}"
    return (
        f"{text}. Nothing that the script keeps differs: likely causes are a file or a service that it reads in its "
        "body, or kernels that do not repeat themselves"
    )


def _what(first: Difference, rank: Rank) -> str:
    if first.kind is Computation.RAISED:
        return first.label
    if first.rank or first.newcomer:
        return f"{first.label} is {first.rank or 'another'} on rank {rank}, {first.newcomer or 'another'} there"
    return f"{first.label} differs"


def likely(rank: Trace, newcomer: Trace, rank_number: Rank) -> list[str]:
    """Names of the script's own values that differ and that its body uses; the likeliest cause first."""
    used = set(newcomer.used)
    differing: list[_Differing] = [
        (path, theirs, newcomer.around.get(path))
        for path, theirs in rank.around.items()
        if (mine := newcomer.around.get(path)) is None or mine.digest != theirs.digest
    ]
    differing += [(path, None, mine) for path, mine in newcomer.around.items() if path not in rank.around]
    text = _sentences([each for each in differing if _mentions(each[0], used)], rank_number)
    if not text:
        memos = [path for path, seen in newcomer.around.items() if seen.what == "memo" and _mentions(path, used)]
        text = [f"`{path}`, which remembers what it has returned, in each process for itself" for path in memos]
        # Values that a library's code has read, or that have no name of their own, are named by their holder.
        text += _sentences([each for each in differing if _mentions_some(each[0], used)], rank_number)
    return text[:_MOST] + [f"the body calls {call}" for call in newcomer.called][:_MOST_CALLS]


def _sentences(differing: list[_Differing], rank_number: Rank) -> list[str]:
    """Differences in words, the likeliest first, without those inside a value that is named already."""
    text: list[str] = []
    seen: set[str] = set()
    for path, theirs, mine in sorted(differing, key=lambda each: (_place(each), len(each[0]))):
        if any(path.startswith((f"{known}[", f"{known}.")) for known in seen):
            continue
        seen.add(path)
        text.append(_cause(path, theirs, mine, rank_number))
    return text


def _place(differing: _Differing) -> int:
    path, theirs, mine = differing
    if theirs is None or mine is None:
        return len(_ORDER)
    return -1 if _RANKS.search(path) else _ORDER.index(theirs.what) if theirs.what in _ORDER else len(_ORDER)


def _mentions(path: str, used: set[str]) -> bool:
    """True if the body has used the last name of this path, or the path is in the environment or torch."""
    if path.startswith(("os.environ[", "torch.", "the ")):
        return True
    last = _LAST.search(re.sub(r"\[.*?\]", "", path))
    if last is None:
        return False
    dotted, name = last.group(1) == ".", last.group(2)
    return f".{name}" in used if dotted else name in used


def _mentions_some(path: str, used: set[str]) -> bool:
    """True if the body has used any name of this path."""
    names = re.findall(r"[A-Za-z_][A-Za-z_0-9]*", re.sub(r"\[.*?\]", "", path))
    return any(name in used or f".{name}" in used for name in names)


def _cause(path: str, theirs: SeenAround | None, mine: SeenAround | None, rank: Rank) -> str:
    seen = theirs or mine
    what = _LIKELY.get(seen.what, "") if seen is not None else ""
    if _RANKS.search(path):
        what = "a place in the world that was asked for before it was known"
    values = ""
    if theirs is None or mine is None:
        values = f" (only {'in the newcomer' if theirs is None else f'on rank {rank}'})"
    elif theirs.text or mine.text:
        values = f" ({theirs.text} on rank {rank}, {mine.text} there)"
    return f"`{path}`{values}, {what}".removesuffix(", ")
