"""Thins old events: keeps incidents, and changes of the world and its nodes.

Lines about single workers, copies and checkpoints, and outdated memberships are dropped: they are nearly all of the
lines of a long job.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from regrow.core.ids import StepNo, WorkerId
from regrow.core.records import (
    CheckpointSaved,
    CopyStreamed,
    GenerationFormed,
    JobStarted,
    Noted,
    Record,
    StepCommitted,
    WorkerBuilt,
    WorkerForked,
    WorkerGone,
    WorkerSpawned,
)

_DROPPED = (WorkerForked, WorkerBuilt, WorkerGone, CopyStreamed, CheckpointSaved, Noted)
_FORMED = msgspec.json.Decoder(GenerationFormed)
_SPAWNED = msgspec.json.Decoder(WorkerSpawned)


def _begins(kind: type) -> bytes:
    """Beginning of a line that has a record of this type."""
    return f'{{"type":"{kind.__name__}",'.encode()


def thinned(lines: Sequence[bytes]) -> Iterator[bytes]:
    """The lines to keep, including the newest membership and the nodes of its workers."""
    generations = [at for at, line in enumerate(lines) if line.startswith(_begins(GenerationFormed))]
    newest = generations[-1] if generations else -1
    members: set[WorkerId] = set()
    with contextlib.suppress(
        msgspec.MsgspecError, UnicodeDecodeError
    ):  # a line of another version, whose workers are unknown
        members = set(_FORMED.decode(lines[newest]).workers.values()) if generations else members
    dropped = tuple(_begins(kind) for kind in _DROPPED)
    for at, line in enumerate(lines):
        if line.startswith(dropped) or (line.startswith(_begins(GenerationFormed)) and at != newest):
            continue
        if line.startswith(_begins(WorkerSpawned)) and not _is_of(line, members):
            continue
        yield line


def _is_of(line: bytes, members: set[WorkerId]) -> bool:
    try:
        return _SPAWNED.decode(line).worker in members
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return True


def records_since(records: Sequence[Record], since: StepNo) -> list[Record]:
    """The records of a run whose older steps were dropped, as if the run had begun with the commit of step `since`.

    Earlier records are left out, except memberships and worker starts.
    """
    begun = max((each.at for each in records if isinstance(each, StepCommitted) and each.step == since), default=None)
    if begun is None:
        return list(records)
    found: list[Record] = []
    for each in records:
        before = isinstance(each, StepCommitted) and each.step <= since
        if isinstance(each, JobStarted):
            found.append(msgspec.structs.replace(each, at=begun))
        elif isinstance(each, GenerationFormed | WorkerSpawned) or (each.at >= begun and not before):
            found.append(each)
    return found


def thin_part(path: Path) -> None:
    """Thin a rotated part, atomically. Raises `OSError`."""
    lines = path.read_bytes().split(b"\n")
    kept = b"\n".join(thinned(lines))
    temporary = path.with_name(f"{path.name}.thinned")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(kept)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
