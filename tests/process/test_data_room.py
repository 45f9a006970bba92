"""A cache whose place runs full in mid-training costs the cache and not the job."""

import json
import os
from collections.abc import Iterator

import pytest
from tests.process.cached import STEPS, counted
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS
from tests.process.warm import MOUNT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a mount of its own needs root")

WORLD = 2


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("room")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, mount: str, *words: str) -> tuple[list[dict[str, object]], str]:
    """Final states of all ranks, and what was said, of a training with its cache in a mount that it alone sees."""
    (here.folder / "place").mkdir(exist_ok=True)
    out, reads = here.folder / f"{name}.out", here.folder / f"{name}.reads"
    script = [str(SCRIPTS / "train_cached.py"), "--steps", str(STEPS), "--out", str(out), "--reads", str(reads)]
    job = ["run", "--job", name, "--nproc-per-node", str(WORLD), "--data-cache", "place", "--data-cache-bytes", "16MiB"]
    done = here.regrow(*job, *script, *words, **{MOUNT: mount})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    by_producer, by_workers = counted(reads)
    assert (by_producer + by_workers).keys() == set(range(STEPS * WORLD * 4))
    finals = [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(WORLD)]
    return finals, done.stdout + done.stderr


@pytest.fixture(scope="module")
def roomy(here: Site) -> list[dict[str, object]]:
    finals, said = run(here, "roomy", "mount -t tmpfs -o size=16m none place")
    assert "without the data cache" not in said
    return finals


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_place_that_another_fills_in_mid_training(here: Site, roomy: list[dict[str, object]], workers: str) -> None:
    filled = f"filled-{workers}.at"
    until = "until ls place/*/*/*.entry >/dev/null 2>&1; do sleep 0.01; done"
    fill = f"({until}; cat /dev/zero > place/full; touch {filled}) 2>/dev/null &"
    mount = f"mount -t tmpfs -o size=1200k none place && {{ {fill} }}"
    finals, said = run(here, f"filled-{workers}", mount, "--workers", workers, "--at", f"3:wait-{filled}")
    assert finals == roomy
    assert f"now wait-{filled}" in said, "it was not full in mid-training"
    # Whether there is anything to say depends on what had been made by then, and on whose room can be used again.
    assert said.count("goes on without the data cache") <= 1, said
    assert said.count("workers make the batches of loader 0 themselves") <= 1, said
