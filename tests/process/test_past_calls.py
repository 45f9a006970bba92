"""A rank that is replaced behind a step gets the answers that the others got, or the job does not end with 0."""

import json
from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site

SCRIPT = """
import json, os, signal, sys
import torch
import torch.distributed as dist
import regrow
from torch.nn.parallel import DistributedDataParallel

how, out, kill = sys.argv[1:]
torch.set_num_threads(1)
session = regrow.init(seed=3)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
session.protect(model, optimizer)


def at(place):
    if f"{session.rank}@{place}" == kill and not os.path.exists(out + ".struck"):
        open(out + ".struck", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def say(place, value):
    with open(f"{out}.{session.rank}", "a") as file:
        file.write(json.dumps([place, value]) + "\\n")


def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(97 * step + session.rank))


@regrow.restartable
def marked(place):
    total = torch.tensor([session.rank + 2.0])
    dist.all_reduce(total)
    at(f"marked {place}")
    gathered = [None] * session.world_size
    dist.all_gather_object(gathered, {"rank": session.rank, "total": total.item()})
    return [each["rank"] for each in gathered] + [total.item()]


for epoch in session.epochs(batch, 2, length=3):
    for step in epoch:
        with step as x:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    total = torch.tensor([session.rank + 1.0])
    dist.all_reduce(total)
    say(f"alone {epoch.number}", total.item())
    say(f"marked {epoch.number}", marked(epoch.number))
    best = [f"of {session.rank}"]
    dist.broadcast_object_list(best, src=1)
    say(f"sent {epoch.number}", best)
    if how == "own":
        mine = torch.zeros(1)
        each = [torch.tensor([n + 5.0]) for n in range(session.world_size)] if session.rank == 0 else None
        dist.scatter(mine, each, src=0)
        say(f"own {epoch.number}", mine.item())
    at(f"end {epoch.number}")
at("behind")
done = torch.zeros(1)
dist.all_reduce(done)
"""
RANKS = 3


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("past")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, how: str, kill: str) -> tuple[int, str, list[dict[str, object]]]:
    name = f"past-{how}-{kill}".replace("@", "-").replace(" ", "-")
    done = here.regrow("run", "--nproc-per-node", str(RANKS), "--job", name, here.script(SCRIPT), how, name, kill)
    said: list[dict[str, object]] = []
    for rank in range(RANKS):
        lines = [json.loads(line) for line in (here.folder / f"{name}.{rank}").read_text().splitlines()]
        for place, value in lines:
            assert all(value == other for where, other in lines if where == place), f"rank {rank} said two of {place}"
        said.append(dict(lines))
    struck = (here.folder / f"{name}.struck").exists()
    assert struck == (kill != "nowhere"), "the kill did not happen"
    return done.returncode, done.stdout + done.stderr, said


EXPECTED = {
    f"{place} {epoch}": value
    for epoch in (0, 1)
    for place, value in {"alone": 6.0, "marked": [0, 1, 2, 9.0], "sent": ["of 1"]}.items()
}


@pytest.mark.parametrize("kill", ["2@behind", "1@behind", "0@marked 0", "1@end 1", "0@end 0"])
def test_who_is_replaced_behind_a_step_says_what_all_would_have_said(here: Site, kill: str) -> None:
    code, output, said = run(here, "all", kill)
    assert code == 0, output
    assert said == [EXPECTED] * RANKS


def test_an_answer_that_nobody_else_had_is_not_made_up_without_a_word(here: Site) -> None:
    script = here.script(SCRIPT)
    done = here.regrow("run", "--nproc-per-node", str(RANKS), "--job", "own", script, "own", "own", "2@behind")
    output = done.stdout + done.stderr
    assert done.returncode == 76, output
    assert "rank 2 was replaced when the others had ended a step" in output
    assert "scatter at train.py:58 has an answer that other ranks have not" in output
