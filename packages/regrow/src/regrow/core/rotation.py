"""Files of records that do not grow without bound: full ones are set aside under numbers, and few of those are kept.

`events.jsonl` is what is written to; `events.jsonl.1` is the oldest part, and the next has the next number, for ever. A
part changes its name at once or not at all, so that no line is lost when a writer is killed at any moment.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class RecordLimits(NamedTuple):
    """Size at which a file is set aside, in bytes (0: never), and how many of those are kept whole."""

    part: int = 64 << 20
    parts: int = 16


class RecordPart(NamedTuple):
    """One file of a sequence; numbers never come twice."""

    number: int
    path: Path


def set_aside(path: Path) -> list[RecordPart]:
    """The numbered parts of a file of records, the oldest first."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path.parent) as entries:
        for entry in entries:
            number = entry.name.removeprefix(f"{path.name}.")
            if number != entry.name and number.isdecimal():
                found.append(RecordPart(int(number), Path(entry.path)))
    return sorted(found)


def rotate(path: Path, limits: RecordLimits, drop: Callable[[Path], None]) -> None:
    """Set a full file aside, and drop what is older than those that are kept.

    Args:
        path: the file; its writer opens a new one afterwards.
        limits: how much is kept.
        drop: what is done with a part that is not kept whole: removed, or made smaller. Doing so twice changes nothing.

    Raises:
        OSError: the file could not be renamed, or a part not be dropped.
    """
    parts = set_aside(path)
    number = parts[-1].number + 1 if parts else 1
    os.rename(path, path.with_name(f"{path.name}.{number}"))
    for part in parts:
        # Two of them: a writer may have been killed between the two halves of its last turn.
        if number - limits.parts - 1 <= part.number <= number - limits.parts:
            drop(part.path)


def remove_part(path: Path) -> None:
    """Drop a part whole."""
    path.unlink(missing_ok=True)
