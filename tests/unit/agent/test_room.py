"""Memory for one more worker is read from the kernel, with the limits of control groups."""

from pathlib import Path

import pytest

from regrow.agent.workers.room import refusal
from regrow.core.ids import NodeId

MIB = 1 << 20
NODE = NodeId("n1")


def machine(folder: Path, *, free: int, ranks: dict[int, int], groups: str = "0::/a/b\n") -> Path:
    proc = folder / "proc"
    for pid, resident in ranks.items():
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "statm").write_text(f"99999999 {resident * MIB // 4096} 1 1 0 1 0\n")
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {free << 10} kB\n")
    return proc


def group(folder: Path, path: str, limit: str, used: int, cached: int, *, old: bool = False) -> Path:
    here = folder / "groups" / path
    here.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    (here / names[0]).write_text(f"{limit}\n")
    (here / names[1]).write_text(f"{used * MIB}\n")
    (here / "memory.stat").write_text(f"anon 1\n{'total_' if old else ''}inactive_file {cached * MIB}\n")
    return folder / "groups"


@pytest.mark.parametrize(("free", "room"), [(801, True), (799, False)])
def test_twice_the_memory_of_the_largest_rank_must_be_free(tmp_path: Path, free: int, room: bool) -> None:
    proc = machine(tmp_path, free=free, ranks={7: 100, 8: 400})
    told = refusal([7, 8, 9], NODE, proc, tmp_path / "groups")
    assert (told == "") is room
    assert room or told == "there is no room for a second copy on n1: 799 MiB are free, 800 MiB are needed"


@pytest.mark.parametrize(
    ("limit", "used", "cached", "room"),
    [("max", 999, 0, True), (str(1000 * MIB), 900, 0, False), (str(1000 * MIB), 900, 800, True)],
)
def test_the_limit_of_a_control_group_above_counts_without_what_the_kernel_would_give_back(
    tmp_path: Path, limit: str, used: int, cached: int, room: bool
) -> None:
    proc = machine(tmp_path, free=9000, ranks={7: 400})
    group(tmp_path, "a/b", "max", 1, 0)
    groups = group(tmp_path, "a", limit, used, cached)
    assert (refusal([7], NODE, proc, groups) == "") is room


def test_so_do_older_control_groups(tmp_path: Path) -> None:
    proc = machine(tmp_path, free=9000, ranks={7: 400}, groups="9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n")
    groups = group(tmp_path, "memory/a/b", str(1000 * MIB), 900, 0, old=True)
    assert "100 MiB are free" in refusal([7], NODE, proc, groups)
    assert refusal([], NODE, proc, groups) == "", "there is nothing to go by"
