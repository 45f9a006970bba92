"""Whatever happens to a writer, what is on disk is whole or looks torn."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.hydration.checkpoint_cases import Pieces, Training, loaded, save, saved, source
from tests.unit.hydration.test_durable_sharded import by_rows, tensors

from regrow.core.ids import NodeId, Rank, StepNo
from regrow.core.messages.checkpoints import CheckpointPlace, FinishCheckpoint, PartsWritten, WriteCheckpoint
from regrow.core.messages.lineage import Lineage
from regrow.hydration.durable.names import MANIFEST
from regrow.hydration.durable.reader import complete, latest
from regrow.hydration.durable.storage import FolderStorage, place
from regrow.hydration.durable.work import work
from regrow.hydration.durable.writer import abandon, finish, write_parts

CHANGES = ("begin", "publish", "write", "delete", "remove")


class Deadly:
    """A place whose user is killed at its n-th change of the disk, before, in the middle of, or after it."""

    def __init__(self, at: Any, strike: int) -> None:
        self._at, self._left = at, strike

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._at, name)
        if name not in CHANGES:
            return real

        def counted(*args: Any) -> Any:
            self._strike()
            made = self._write(real(*args)) if name == "write" else real(*args)
            self._strike()
            return made

        return counted

    @contextlib.contextmanager
    def _write(self, opened: Any) -> Iterator[Any]:
        with opened as file:
            file.write(b"")
            self._strike()
            yield file
            file.flush()
            self._strike()

    def _strike(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_at(folder: Path, segments: Any, strike: int) -> bool:
    """Write step 5 in a process that is killed at that change; False where it was done before."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            save(Deadly(place(str(folder)), strike), segments, 5, attempt=1, keep=2)
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_a_writer_killed_at_any_stage_leaves_the_last_one_in_force_or_the_new_one_whole(tmp_path: Path) -> None:
    ranks = [Pieces(rank, tensors(), by_rows(2, rank)) for rank in range(2)]
    segments = [each.snapshot() for each in ranks]
    before, after = 0, 0
    for strike in range(1, 200):
        folder = tmp_path / str(strike)
        training = Training().trained()
        saved(folder, training)
        if not killed_at(folder, segments, strike):
            break
        newest = latest(place(str(folder)))
        assert newest in ((3, "step-3"), (5, "step-5"))
        before, after = before + (newest[0] == 3), after + (newest[0] == 5)
        assert (3, "step-3") in complete(place(str(folder)))
        assert loaded(folder, "step-3", Training(7)) == 3
        # The next writer clears up, and its own is whole.
        save(place(str(folder)), segments, 5, attempt=2)
        assert sorted(os.listdir(folder)) == ["step-3", "step-5"]
    assert before >= 10
    assert after >= 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for one small checkpoint only: a tiny tmpfs, or a limit on the size of files."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    mounted = False
    if mount and os.geteuid() == 0:
        command = [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if mounted:
        yield folder
        subprocess.run(["umount", folder], check=True, timeout=20)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, previous)


def test_a_full_disk_leaves_nothing_half_written_and_keeps_the_old(small_disk: Path) -> None:
    name = saved(small_disk, Training().trained())
    big = Training(0, width=40_000).trained(1).snapshot()
    at = place(str(small_disk))
    with pytest.raises(OSError, match=r"No space left|File too large"):
        write_parts(at, StepNo(1), 0, [source(big, 1)])
    abandon(at, StepNo(1), 0)
    assert os.listdir(small_disk) == [name]
    assert latest(at) == (3, "step-3")
    saved(small_disk, Training().trained(4))
    assert sorted(os.listdir(small_disk)) == ["step-3", "step-4"]


@pytest.mark.parametrize("kept", [2, 1])
def test_older_checkpoints_make_room_for_the_last_state_and_for_no_other(small_disk: Path, kept: int) -> None:
    """Two of them fit, and no third; or one, and no second that is larger."""
    at = place(str(small_disk), Lineage("aaaaaaaaaaaa"))
    if not small_disk.is_mount():
        pytest.skip("a full disk is a small tmpfs here, which needs root")
    training = Training(0, width=2500).trained(1)  # 0.4 MB of 1
    for step in range(1, 1 + kept):
        training.state.state_at = StepNo(step)
        save(at, [training.snapshot()], step)
    last = Training(0, width=2500 if kept == 2 else 4400).trained(1)
    last.state.state_at = StepNo(9)
    segment = last.snapshot()
    place_ = CheckpointPlace(str(small_disk), at.own)
    order = WriteCheckpoint(NodeId("n"), 7, StepNo(9), [Rank(0)])
    with pytest.raises(OSError, match="No space left"):
        work(place_, order, [os.dup(segment.descriptor)])
    assert len(complete(at)) == kept, "training goes on, so nothing gives way"
    done = work(place_, msgspec.structs.replace(order, last=True), [os.dup(segment.descriptor)])
    assert isinstance(done, PartsWritten)
    assert done.removed == [f"{small_disk}/step-{step}" for step in range(1, 1 + kept)][: len(done.removed)]
    assert done.removed
    work(place_, FinishCheckpoint(NodeId("n"), 7, StepNo(9), [Rank(0)], 2, last=True), [])
    assert complete(at)[0] == (9, "step-9")


def test_the_only_checkpoint_does_not_give_way_to_what_would_not_fit_either(small_disk: Path) -> None:
    at = place(str(small_disk), Lineage("aaaaaaaaaaaa"))
    if not small_disk.is_mount():
        pytest.skip("a full disk is a small tmpfs here, which needs root")
    saved_ = save(at, [Training(0, width=2500).trained(1).snapshot()], 1)
    big = Training(0, width=40_000).trained(1)
    big.state.state_at = StepNo(9)
    segment, order = big.snapshot(), WriteCheckpoint(NodeId("n"), 7, StepNo(9), [Rank(0)], last=True)
    with pytest.raises(OSError, match="No space left"):
        work(CheckpointPlace(str(small_disk), at.own), order, [os.dup(segment.descriptor)])
    assert complete(at) == [(1, saved_)]


def test_an_abandoned_checkpoint_is_gone_and_a_finished_one_is_not(tmp_path: Path) -> None:
    at = place(str(tmp_path))
    segment = Training().trained().snapshot()
    write_parts(at, StepNo(3), 1, [source(segment, 3)])
    abandon(at, StepNo(3), 1)
    assert os.listdir(tmp_path) == []
    url = place("memory://regrow-abandoned/checkpoints")
    save(url, [segment], 3)
    abandon(url, StepNo(3), 0)
    assert latest(url) == (3, "step-3")
    write_parts(url, StepNo(3), 1, [source(segment, 3)])
    assert latest(url) is None
    abandon(url, StepNo(3), 1)
    assert url.folders() == []


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="Not a directory"):
        saved(tmp_path / "file" / "checkpoints", Training().trained())


def test_the_manifest_comes_last_and_then_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = place(str(tmp_path))
    write_parts(at, StepNo(3), 0, [source(Training().trained().snapshot(), 3)])
    seen: list[tuple[str, list[str]]] = []
    real = FolderStorage.publish

    def publish(self: FolderStorage, folder: str, step: StepNo) -> str:
        seen.append((folder, sorted(os.listdir(tmp_path / folder))))
        return real(self, folder, step)

    monkeypatch.setattr(FolderStorage, "publish", publish)
    finish(at, StepNo(3), 0, [Rank(0)], 2)
    assert seen == [(".unfinished-3-0", [".metadata", "__0_0.distcp", MANIFEST])]
