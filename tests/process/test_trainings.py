"""Several trainings in a script go through the death of any rank, in each and between two, to the same results."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site

from regrow.observe.ledger import Ledger, read_records

NAMES, STEPS, WORLD = ("first", "second", "third"), 3, 2
SCRIPT = f"""
import json, os, signal, sys
import torch
import torch.distributed as dist
import regrow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

out, kills = sys.argv[1:]
torch.set_num_threads(1)
session = regrow.init(seed=3)
world = torch.ones(1)
dist.all_reduce(world)


def at(place):
    if f"{{session.rank}}@{{place}}" in kills.split(","):
        try:
            os.close(os.open(f"{{out}}.{{session.rank}}.{{place}}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(97 * step + session.rank))


names, name = {NAMES!r}, ""
try:
    for training in session.trainings(names):
        name = str(training)
        with open(f"{{out}}.begun", "a") as begun:
            begun.write(f"{{name}}\\n")
        at(f"{{name}} building")
        net = nn.Sequential(nn.Linear(8, 16 + 8 * len(session.results)), nn.Dropout(0.1), nn.LazyLinear(1))
        net(torch.zeros(1, 8))
        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        session.protect(model, optimizer)
        for step in session.steps(batch, until={STEPS}):
            with step as x:
                loss = (model(x) - len(session.results)).square().mean()
                step.log(loss=loss)
                optimizer.zero_grad()
                loss.backward()
                if not step.rehearsal:
                    at(f"{{name}} {{step.number}}")
                optimizer.step()
        at(f"{{name}} behind")
        total = model(torch.full((2, 8), 0.1 + session.rank)).detach().sum()
        dist.all_reduce(total)
        before = [result["total"] for result in session.results.values()]
        training.result = {{"total": total.item(), "digest": session.digest(), "before": before, "of": session.rank}}
        at(f"{{name}} result")
    at("end")
finally:
    at(f"{{name}} leaving")
with open(f"{{out}}.{{session.rank}}.json", "w") as file:
    json.dump(session.results, file)
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("trainings")) as made:
        made.script(SCRIPT)
        yield made
        made.assert_nothing_left()


def results(here: Site, name: str, *kills: str, flags: str = "") -> dict[str, dict[str, object]]:
    """Results that all ranks have in the end, of a job that ends with 0 and commits no step again."""
    words = ["run", "--job", name, "--nproc-per-node", str(WORLD), *flags.split(), "train.py", name, ",".join(kills)]
    done = here.regrow(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    for kill in kills:
        assert (here.folder / f"{name}.{kill.replace('@', '.')}").exists(), f"{kill} has not struck: {done.stderr}"
    first: dict[str, dict[str, object]]
    first, *others = [json.loads((here.folder / f"{name}.{rank}.json").read_text()) for rank in range(WORLD)]
    assert all(other == first for other in others)
    ledger = Ledger(read_records(here.home / "jobs" / name))
    assert sorted(ledger.commits) == list(range(STEPS * len(NAMES)))
    assert {formed.training: formed.began for formed in ledger.generations} == {
        each: STEPS * at for at, each in enumerate(NAMES)
    }
    return first


def begun(folder: Path, name: str) -> Counter[str]:
    """Number of bodies that were begun, by training."""
    return Counter((folder / f"{name}.begun").read_text().split())


def test_a_script_with_three_trainings_loses_ranks_anywhere_and_has_the_same_results(here: Site) -> None:
    calm = results(here, "calm")
    assert list(calm) == list(NAMES)
    assert [each["of"] for each in calm.values()] == [0, 0, 0]
    assert calm["third"]["before"] == [calm["first"]["total"], calm["second"]["total"]]
    assert begun(here.folder, "calm") == dict.fromkeys(NAMES, WORLD)
    kills = ("0@first 1", "1@first leaving", "1@second result", "0@third 2", "1@third behind", "0@end")
    assert results(here, "struck", *kills) == calm
    assert begun(here.folder, "struck") == {"first": WORLD + 1, "second": WORLD + 1, "third": WORLD + 3}


@pytest.mark.full
def test_a_rank_that_dies_while_a_later_training_is_built_costs_no_finished_one(here: Site) -> None:
    calm = results(here, "quiet", flags="--standby 1")
    kills = ("0@second building", "0@second 0", "1@second 2", "0@second result", "1@third building", "0@third 0")
    assert results(here, "built", *kills, flags="--standby 1") == calm
    assert begun(here.folder, "built")["first"] in (WORLD, WORLD + 1)  # with the standby's, if it came to it
