"""Sends error rows again: removes them from the journal, or from the output of a finished batch."""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from regrow.core.errors import UsageError
from regrow_batch.journal import Journal
from regrow_batch.places import BatchStopped
from regrow_batch.report import error_of
from regrow_batch.tables.files import open_unpacked

EVERY = "every"
NOT_THEIRS = "not-theirs"
_NAME = "batch_req_"


class _Numbered(msgspec.Struct):
    id: str


def send_again(journal: Journal, output: str, reasons: Iterable[str]) -> Counter[str]:
    """Remove the error rows with these reasons from a journal; returns their numbers, by reason.

    Args:
        journal: of a finished or an unfinished batch.
        output: the file of the results of a finished batch.
        reasons: error codes; `every`; or `not-theirs`: error rows that are not known to be at fault themselves.

    Raises `UsageError` if no error row has one of the reasons, `BatchStopped` if the disk is full.
    """
    wanted = set(reasons)
    left_out: Counter[str] = Counter()
    known: Counter[str] = Counter()
    for _, result in _results(journal, output):
        error = error_of(result)
        if error is not None:
            known[error.code] += 1
            if _is_wanted(error.code, wanted, own=error.is_its_own):
                left_out[error.code] += 1
    strange = wanted - set(known) - {EVERY, NOT_THEIRS}
    if strange:
        there = ", ".join(f"{code} ({count:,})" for code, count in sorted(known.items())) or "none"
        raise UsageError(f"--retry-errors: no row has the error {sorted(strange)[0]!r}", hint=f"there are {there}")
    if left_out:
        journal.begin_anew(_kept(journal, output, wanted))
    return left_out


def _kept(journal: Journal, output: str, wanted: set[str]) -> Iterator[tuple[int, bytes]]:
    for number, result in _results(journal, output):
        error = error_of(result)
        if error is None or not _is_wanted(error.code, wanted, own=error.is_its_own):
            yield number, result


def _is_wanted(code: str, wanted: set[str], *, own: bool) -> bool:
    return EVERY in wanted or code in wanted or (NOT_THEIRS in wanted and not own)


def _results(journal: Journal, output: str) -> Iterator[tuple[int, bytes]]:
    """Each row's number and result. Of two results of a row in the journal the first counts, later ones are skipped."""
    if not journal.head.rows or journal.head.kept:
        seen: set[int] = set()
        for number, _, result in journal.rows():
            if number not in seen:
                seen.add(number)
                yield number, result
        return
    with open_unpacked(output) as stream:
        for line in stream:
            result = line.rstrip(b"\n")
            try:
                yield int(msgspec.json.decode(result, type=_Numbered).id.removeprefix(_NAME)), result
            except (msgspec.DecodeError, ValueError) as error:
                raise BatchStopped(
                    f"{output} has a line that this command has not written: {error}",
                    hint="remove it and its journal to begin anew",
                ) from error
