"""Trainings on cached data, and who read which samples for them."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.process.launching import Site
from tests.process.training import Fault, Outcome, train

STEPS, WORLD, BATCH = 20, 3, 4
MICROBATCHES = 7
MICRO = ("--microbatches", str(MICROBATCHES))
"""Micro-batches of a step, each one batch of the loader: the ranks have unequal parts."""


@dataclass
class Reading:
    """Result of a run, and how often the producer and the workers read each sample."""

    outcome: Outcome
    by_producer: Counter[int]
    by_workers: Counter[int]

    @property
    def again(self) -> int:
        """Readings of samples that had been read before."""
        reads = self.by_producer + self.by_workers
        return reads.total() - len(reads)


def train_cached(
    site: Site,
    name: str,
    *words: str,
    flags: tuple[str, ...] = (),
    world: int = WORLD,
    steps: int = STEPS,
    faults: list[Fault] | None = None,
) -> Reading:
    """Run `train_cached.py` under `regrow run`, with a data cache of its own in the site's folder."""
    cache, reads = site.folder / f"{name}.cache", site.folder / f"{name}.reads"
    cache.mkdir()
    outcome = train(
        site,
        name,
        "--data-cache",
        str(cache),
        *flags,
        world=world,
        steps=steps,
        faults=faults,
        extra=("--reads", str(reads), "--cache", str(cache), "--batch", str(BATCH), *words),
        script="train_cached.py",
    )
    assert list(cache.iterdir()) == [], "the cache outlived its job"
    return Reading(outcome, *counted(reads))


def counted(path: Path) -> tuple[Counter[int], Counter[int]]:
    """Count how often the producer, and how often workers, read each sample."""
    by: dict[str, Counter[int]] = {"producer": Counter(), "worker": Counter()}
    for line in path.read_text().splitlines():
        _, who, index = line.split()
        by[who][int(index)] += 1
    return by["producer"], by["worker"]
