"""A node that is lost and replaced fills its cache again by itself, and the job trains on as if nothing had been."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.process.cached import counted
from tests.process.elastic import HURRY
from tests.process.launching import PATIENCE, Running, Site, site
from tests.process.training import SCRIPTS

from regrow.observe.ledger import Ledger, read_records

STEPS, BATCH = 60, 4
Losses = dict[tuple[int, int], float]
LOCAL = ("--local-nodes", "2", "--nproc-per-node", "1")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("data-nodes")) as made:
        yield made
        made.assert_nothing_left()


class Job:
    """A training on two nodes of this machine, with caches in a folder of its own."""

    def __init__(self, here: Site, name: str, *flags: str, pace: float = 0.1) -> None:
        self._here, self.name = here, name
        self.root, self.reads, self.out = (here.folder / f"{name}.{what}" for what in ("root", "reads", "out"))
        self.root.mkdir()
        words = ["--steps", str(STEPS), "--batch", str(BATCH), "--sample-s", "0.003", "--pace", str(pace)]
        words += ["--reads", str(self.reads), "--out", str(self.out), "--cache", str(self.root)]
        self.running: Running = here.start(
            "run", "--job", name, "--data-cache", str(self.root), *flags, str(SCRIPTS / "train_cached.py"), *words
        )

    def until_furnished(self) -> None:
        """Returns when both agents have a folder for their cache."""
        self.until(lambda: len(list(self.root.glob("regrow-data-*/owner"))) == 2)

    def cache_of(self, node: str) -> Path:
        found = [path for path in self.root.iterdir() if f" {node}\n" in _text(path / "owner")]
        assert len(found) == 1
        return found[0]

    def agent(self, node: str) -> int:
        """The process of a node's agent."""
        status = json.loads(self._here.regrow("status", self.name, "--json").stdout)
        (worker,) = (worker for worker in status["ranks"] if worker["node"] == node)
        return int(psutil.Process(worker["pid"]).ppid())

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline and self.running.process.poll() is None, self.running.output
            time.sleep(0.01)

    def end(self) -> tuple[Losses, list[dict[str, object]], Counter[int]]:
        """Committed losses, final states, and how often each sample was read."""
        assert self.running.wait() == 0, self.running.output
        ledger = Ledger(read_records(self._here.home / "jobs" / self.name))
        losses: Losses = {
            (step, rank): commit.metrics["loss"]
            for step, ranks in ledger.commits.items()
            for rank, commit in ranks.items()
        }
        finals = [json.loads(self.out.with_suffix(f".{rank}.json").read_text()) for rank in range(2)]
        assert list(self.root.iterdir()) == [], "the caches outlived the job"
        by_producer, by_workers = counted(self.reads)
        return losses, finals, by_producer + by_workers


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _filled(cache: Path) -> bool:
    """True if it has an entry of the last step. A cache whose agent has ended may be on its way out."""
    try:
        return any(cache.glob(f"*/{STEPS - 1:010d}.*.entry"))
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> tuple[Losses, list[dict[str, object]]]:
    job = Job(here, "undisturbed", "--nproc-per-node", "2", "--data-cache-bytes", "64MiB", pace=0.0)
    with job.running:
        losses, finals, reads = job.end()
    assert reads.total() == len(reads) == STEPS * BATCH * 2
    return losses, finals


@pytest.mark.parametrize("lost", ["node0", "node1"])
def test_a_replaced_node_fills_its_cache_again_by_itself(
    here: Site, undisturbed: tuple[Losses, list[dict[str, object]]], lost: str
) -> None:
    (here.folder / HURRY).unlink(missing_ok=True)
    job = Job(here, f"lost-{lost}", *LOCAL)
    with job.running:
        job.until_furnished()
        first = job.cache_of(lost)
        job.until(lambda: _filled(first))
        os.kill(job.agent(lost), signal.SIGKILL)
        own = {first, job.cache_of("node1" if lost == "node0" else "node0")}
        job.until(lambda: any(_filled(cache) for cache in set(job.root.iterdir()) - own))
        (here.folder / HURRY).touch()  # steps were left until now, however long it took
        losses, finals, reads = job.end()
    assert f"{lost} is back" in job.running.output
    assert finals == undisturbed[1]
    assert {at: loss for at, loss in losses.items() if undisturbed[0][at] != loss} == {}
    assert set(reads.values()) == {1, 2}, "the lost node's samples were read twice at most, the other's once"
