"""The launcher's view of the place of durable checkpoints: its owner before step 0, and its contents at the end.

Folders are read in this process; URLs in another one, since a store may not answer.
"""

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from enum import StrEnum
from pathlib import Path
from time import gmtime, strftime

import msgspec

from regrow.core.errors import CheckpointError, UsageError
from regrow.core.ids import JobId, Seconds, StepNo
from regrow.core.messages.lineage import Lineage
from regrow.hydration.durable.catalog import Catalog, CatalogAnswer, CatalogQuestion, cause_of, look
from regrow.hydration.durable.names import unfinished
from regrow.hydration.durable.storage import folder_at, place

_CATALOG = "regrow.hydration.durable.catalog"
_START_S: Seconds = 60.0
_END_S: Seconds = 15.0
_CANNOT = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
_SHOWN = 3


class Resume(StrEnum):
    """Use of existing checkpoints by a run (`--resume`)."""

    NEVER = "never"
    """Start at step 0, and refuse a place with another training's checkpoints."""
    AUTO = "auto"
    """Start from the newest complete checkpoint, or from step 0 if there is none."""
    MUST = "must"
    """Start from the newest complete checkpoint, and refuse to start if there is none."""


def choose_lineage(url: str, resume: Resume, new: Lineage, *, note: Callable[[str], None]) -> Lineage:
    """Decide to which training the checkpoints of a new run belong.

    Args:
        url: the place of the checkpoints.
        resume: use of existing checkpoints.
        new: the identity of a new training, which the run gets if it does not resume.
        note: called with texts for people.

    Raises `UsageError` if the place cannot be used, belongs to another training, or has nothing to resume from.
    """
    directory = folder_at(url)
    if directory is not None:
        _check_folder(directory, new, note)
    try:
        there = _look(url, within=_START_S)
    except CheckpointError as error:
        if resume is not Resume.NEVER:
            raise UsageError(
                f"what is in {url} cannot be seen: {error.cause}", hint="run it again when it can"
            ) from error
        note(f"what is in {url} cannot be seen: {error.cause}; training goes on")
        return new
    if resume is Resume.NEVER:
        _refuse_others(url, there)
        return new
    return adopt(url, there, resume, new, note=note)


def adopt(url: str, there: Catalog, resume: Resume, new: Lineage, *, note: Callable[[str], None]) -> Lineage:
    """The training that resumes here; it also owns unfinished folders of its earlier runs. Raises `UsageError`."""
    damaged = [f"{folder}: {why}" for folder, why in there.torn.items()]
    if not there.whole:
        if there.unread:
            folder, why = next(reversed(there.unread.items()))
            raise UsageError(f"{url} has checkpoints that cannot be read: {folder}: {why}")
        if resume is Resume.MUST:
            found = f"only damaged ones: {_some(damaged)}" if damaged else "none"
            raise UsageError(
                f"--resume=must asks for a complete checkpoint, and {url} has {found}",
                hint="is that the folder of the training that is to go on? --resume=auto starts from step 0",
            )
    for each in damaged[:_SHOWN]:
        note(f"a damaged checkpoint in {url} is not used: {each}")
    whose = there.whole[0].lineage if there.whole else new
    if not whose.id:
        whose = msgspec.structs.replace(new, adopted=("",))
    others = {each.lineage.id for each in there.whole if not whose.owns(each.lineage.id)}
    left = {each for each in there.remains.values() if not whose.owns(each)} - others
    return msgspec.structs.replace(whose, adopted=(*whose.adopted, *sorted(left))) if left else whose


def newest(url: str, lineage: Lineage, refused: Collection[StepNo] = ()) -> str:
    """Describe the newest checkpoint of a training, at the end of a run. `refused`: steps that could not be read."""
    try:
        there = _look(url, within=_END_S)
    except (CheckpointError, UsageError) as error:
        return f"what is in {url} cannot be seen: {error.cause}"
    own = [each for each in there.own(lineage) if each.step not in refused]
    if not own:
        return f"nothing of this training is on disk: {url} has no complete checkpoint of it"
    return f"on disk: state@{own[0].step}, in {place(url).address(own[0].folder)}"


def _check_folder(directory: Path, new: Lineage, note: Callable[[str], None]) -> None:
    """Raise `UsageError` if the folder cannot be made, or nothing can be made in it."""
    probe = directory / unfinished(new.id, "0-probe")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        if error.errno in _CANNOT:
            raise UsageError(
                f"--checkpoint-dir {directory} cannot be written to: {error.strerror}",
                hint="name a folder that all nodes may write to",
            ) from error
        note(f"nothing can be written to {directory} now: {error.strerror or error}; it will be tried again")
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()


def _refuse_others(url: str, there: Catalog) -> None:
    if there.whole:
        newest = there.whole[0]
        whose = newest.lineage
        who = f" of job {whose.job}, begun {strftime('%Y-%m-%d %H:%M', gmtime(whose.started))} UTC" if whose.id else ""
        found = f"step {newest.step}{who}"
    elif there.unread:
        found = "; ".join(f"{folder}: {why}" for folder, why in list(there.unread.items())[-1:])
    else:
        return
    raise UsageError(
        f"{url} has checkpoints of another run: {found}",
        hint="--resume goes on from them; else give this run a --checkpoint-dir of its own",
    )


def _look(url: str, *, within: Seconds) -> Catalog:
    """List the place. Raises `UsageError` if it cannot be used at all, `CheckpointError` if it cannot be read now."""
    if folder_at(url) is not None:
        try:
            return look(place(url))
        except OSError as error:
            raise CheckpointError(cause_of(error)) from error
    command = [sys.executable, "-P", "-m", _CATALOG]
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(CatalogQuestion(url)), capture_output=True, timeout=within, check=False
        )
        answer = msgspec.json.decode(done.stdout, type=CatalogAnswer)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"no answer within {within:g} s") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"the process that looks ended without an answer: {error}") from error
    if answer.usage:
        raise UsageError(answer.error, hint=answer.hint)
    if answer.error:
        raise CheckpointError(answer.error)
    return answer.catalog


def _some(items: list[str]) -> str:
    more = f"; and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return "; ".join(items[:_SHOWN]) + more


def new_lineage(job: JobId, now: float) -> Lineage:
    """A new training that begins now."""
    return Lineage(os.urandom(6).hex(), job, now)
