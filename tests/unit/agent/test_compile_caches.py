"""Caches of compiled kernels go to a node's own disk where they would lie on one that nodes share."""

import os
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
from tests.unit.agent.test_agent_environment import config, order

from regrow.agent.node_workers import NodeWorkers
from regrow.agent.workers import environment
from regrow.agent.workers.compile_caches import filesystem_of, is_shared, local_caches, read_mounts
from regrow.agent.workers.environment import SpawnRequests
from regrow.core.ids import WorkerId
from regrow.core.messages.facts import WorkerNoted
from regrow.core.messages.vocabulary import Role

MOUNTS = """\
overlay / overlay rw 0 0
proc /proc proc rw 0 0
tmpfs /tmp tmpfs rw 0 0
/etc/auto.home /home autofs rw 0 0
filer:/a /home/anna nfs4 rw,vers=4.2 0 0
filer:/b /home/anna/my\\040data fuse.sshfs rw 0 0
/dev/sdb /scratch ext4 rw 0 0
filer:/c /scratch lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "overlay"),
        ("/home/anna", "nfs4"),
        ("/home/anna/.triton", "nfs4"),
        ("/home/annabel", "autofs"),
        ("/home/anna/my data/x", "fuse.sshfs"),
        ("/scratch/x", "lustre"),  # the later mount hides the earlier one
        ("/tmp/x", "tmpfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_longest_mount(path: str, kind: str) -> None:
    assert filesystem_of(path, MOUNTS) == kind


def test_a_text_that_is_no_table_tells_nothing() -> None:
    assert filesystem_of("/home", "") == filesystem_of("/home", "\n \nword\n") == ""


def test_file_systems_of_other_machines_are_known() -> None:
    assert all(is_shared(kind) for kind in ("nfs", "nfs4", "lustre", "gpfs", "fuse.sshfs", "fuse.juicefs", "cifs"))
    assert not any(is_shared(kind) for kind in ("", "ext4", "xfs", "overlay", "tmpfs", "zfs", "fuse.fuse-overlayfs"))


def table(shared: Path, local: Path) -> str:
    return f"disk / ext4 rw 0 0\nfiler:/ {shared} nfs rw 0 0\ndisk {local} xfs rw 0 0\n"


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    shared, local = tmp_path / "home", tmp_path / "disk"
    shared.mkdir()
    local.mkdir()
    return shared, local


def test_a_home_on_a_network_moves_tritons_cache_and_a_temporary_folder_there_inductors(
    places: tuple[Path, Path],
) -> None:
    shared, local = places
    mine, mounts = local / f"regrow-compiled-{os.getuid()}", table(shared, local)
    found, said = local_caches({"HOME": str(shared), "TMPDIR": str(local)}, mounts)
    assert found == {"TRITON_CACHE_DIR": str(mine / "triton")}
    assert f"network file system ({shared}); set TRITON_CACHE_DIR to" in said
    assert mine.stat().st_mode & 0o777 == 0o700
    found, _ = local_caches({"HOME": str(shared), "TMPDIR": str(shared)}, mounts, roots=[str(shared), str(local)])
    assert found == {"TRITON_CACHE_DIR": str(mine / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(mine / "torchinductor")}


def test_nothing_is_changed_on_a_disk_of_the_node_or_where_the_user_has_said_it(places: tuple[Path, Path]) -> None:
    shared, local = places
    mounts = table(shared, local)
    assert local_caches({"HOME": str(local), "TMPDIR": str(local)}, mounts) == ({}, "")
    own = {"HOME": str(shared), "TMPDIR": str(local), "TRITON_CACHE_DIR": "/mine"}
    assert local_caches(own, mounts) == ({}, "")
    assert local_caches({"HOME": str(shared), "TRITON_HOME": str(local), "TMPDIR": str(local)}, mounts) == ({}, "")
    assert list(local.iterdir()) == []


def test_a_folder_that_others_could_write_or_a_link_is_not_used(places: tuple[Path, Path]) -> None:
    shared, local = places
    mine, wanted = local / f"regrow-compiled-{os.getuid()}", {"HOME": str(shared), "TMPDIR": str(local)}
    mine.mkdir()
    mine.chmod(0o777)
    assert local_caches(wanted, table(shared, local), roots=[]) == ({}, "")
    mine.rmdir()
    mine.symlink_to(shared)
    assert local_caches(wanted, table(shared, local), roots=[]) == ({}, "")


def test_a_replacement_finds_the_cache_of_who_it_replaces(places: tuple[Path, Path]) -> None:
    shared, local = places
    seats = SpawnRequests(config(), {"HOME": str(shared), "TMPDIR": str(local)}, table(shared, local))
    first = seats.request(order(), store="s").variables["TRITON_CACHE_DIR"]
    joiner = msgspec.structs.replace(order(3), worker=WorkerId("x"), role=Role.JOINER)
    again = SpawnRequests(config(), {"HOME": str(shared), "TMPDIR": str(local)}, table(shared, local))
    assert first == seats.request(joiner, store="s").variables["TRITON_CACHE_DIR"]
    assert first == again.request(joiner, store="s").variables["TRITON_CACHE_DIR"], "also of another agent there"


def test_it_is_said_once_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "local_caches", lambda *_: ({}, "caches are elsewhere"))
    told: list[object] = []
    workers = NodeWorkers(
        config(),
        store=str,
        output=MagicMock(),
        report=told.append,
        on_fact=MagicMock(),
        ended=MagicMock(),
        others=lambda: [],
    )
    monkeypatch.setattr(workers, "sweep", lambda: None)
    for name in (WorkerId("a"), WorkerId("b")):
        workers._workers[name] = MagicMock()
        workers.worker_spawned(name, 1)
    assert [each for each in told if isinstance(each, WorkerNoted)] == [
        WorkerNoted(WorkerId("a"), "caches are elsewhere")
    ]


def test_where_mounts_cannot_be_read_an_agent_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    assert " / " in read_mounts()
    monkeypatch.setattr(Path, "read_text", refuse)
    assert local_caches({"HOME": "/home/anna"}, read_mounts()) == ({}, "")
