"""Puts the records of several machines on one clock: `at` is each machine's monotonic clock, `time` the wall clock."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from regrow.core.ids import NodeId, Seconds
from regrow.core.records import Record, StepCommitted, WorkerSpawned
from regrow.core.rotation import set_aside

_ENOUGH = 1 << 16
"""Number of bytes of a file that are read to determine its clock."""
_SAME_CLOCK: Seconds = 5.0
"""Largest offset between equal clocks, since agents write their lines some time after the commit."""


class _Stamp(msgspec.Struct):
    at: float
    time: float


def clock_shifts(folder: Path) -> dict[NodeId, Seconds]:
    """Seconds to add to `at` in a node's `steps.<node>.jsonl` to convert it to the clock of `events.jsonl`.

    Nodes without a shift are left out, and so are those whose offset is unknown.
    """
    own = wall_offset(folder / "events.jsonl")
    if own is None:
        return {}
    shifts = {}
    for path in folder.glob("steps.*.jsonl"):
        offset = wall_offset(path)
        if offset is not None and abs(offset - own) >= _SAME_CLOCK:
            shifts[NodeId(path.name.removeprefix("steps.").removesuffix(".jsonl"))] = offset - own
    return shifts


def wall_offset(path: Path) -> Seconds | None:
    """Wall clock minus monotonic clock of the machine that wrote a file of records; None if unknown."""
    lines: list[bytes] = []
    # Use the newest part with lines: just after a rotation the file itself is empty.
    for part in (path, *(each.path for each in reversed(set_aside(path)))):
        try:
            with part.open("rb") as stream:
                lines = stream.read(_ENOUGH).split(b"\n")[:-1]
        except OSError:
            continue
        if lines:
            break
    offsets = []
    for line in lines:
        try:
            stamp = msgspec.json.decode(line, type=_Stamp)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # a line without a wall clock; the reader of the records reports invalid lines
        offsets.append(stamp.time - stamp.at)
    return median(offsets) if offsets else None


def on_one_clock(records: Sequence[Record], shifts: Mapping[NodeId, Seconds]) -> list[Record]:
    """The records in order of time, with the commits of the nodes in `shifts` shifted."""
    homes = {each.worker: each.node for each in records if isinstance(each, WorkerSpawned)}
    moved: list[Record] = []
    for record in records:
        home = homes.get(record.worker) if isinstance(record, StepCommitted) else None
        shift = shifts.get(home, 0.0) if home is not None else 0.0
        moved.append(msgspec.structs.replace(record, at=record.at + shift) if shift else record)
    return sorted(moved, key=lambda record: record.at)
