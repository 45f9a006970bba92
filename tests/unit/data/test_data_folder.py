"""Folders of data caches: private, held by a lock, removed when nobody holds them."""

import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.unit.agent.test_agent_environment import config

from regrow.agent import data_folder
from regrow.agent.data_folder import DataFolder, sweep
from regrow.core.config import size
from regrow.core.errors import UsageError
from regrow.launch.cache import CacheHome, CachePlan, cache_plan, default_budget
from regrow.launch.console import Console

GIB = 1 << 30
CONFIG = config(job_dir="/jobs/j")


def abandoned(root: Path) -> Path:
    """A folder as a killed job leaves it: nobody holds its lock."""
    made = DataFolder.make(root, "me")
    (made.path / ("ab" * 16)).mkdir()
    (made.path / ("ab" * 16) / "s0.entry").write_bytes(b"x")
    os.close(made._lock)
    return made.path


def test_a_folder_is_its_owners_alone_and_has_a_name_that_nobody_can_guess(tmp_path: Path) -> None:
    made, other = DataFolder.make(tmp_path, "me"), DataFolder.make(tmp_path, "me")
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert made.path.name.startswith(f"regrow-data-{os.getuid()}-")
    assert made.path != other.path
    made.remove()
    other.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_holds_is_swept_and_what_somebody_holds_stays(tmp_path: Path) -> None:
    left, held = abandoned(tmp_path), DataFolder.make(tmp_path, "me")
    assert sweep(tmp_path) == [left.name]
    assert list(tmp_path.iterdir()) == [held.path]
    held.remove()


def test_one_of_two_who_hold_it_is_enough(tmp_path: Path) -> None:
    made = DataFolder.make(tmp_path, "me")
    shared = DataFolder.share(made.path)
    os.close(made._lock)
    assert sweep(tmp_path) == [], "the agent lives on when its launcher is killed"
    os.close(shared._lock)
    assert sweep(tmp_path) == [made.path.name]


def test_both_may_remove_it(tmp_path: Path) -> None:
    made = DataFolder.make(tmp_path, "me")
    shared = DataFolder.share(made.path)
    (made.path / "entries" / "n0").mkdir(parents=True)
    shared.remove()
    made.remove()
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_cannot_be_shared(tmp_path: Path) -> None:
    made = DataFolder.make(tmp_path, "me")
    made.remove()
    with pytest.raises(FileNotFoundError):
        DataFolder.share(made.path)


def test_a_folder_that_is_being_swept_cannot_be_shared(tmp_path: Path) -> None:
    path = abandoned(tmp_path)
    with (path / "owner").open() as sweeper:
        fcntl.flock(sweeper, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            DataFolder.share(path)


def test_what_is_being_made_is_left_alone_and_what_was_never_finished_is_not(tmp_path: Path) -> None:
    young, old = (tmp_path / f"regrow-data-{os.getuid()}-{name}" for name in ("aaaaaaaa", "bbbbbbbb"))
    young.mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    assert sweep(tmp_path) == [old.name]
    assert list(tmp_path.iterdir()) == [young]


@pytest.mark.parametrize(
    "name",
    [
        f"regrow-data-{os.getuid() + 1}-aaaaaaaa",
        f"regrow-data-{os.getuid()}-aaaaaaaa-mine",
        f"my-regrow-data-{os.getuid()}-aaaaaaaa",
        f"regrow-data-{os.getuid()}-../../../etc"[:30].replace("/", "_"),
        "torch_1234",
    ],
)
def test_what_has_another_name_is_nobodys_business(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "owner").touch()
    assert sweep(tmp_path) == []
    assert (tmp_path / name / "owner").exists()


def test_no_link_is_followed(tmp_path: Path) -> None:
    root, precious = tmp_path / "root", tmp_path / "precious"
    root.mkdir()
    precious.mkdir()
    (precious / "owner").touch()
    (precious / "thesis").touch()
    name = f"regrow-data-{os.getuid()}-"
    (root / f"{name}aaaaaaaa").symlink_to(precious)
    assert sweep(root) == [], "a link in the place of the folder"
    (root / f"{name}bbbbbbbb").mkdir()
    (root / f"{name}bbbbbbbb" / "owner").symlink_to(precious / "owner")
    assert sweep(root) == [], "a link in the place of the lock"
    inside = abandoned(root)
    (inside / "link").symlink_to(precious)
    (inside / ("ab" * 16) / "link").symlink_to(precious)
    assert sweep(root) == [inside.name]
    assert (precious / "thesis").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_folders_of_other_users_are_left_alone(tmp_path: Path) -> None:
    path = abandoned(tmp_path)
    os.chown(path, 12345, 12345)
    assert sweep(tmp_path) == []
    assert (path / "owner").exists()
    os.chown(path, 0, 0)


def test_a_pipe_in_the_place_of_the_lock_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / f"regrow-data-{os.getuid()}-aaaaaaaa"
    path.mkdir()
    os.mkfifo(path / "owner")
    assert sweep(tmp_path) == [path.name]


def test_a_root_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    assert sweep(tmp_path / "missing") == []


def test_a_file_that_comes_while_it_is_removed_is_removed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = DataFolder.make(tmp_path, "me")
    late: list[str] = []
    empty = data_folder._empty

    def and_one_more(folder: int) -> None:
        empty(folder)
        if len(late) < 3:
            late.append(f"late{len(late)}")
            (made.path / late[-1]).touch()

    monkeypatch.setattr(data_folder, "_empty", and_one_more)
    made.remove()
    assert len(late) == 3
    assert list(tmp_path.iterdir()) == []


# --- flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1048576", 1 << 20),
        ("64MiB", 64 << 20),
        ("4GiB", 4 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("2GB", 2_000_000_000),
        ("10k", 10_000),
        ("7B", 7),
        ("1Ti", 1 << 40),
        ("0", 0),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 GiBs", "1e9", "four", "1iB", "٣MB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        size(text)


def plan(folder: str = "", nbytes: str = "", home: Path | None = Path("/h")) -> CachePlan:
    return cache_plan(folder, nbytes, home=home)


def test_the_cache_is_at_home_unless_the_flags_say() -> None:
    assert plan() == CachePlan(Path("/h"))
    assert plan("/data", "2GiB") == CachePlan(Path("/data"), 2 * GIB)
    assert plan("off", "2GiB") == CachePlan()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"nbytes": "lots"}, "--data-cache-bytes: 'lots' is not a size"),
        ({"nbytes": "1k"}, "--data-cache-bytes 1k is too little"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(**flags)


def test_a_cache_takes_a_quarter_of_what_is_free_and_no_more_than_it_may_need() -> None:
    assert default_budget(100 * GIB, 1) == 4 * GIB
    assert default_budget(8 * GIB, 1) == 2 * GIB
    assert default_budget(8 * GIB, 2) == GIB


@pytest.mark.parametrize("what", ["missing", "a file", "read-only"])
def test_where_there_is_no_place_it_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    if what == "a file":
        root.touch()
    elif what == "read-only":  # root may write anywhere, so the kernel is played

        def refuse(path: Path, whose: str) -> DataFolder:
            raise PermissionError(13, "Permission denied", str(path))

        root.mkdir()
        monkeypatch.setattr(DataFolder, "make", refuse)
    home = CacheHome(CachePlan(root), 2, Console())
    home.open()
    for _ in range(2):
        assert home.assemble(CONFIG) == (CONFIG, None)
    told = capsys.readouterr().err
    assert told.count("the job runs without a data cache") == 1
    assert str(root) in told


def test_without_a_cache_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    home = CacheHome(CachePlan(), 1, Console())
    home.open()
    assert home.assemble(CONFIG) == (CONFIG, None)
    assert capsys.readouterr().err == ""
