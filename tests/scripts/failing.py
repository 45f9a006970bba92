"""Newcomers whose script fails while it builds, as one of which a file server answers with an error."""

from pathlib import Path

import regrow


def fail_newcomers(session: regrow.Session, times: int, out: Path | None) -> None:
    """Raise in `times` newcomers of a job, however they come: standbys too. A negative number: in all of them."""
    if not times or out is None or not session.newcomer:
        return
    with out.with_suffix(".failed").open("a+") as failed:
        if 0 <= times <= failed.tell():
            return
        failed.write("x")
    raise OSError(5, "Input/output error", "/nfs/weights.bin")
