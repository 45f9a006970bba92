"""The cache's folder: shared by processes that come and go, and never in training's way."""

import errno
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from regrow.core.errors import CacheUnusable, NoRoom
from regrow.data.cache import layout
from regrow.data.cache.entry import Encoded, Entry, encode, write
from regrow.data.cache.folder import CacheFolder
from regrow.data.cache.layout import Key, name_of

IDENTITY = bytes(range(16))
OTHER = bytes(range(16, 32))


def entry_of(step: int, batch: object = (1,), identity: bytes = IDENTITY) -> Encoded:
    return encode(batch, identity=identity, key=Key(step, 0, 1), samples="")


def names(folder: CacheFolder) -> list[str]:
    return sorted(os.listdir(folder.path)) if folder.path.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path, IDENTITY, 1 << 20)


def test_what_was_put_is_found_and_counted(folder: CacheFolder) -> None:
    assert folder.find(Key(3, 0, 1)) is None
    written = folder.put(entry_of(3, {"x": torch.arange(4)}))
    found = folder.find(Key(3, 0, 1))
    assert found is not None
    assert Entry(found).batch()["x"].tolist() == [0, 1, 2, 3]
    assert folder.entries == {Key(3, 0, 1): written} and folder.nbytes == written
    counted = folder.counters
    assert (counted.served, counted.made, counted.damaged, counted.nbytes) == (1, 1, 0, written)


def test_a_damaged_entry_is_removed_and_counted_not_served(folder: CacheFolder) -> None:
    folder.put(entry_of(3))
    with folder.path_of(Key(3, 0, 1)).open("r+b") as file:
        file.truncate(100)
    assert folder.find(Key(3, 0, 1)) is None
    assert names(folder) == [] and folder.entries == {}
    assert (folder.counters.damaged, folder.counters.served) == (1, 0)


def test_evicting_frees_bytes_and_does_not_mind_what_has_gone(folder: CacheFolder) -> None:
    written = [folder.put(entry_of(step)) for step in range(3)]
    folder.path_of(Key(1, 0, 1)).unlink()
    assert folder.evict([Key(0, 0, 1), Key(1, 0, 1), Key(9, 0, 1)]) == written[0]
    assert names(folder) == [name_of(Key(2, 0, 1))] and folder.nbytes == written[2]


def test_a_reader_keeps_what_was_evicted_under_it(folder: CacheFolder) -> None:
    folder.put(entry_of(3, torch.arange(50_000)))
    found = folder.find(Key(3, 0, 1))
    assert found is not None
    folder.evict([Key(3, 0, 1)])
    assert int(Entry(found).batch().sum()) == sum(range(50_000))


def test_what_others_write_and_remove_is_seen_at_a_later_call(tmp_path: Path, folder: CacheFolder) -> None:
    folder.put(entry_of(0))
    other = CacheFolder(tmp_path, IDENTITY, 1 << 20)
    assert set(other.entries) == {Key(0, 0, 1)}
    other.put(entry_of(1))
    other.evict([Key(0, 0, 1)])
    assert set(folder.entries) == {Key(0, 0, 1)}
    for _ in range(64):
        folder.refresh_at_times()
    assert set(folder.entries) == {Key(1, 0, 1)}


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, IDENTITY, 1 << 20)
    folder.put(entry_of(0))
    # Killed in the middle of a write.
    assert in_a_fork(lambda: _write_and_die(folder.path)) == -signal.SIGKILL
    (left,) = [name for name in names(folder) if name.endswith(".tmp")]
    mine = left.replace(left.split(".")[4], str(os.getpid()))
    (folder.path / mine).touch()
    (folder.path / "note.txt").touch()
    again = CacheFolder(tmp_path, IDENTITY, 1 << 20)
    assert names(again) == sorted([name_of(Key(0, 0, 1)), mine, "note.txt"])
    assert set(again.entries) == {Key(0, 0, 1)}
    assert again.find(Key(5, 0, 1)) is None


def test_bytes_of_other_identities_are_told_apart(tmp_path: Path, folder: CacheFolder) -> None:
    folder.put(entry_of(0))
    other = CacheFolder(tmp_path, OTHER, 1 << 20)
    written = other.put(entry_of(0, identity=OTHER))
    (tmp_path / "owner").touch()
    (tmp_path / "other").mkdir()
    assert folder.other_bytes() == written
    assert folder.find(Key(0, 0, 1)) is not None and folder.counters.damaged == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_and_nothing_is_lost(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder.put(entry_of(0))

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", fail)
        with pytest.raises(NoRoom, match=os.strerror(number)) as failed:
            folder.put(entry_of(1))
    assert failed.value.hint and str(folder.path) in failed.value.cause
    assert names(folder) == [name_of(Key(0, 0, 1))] and set(folder.entries) == {Key(0, 0, 1)}
    assert folder.find(Key(0, 0, 1)) is not None
    folder.put(entry_of(1))


def test_a_file_larger_than_may_be_written_is_no_room(folder: CacheFolder) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(NoRoom):
            folder.put(entry_of(1, torch.zeros(10_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(folder) == []


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "tmpfs"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=False, capture_output=True, timeout=30
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=30)


def test_a_full_tmpfs_is_noticed_when_writing_and_what_is_in_it_is_served(small_tmpfs: Path) -> None:
    folder = CacheFolder(small_tmpfs, IDENTITY, 1 << 30)
    written = 0
    with pytest.raises(NoRoom):
        for step in range(100):
            folder.put(entry_of(step, torch.full((5_000,), step)))
            written += 1
    assert 0 < written < 100 and len(names(folder)) == written
    for step in range(written):
        found = folder.find(Key(step, 0, 1))
        assert found is not None and bool((Entry(found).batch() == step).all())
    folder.evict([Key(0, 0, 1)])
    folder.put(entry_of(100, torch.full((5_000,), 100)))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_written_is_told(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder.put(entry_of(0))
    real = os.open

    def read_only(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(CacheUnusable, match=os.strerror(number)):
        folder.put(entry_of(1))
    assert folder.find(Key(0, 0, 1)) is not None


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_that_is_read_only_is_told(tmp_path: Path, folder: CacheFolder) -> None:
    folder.put(entry_of(0))
    folder.path.chmod(0o500)
    try:
        with pytest.raises(CacheUnusable):
            folder.put(entry_of(1))
        with pytest.raises(CacheUnusable):
            folder.evict([Key(0, 0, 1)])
        assert folder.find(Key(0, 0, 1)) is not None
    finally:
        folder.path.chmod(0o700)


def test_a_cache_whose_root_has_gone_is_told(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path / "gone", IDENTITY, 1 << 20)
    assert folder.entries == {} and folder.find(Key(0, 0, 1)) is None and folder.other_bytes() == 0
    with pytest.raises(CacheUnusable):
        folder.put(entry_of(0))


def test_the_folder_and_the_file_need_no_torch() -> None:
    # The agent holds the folder, and starts without torch.
    script = "import sys, regrow.data.cache.folder, regrow.data.cache.keeping; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=300, check=False).returncode == 0


def test_many_processes_write_and_read_the_same_entries(tmp_path: Path) -> None:
    forks = [start_fork(lambda: _write_and_read(tmp_path)) for _ in range(3)]
    assert [end_of(fork) for fork in forks] == [0, 0, 0]
    assert not [name for name in os.listdir(tmp_path / IDENTITY.hex()) if name.endswith(".tmp")]


def _write_and_die(path: Path) -> None:
    layout._write_all = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    write(path, entry_of(5))


def _write_and_read(root: Path) -> None:
    torch.set_num_threads(1)
    folder = CacheFolder(root, IDENTITY, 1 << 30)
    for turn in range(200):
        folder.put(entry_of(turn % 5, torch.full((3_000,), turn % 5)))
        step = (turn * 3 + 1) % 5
        found = folder.find(Key(step, 0, 1))
        assert found is None or bool((Entry(found).batch() == step).all())
        folder.evict([Key((turn + 3) % 5, 0, 1)])
    assert folder.counters.damaged == 0 and folder.counters.served > 0


def start_fork(work: Callable[[], None]) -> int:
    """A process that has torch already."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - this process ends here whatever it was
        traceback.print_exc()
    finally:
        os._exit(code)


def end_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_a_fork(work: Callable[[], None]) -> int:
    return end_of(start_fork(work))
