"""The encoding of the journal: its fingerprint, its rows, its checksums. Pure.

The first line names the input and the parameters of the job. Each further line is a row's number, a checksum, and the
row's line of the output: `17 9f86d081884c7d65 {"id":…}`. A line that does not match its checksum counts as not written,
wherever it is: a kill tears the last line, a power failure may tear any.
"""

from collections.abc import Mapping

import msgspec
from xxhash import xxh3_64_intdigest

FORMAT = 1
_LONGEST_NUMBER = 12
_SUM = 16


class JournalHead(msgspec.Struct):
    """The first line.

    Attributes:
        regrow_batch_journal: the format's number.
        fingerprint: inputs and parameters on which the results depend, by name.
        rows: results in the output; 0 while the job is not done.
        kept: the journal keeps its results, since the output does not contain all of them.
        unproven: error rows that are not known to be at fault themselves.
        size: of the output, in bytes; 0: not known, for an output behind a URL.
    """

    regrow_batch_journal: int
    fingerprint: dict[str, str]
    rows: int = 0
    unproven: int = 0
    kept: bool = False
    size: int = 0


def encode_head(
    fingerprint: Mapping[str, str], rows: int = 0, unproven: int = 0, *, kept: bool = False, size: int = 0
) -> bytes:
    """Encode the first line, with its line end."""
    return msgspec.json.encode(JournalHead(FORMAT, dict(fingerprint), rows, unproven, kept, size)) + b"\n"


def decode_head(line: bytes) -> JournalHead | None:
    """Decode the first line; None: this is no journal, or one of another format version."""
    try:
        head = msgspec.json.decode(line, type=JournalHead)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return head if head.regrow_batch_journal == FORMAT else None


def encode_row(number: int, result: bytes) -> bytes:
    """Encode the line of a row, with its line end. `result`: JSON on one line."""
    return b"%d %016x %b\n" % (number, xxh3_64_intdigest(result, number), result)


def decode_row(line: bytes) -> tuple[int, bytes] | None:
    """Decode a row's number and result from a line without its end; None: the line is torn."""
    at = line.find(b" ", 0, _LONGEST_NUMBER + 1)
    start = at + _SUM + 2
    if at <= 0 or len(line) < start or not line[:at].isdigit():
        return None
    number, result = int(line[:at]), line[start:]
    if line[at:start] != b" %016x " % xxh3_64_intdigest(result, number):
        return None
    return number, result


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe each change in a phrase."""
    return [
        f"{name} was {before.get(name) or 'not given'} and is {now.get(name) or 'not given'}"
        for name in sorted({*before, *now})
        if before.get(name, "") != now.get(name, "")
    ]
