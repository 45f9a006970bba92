"""State on disk, for the day when no worker is left: written beside the training, read by a resumed job.

A checkpoint is a folder `step-<n>` in the format of `torch.distributed.checkpoint`, so `dcp.load` by anyone reads it:
tensors under their names, Python state as the bytes `regrow.python`, the step as `regrow.step`. It is written under
another name, gets its manifest last and its own name after that: a folder without both is torn, and is ignored.
"""

import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from regrow.core.errors import CheckpointError
from regrow.core.ids import Seconds, StepNo
from regrow.hydration.inventory import Inventory, StateSink, StateSource, TensorEntry

KEEP = 2
_MANIFEST = "regrow.json"
_PYTHON, _STEP = "regrow.python", "regrow.step"
_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = ".unfinished-"


class Manifest(msgspec.Struct, frozen=True):
    """Written last. `files`: sizes in bytes, so that a folder that lost some is recognized."""

    format: int
    step: StepNo
    entries: list[TensorEntry]
    python_bytes: int
    files: dict[str, int]


class Snapshot:
    """A copy of `state@n` in the processor's memory."""

    def __init__(self, inventory: Inventory, tensors: dict[str, torch.Tensor]) -> None:
        self.inventory = inventory
        self.tensors = tensors

    @classmethod
    def take(cls, source: StateSource, step: StepNo, *, reuse: "Snapshot | None" = None) -> "Snapshot":
        """Copy the state, at a step's boundary.

        Args:
            source: whose state.
            step: where it must stand; `StateError` otherwise.
            reuse: a snapshot that nobody needs any more; writing over its memory is faster than new memory.
        """
        inventory = source.inventory(step)
        old = reuse.tensors if reuse is not None else {}
        tensors: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for entry in inventory.entries:
                tensor = source.tensor(entry.name).detach()
                room = old.get(entry.name)
                if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
                    room = torch.empty(tensor.shape, dtype=tensor.dtype)
                tensors[entry.name] = room.copy_(tensor)
        return cls(inventory, tensors)


def save(snapshot: Snapshot, directory: Path, *, keep: int = KEEP) -> Path:
    """Write a checkpoint and remove all but the newest `keep`; returns its folder.

    Raises:
        CheckpointError: it could not be written; nothing of it is left.
    """
    inventory = snapshot.inventory
    final = directory / f"step-{inventory.step}"
    folder = directory / f"{_UNFINISHED}{inventory.step}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(directory)
        folder.mkdir()
        content: dict[str, object] = dict(snapshot.tensors)
        content[_PYTHON] = torch.frombuffer(bytearray(inventory.python), dtype=torch.uint8)
        content[_STEP] = torch.tensor(inventory.step)
        _expect_no_group()
        dcp_save(content, checkpoint_id=folder, no_dist=True)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        manifest = Manifest(1, inventory.step, inventory.entries, len(inventory.python), sizes)
        _write_synced(folder / _MANIFEST, msgspec.json.encode(manifest))
        if final.exists():
            shutil.rmtree(final)
        folder.rename(final)
        _sync(directory)
        for _, old in _complete(directory)[keep:]:
            shutil.rmtree(old)
    except (OSError, CheckpointException, RuntimeError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(
            f"state@{inventory.step} could not be written to {directory}: {_cause(error)}",
            hint="training goes on; make room, or choose another folder",
        ) from error
    return final


def latest(directory: Path) -> tuple[Path, StepNo] | None:
    """The newest complete checkpoint and its step; None where there is none."""
    found = _complete(directory)
    return (found[0][1], found[0][0]) if found else None


def load(sink: StateSink, folder: Path) -> StepNo:
    """Read a checkpoint into protected state; returns its step.

    Raises:
        CheckpointError: the folder is torn or unreadable.
        StateError: it is the state of another model.
    """
    manifest = _manifest(folder)
    if manifest is None:
        raise CheckpointError(f"{folder} is no complete checkpoint", hint="choose another step-<n> folder")
    python = torch.empty(manifest.python_bytes, dtype=torch.uint8)
    _read({_PYTHON: python}, folder)
    targets = sink.prepare(Inventory(manifest.step, manifest.entries, python.numpy().tobytes()))
    with torch.no_grad():
        _read({name: tensor.detach() for name, tensor in targets.items()}, folder)
    sink.finish()
    return manifest.step


class CheckpointWriter:
    """Writes checkpoints in a thread of its own, one at a time.

    Args:
        directory: holds one folder a checkpoint.
        keep: how many of the newest stay.
        on_written: called in the thread with folder, step and seconds.
        on_error: called in the thread when one could not be written; training goes on.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = KEEP,
        on_written: Callable[[Path, StepNo, Seconds], None],
        on_error: Callable[[CheckpointError], None],
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._on_written = on_written
        self._on_error = on_error
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, source: StateSource, step: StepNo) -> bool:
        """Copy the state and start to write it; False, and nothing copied, while the last one is still being written.

        Raises `StateError` when the state does not stand at `step`.
        """
        if self.busy:
            return False
        snapshot = self._snapshot = Snapshot.take(source, step, reuse=self._snapshot)
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="regrow-checkpoint", daemon=True)
        self._thread.start()
        return True

    def _write(self, snapshot: Snapshot) -> None:
        started = time.monotonic()
        try:
            folder = save(snapshot, self._directory, keep=self._keep)
        except CheckpointError as error:
            self._on_error(error)
            return
        self._on_written(folder, snapshot.inventory.step, time.monotonic() - started)

    def close(self, timeout: Seconds) -> bool:
        """Wait up to `timeout` seconds for the one being written; False when it is not done by then."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.busy


def _complete(directory: Path) -> list[tuple[StepNo, Path]]:
    """Complete checkpoints, newest first."""
    if not directory.is_dir():
        return []
    named = ((match, path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name)))
    found = [(StepNo(int(match.group(1))), path) for match, path in named if _manifest(path) is not None]
    return sorted(found, reverse=True)


def _manifest(folder: Path) -> Manifest | None:
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
        whole = all((folder / name).stat().st_size == size for name, size in manifest.files.items())
    except (OSError, msgspec.MsgspecError):
        return None
    return manifest if whole and manifest.format == 1 else None


def _read(content: dict[str, torch.Tensor], folder: Path) -> None:
    _expect_no_group()
    try:
        dcp_load(dict(content), checkpoint_id=folder, no_dist=True)
    except (OSError, CheckpointException, RuntimeError) as error:
        raise CheckpointError(f"{folder} could not be read: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """The failure under the layers of the checkpoint library."""
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            return _cause(failure)
    if error.__cause__ is not None:
        return _cause(error.__cause__)
    if isinstance(error.__context__, OSError):
        return _cause(error.__context__)
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _expect_no_group() -> None:
    # One process writes and reads its own copy on purpose; the library finds that worth a warning each time.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _remove_unfinished(directory: Path) -> None:
    """What earlier writers left when they were killed; a directory has one writer at a time."""
    for path in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
