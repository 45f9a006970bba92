"""Five folds and a sweep of eight give what torchrun's give, and the same bits whichever ranks die in them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harm.in_turn import STEPS, TRAININGS
from tests.harm.runs import CLOSE, HERE, ROOT
from tests.process.launching import SOURCE, Site, site

from regrow.observe.ledger import Ledger, read_records

WORLD = 2
Results = dict[str, dict[str, object]]
STRIKES = {
    "folds": ["1@fold-0 1", "0@fold-1 behind", "1@fold-2 building", "0@fold-2 2", "1@fold-3 result", "0@fold-4 0"],
    "sweep": [
        "1@trial-0 0",
        "0@trial-1 leaving",
        "1@trial-2 told",
        "0@trial-3 2",
        "0@trial-4 building",
        "1@trial-5 behind",
        "0@trial-6 result",
        "1@trial-7 1",
        "0@trial-7 end",
    ],
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("in-turn")) as made:
        yield made
        made.assert_nothing_left()


def of_all(folder: Path) -> Results:
    """The results, which all ranks have alike."""
    first: Results
    first, *others = [json.loads((folder / f"results.{rank}").read_text()) for rank in range(WORLD)]
    assert others == [first] * (WORLD - 1)
    return first


def by_regrow(here: Site, kind: str, *strikes: str) -> Results:
    job = f"{kind}-{len(strikes)}"
    folder = here.folder / job
    folder.mkdir()
    words = ["run", "--job", job, "--nproc-per-node", str(WORLD), "--max-faults", "15"]
    words += [str(HERE / "in_turn.py"), kind, "--folder", str(folder)]
    for strike in strikes:
        words += ["--strike", strike]
    done = here.regrow(*words, PYTHONPATH=os.pathsep.join([SOURCE, str(ROOT)]))
    assert done.returncode == 0, done.stdout + done.stderr
    struck = {path.name.removeprefix("struck ") for path in folder.glob("struck *")}
    assert struck == set(strikes), done.stderr
    assert sorted(Ledger(read_records(here.home / "jobs" / job)).commits) == list(range(STEPS * len(TRAININGS[kind])))
    return of_all(folder)


def by_torchrun(folder: Path, kind: str) -> Results:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([SOURCE, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    words += [str(HERE / "in_turn.py"), kind, "--folder", str(folder)]
    subprocess.run(words, check=True, timeout=240, env=environment)
    return of_all(folder)


def suggested(folder: Path) -> dict[str, set[tuple[float, int]]]:
    """By trial, the points that anybody was to try."""
    points: dict[str, set[tuple[float, int]]] = {}
    for line in (folder / "asked").read_text().splitlines():
        name, _, lr, width = json.loads(line)
        points.setdefault(name, set()).add((lr, width))
    return points


@pytest.mark.full
@pytest.mark.parametrize("kind", TRAININGS)
def test_trainings_in_turn_give_torchs_results_and_the_same_bits_where_ranks_die(
    here: Site, tmp_path: Path, kind: str
) -> None:
    calm = by_regrow(here, kind)
    plain = by_torchrun(tmp_path, kind)
    assert list(calm) == list(plain) == TRAININGS[kind]
    for name, result in plain.items():
        assert calm[name]["error"] == pytest.approx(result["error"], rel=CLOSE, abs=CLOSE / 10), name
    assert by_regrow(here, kind, *STRIKES[kind]) == calm
    if kind == "sweep":
        calmly, struck = (suggested(here.folder / f"{kind}-{count}") for count in (0, len(STRIKES[kind])))
        assert struck == calmly, "a newcomer was told another point"
        assert [len(points) for points in struck.values()] == [1] * len(TRAININGS[kind])
        assert len(set().union(*struck.values())) == len(TRAININGS[kind]), "the points follow from nothing"
