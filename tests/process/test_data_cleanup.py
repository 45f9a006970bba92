"""However a job ends, nothing of its data cache stays; and it runs where there is no room for one."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.process.launching import PATIENCE, Running, Site, agents_below, site
from tests.process.warm import AGENTS, MOUNT

FILLS = """
import os, sys, time
from pathlib import Path
from regrow.core.config import WorkerEnv
env = WorkerEnv.read()
if env.data is None:
    print("no cache", flush=True)
else:
    folder = Path(env.data.folder) / ("ab" * 16)
    folder.mkdir(mode=0o700, exist_ok=True)
    for step in range(3):
        (folder / f"{env.worker}.{step}.entry").write_bytes(b"x" * 100_000)
    print("budget", env.data.budget, flush=True)
print("waiting", flush=True)
while not Path("go").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        (tmp_path / "root").mkdir()
        yield made


def root(here: Site) -> Path:
    return here.folder / "root"


def start(here: Site, *flags: str, **more: str) -> Running:
    return here.start("run", "--nproc-per-node", "2", *flags, here.script(FILLS), **more)


def agents_of(job: Running) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in agents_below(job)]


def cache_of(here: Site, job: Running) -> Path:
    """The only one of this job's, in the root that it shares with others."""
    name = job.output.split("/jobs/")[1].split()[0]
    (folder,) = (each for each in here.caches(root(here)) if f"/jobs/{name} " in (each / "owner").read_text())
    return folder


def entries(folder: Path) -> int:
    return sum(1 for path in folder.rglob("*.entry"))


def gone(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while list(folder.iterdir()):
        assert time.monotonic() < deadline, list(folder.rglob("*"))
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("how", "nodes"),
    [
        ("done", 1),
        ("Ctrl-C", 1),
        ("Ctrl-C twice", 2),
        ("SIGTERM", 1),
        ("launcher killed", 1),
        ("launcher killed", 2),
    ],
)
def test_nothing_of_the_cache_outlives_the_job(here: Site, how: str, nodes: int) -> None:
    with start(here, "--data-cache", "root", *(["--local-nodes", "2"] if nodes == 2 else [])) as job:
        job.wait_for("waiting\n", times=2 * nodes)
        assert len(here.caches(root(here))) == nodes, "each agent has a folder of its own"
        assert entries(root(here)) == 6 * nodes
        match how:
            case "done":
                (here.folder / "go").touch()
                assert job.wait() == 0, job.output
            case "launcher killed":
                job.signal(signal.SIGKILL)
                job.process.wait(PATIENCE)
                gone(root(here))
            case _:
                for _ in range(2 if "twice" in how else 1):
                    job.signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGINT)
                assert job.wait() == 75, job.output
        assert list(root(here).iterdir()) == []
    here.assert_nothing_left()


def test_by_default_it_is_in_shared_memory(here: Site) -> None:
    with start(here) as job:
        job.wait_for("waiting\n", times=2)
        (cache,) = here.caches()
        assert entries(cache) == 6
        assert 1 << 20 <= int(job.output.partition("budget ")[2].split()[0]) <= 4 << 30
        assert cache.stat().st_mode & 0o777 == 0o700
        (here.folder / "go").touch()
        assert job.wait() == 0, job.output
    here.assert_nothing_left()


def test_an_agent_that_is_killed_gets_a_successor_with_an_empty_cache(here: Site) -> None:
    with start(here, "--data-cache", "root", **{AGENTS: "2"}) as job:
        job.wait_for("waiting\n", times=2)
        (first,) = here.caches(root(here))
        (agent,) = agents_of(job)
        agent.kill()
        job.wait_for("waiting\n", times=4)
        (second,) = here.caches(root(here))
        assert second != first
        (here.folder / "go").touch()
        assert job.wait() == 0, job.output
    assert list(root(here).iterdir()) == []
    here.assert_nothing_left()


def test_what_is_left_when_launcher_and_agent_are_killed_is_swept_by_the_next_job(here: Site) -> None:
    with start(here, "--data-cache", "root") as job, start(here, "--data-cache", "root") as other:
        for each in (job, other):
            each.wait_for("waiting\n", times=2)
        mine = cache_of(here, job)
        job.signal(signal.SIGSTOP)  # so that it does not see its agent die
        for agent in agents_of(job):
            agent.kill()
        job.signal(signal.SIGKILL)
        job.process.wait(PATIENCE)
        assert entries(mine) == 6, "nobody was left to remove it"
        with start(here, "--data-cache", "root") as third:
            third.wait_for("removed 1 data cache folder")
            third.wait_for("waiting\n", times=2)
            folders = set(here.caches(root(here)))
            assert mine not in folders
            assert len(folders) == 2, "the other job's is not touched"
            assert entries(root(here)) == 12
            (here.folder / "go").touch()
            assert third.wait() == 0, third.output
        assert other.wait() == 0, other.output
    assert list(root(here).iterdir()) == []
    here.assert_no_process_left()


@pytest.mark.parametrize("killed", ["launcher", "agent"])
def test_jobs_with_the_same_root_leave_each_other_alone(here: Site, killed: str) -> None:
    with start(here, "--data-cache", "root", **{AGENTS: "2"}) as one, start(here, "--data-cache", "root") as two:
        for each in (one, two):
            each.wait_for("waiting\n", times=2)
        assert len(here.caches(root(here))) == 2
        theirs = cache_of(here, two)
        before = sorted(path.name for path in theirs.rglob("*"))
        if killed == "launcher":
            one.signal(signal.SIGKILL)
            one.process.wait(PATIENCE)
        else:
            agents_of(one)[0].kill()
            one.wait_for("waiting\n", times=4)
            (here.folder / "go").touch()
            assert one.wait() == 0, one.output
        deadline = time.monotonic() + PATIENCE
        while here.caches(root(here)) not in ([theirs], []):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if killed == "launcher":
            assert sorted(path.name for path in theirs.rglob("*")) == before
        (here.folder / "go").touch()
        assert two.wait() == 0, two.output
    here.assert_nothing_left()


@pytest.mark.parametrize(
    ("flags", "budget"),
    [(("--data-cache-bytes", "3MiB"), 3 << 20), (("--data-cache", "off"), 0)],
)
def test_workers_are_told_the_budget(here: Site, flags: tuple[str, ...], budget: int) -> None:
    (here.folder / "go").touch()
    done = here.regrow("run", "--nproc-per-node", "1", *flags, here.script(FILLS))
    assert done.returncode == 0, done.stderr
    if budget == 0:
        assert "no cache" in done.stdout
    else:
        assert f"budget {budget}\n" in done.stdout
    assert "without a data cache" not in done.stderr, "off is no fault"
    here.assert_nothing_left()


# --- no place -------------------------------------------------------------------------------------------------------


def in_a_mount(here: Site, mount: str, *flags: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """A job with a mount that it alone sees."""
    (here.folder / "go").touch()
    return here.regrow("run", "--nproc-per-node", "2", *flags, here.script(FILLS), **{MOUNT: mount}, **more)


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount of its own needs root")
@pytest.mark.parametrize(
    ("mount", "why", "nodes"),
    [
        ("mount -t tmpfs -o size=64k none root && head -c 65536 /dev/zero > root/full", "is full", 1),
        ("mount -t tmpfs -o ro,size=8m none root", "Read-only file system", 2),
        ("mount -t tmpfs -o nr_inodes=1,size=8m none root", "No space left on device", 1),
    ],
    ids=["full", "read-only", "no inodes"],
)
def test_a_root_without_room_costs_the_cache_and_not_the_job(here: Site, mount: str, why: str, nodes: int) -> None:
    done = in_a_mount(here, mount, "--data-cache", "root", "--local-nodes", str(nodes))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no cache") == 2 * nodes
    assert done.stderr.count("the job runs without a data cache") == 1, done.stderr
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    here.assert_nothing_left()


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount of its own needs root")
def test_without_shared_memory_the_cache_is_in_the_temporary_folder(here: Site) -> None:
    (here.folder / "tmp").mkdir()
    done = in_a_mount(here, "mount -t tmpfs -o ro none /dev/shm", TMPDIR=str(here.folder / "tmp"))
    assert done.returncode == 0, done.stderr
    told = done.stdout
    assert told.count("budget") == 2 or "without a data cache" in done.stderr
    left = [path.name for path in (here.folder / "tmp").iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # which torch makes as it is imported


def test_a_root_that_is_missing_is_said_even_if_quiet(here: Site) -> None:
    (here.folder / "go").touch()
    done = here.regrow("run", "--quiet", "--data-cache", "nowhere", here.script(FILLS))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the job runs without a data cache") == 1
    assert "nowhere: No such file or directory" in done.stderr
    assert "no cache" in done.stdout
