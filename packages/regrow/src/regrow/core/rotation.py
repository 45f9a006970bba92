"""Files of records with a limited size: a full file gets a numbered name, and only the newest parts are kept.

`events.jsonl` is the file being written; `events.jsonl.1` is the oldest part, and numbers are never used again. A part
is renamed atomically, so that no line is lost whenever a writer is killed.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class RecordLimits(NamedTuple):
    """Size in bytes at which a file becomes a numbered part (0: never), and the number of parts that are kept whole."""

    part: int = 64 << 20
    parts: int = 16


class RecordPart(NamedTuple):
    """One numbered part of a file of records; its number is never used again."""

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
    """Make a full file a numbered part, and drop the parts beyond the limit.

    Args:
        path: the file; its writer opens a new one afterwards.
        limits: size of a part, and number of parts to keep.
        drop: removes a part that is not kept whole, or makes it smaller. A second call changes nothing.

    Raises:
        OSError: the file could not be renamed, or a part could not be dropped.
    """
    parts = set_aside(path)
    number = parts[-1].number + 1 if parts else 1
    os.rename(path, path.with_name(f"{path.name}.{number}"))
    for part in parts:
        # Two parts, because a writer may have been killed after the rename of its last rotation and before the drop.
        if number - limits.parts - 1 <= part.number <= number - limits.parts:
            drop(part.path)


def remove_part(path: Path) -> None:
    """Remove a part completely."""
    path.unlink(missing_ok=True)
