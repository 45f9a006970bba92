"""Reads the results of a running or finished batch from its journal, or from its output."""

from collections.abc import Iterator
from pathlib import Path

from regrow.core.errors import UsageError
from regrow_batch.job import journal_path
from regrow_batch.places import open_to_read
from regrow_batch.records import decode_head, decode_row
from regrow_batch.tables.files import open_unpacked


def results_so_far(output: str, state: Path, journal: str = "") -> Iterator[bytes]:
    """Each result once, as JSON without a line end. It takes no lock: a head may write meanwhile.

    Args:
        output: of the batch.
        state: the folder for journals of outputs that are URLs.
        journal: the journal's path, if it was given; else empty.

    Raises `UsageError` if there is no such batch, `BatchStopped` if its files cannot be reached.
    """
    path = journal_path(output, state, journal)
    seen: set[int] = set()
    with open_to_read(str(path)) as stream:
        head = decode_head(stream.readline())
        if head is None:
            raise UsageError(f"{path} is no journal of a batch")
        if head.rows and not head.kept:
            with open_unpacked(output) as lines:
                yield from (line.rstrip(b"\n") for line in lines)
            return
        for line in stream:
            row = decode_row(line[:-1]) if line.endswith(b"\n") else None
            if row is not None and row[0] not in seen:
                seen.add(row[0])
                yield row[1]
