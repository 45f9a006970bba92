"""`regrow try`: what a script is told on its first evening."""

import re

from tests.process.launching import Site
from tests.process.training import SCRIPTS

PATIENCE_S = 250.0
MENDED = re.compile(r"equal +[\d.]+ m?s (fork|standby)\b")
COUNTS = """
import functools
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import regrow

session = regrow.init(seed=1)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model, optimizer)
@functools.lru_cache
def seen():
    return torch.zeros(())
for step in session.steps(lambda number: torch.full((2, 4), 0.1 * number + session.rank), until=1000):
    with step as x:
        loss = (model(x) - 1).square().mean() / (1 + seen())
        step.log(loss=loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen().add_(len(x))
"""


def try_out(here: Site, *words: str) -> tuple[int, str]:
    with here.start("try", *words) as running:
        code = running.wait(PATIENCE_S)
    return code, running.output


def test_a_good_script_gets_a_table_of_kills_that_are_all_equal(here: Site) -> None:
    code, output = try_out(here, "--kills", "3", str(SCRIPTS / "train_small.py"), "--steps", "1000")
    assert code == 0, output
    assert "6 of 6 kills mended, bitwise equal" in output
    forked, standby = (section.split("\n\n")[0] for section in output.split("\nreplaced by ")[1:])
    assert len(MENDED.findall(forked)) == 3 and "standby" not in forked.removeprefix("fork"), output
    # Of steps this short, a kill may come before the one before it is mended, and no standby is there yet.
    assert len(MENDED.findall(standby)) == 3 and "standby" in MENDED.findall(standby), output


def test_a_script_that_counts_for_itself_differs_and_is_told_what_to_write_instead(here: Site) -> None:
    code, output = try_out(here, "--kills", "1", here.script(COUNTS))
    assert code == 1
    assert "DIFFERS" in output
    assert "rank 0, killed at data (reading its batch) of step 2: step 2, rank 0: loss is" in output
    assert "work it out from step.number" in output
    assert "0 of 2 kills mended" in output


def test_a_script_that_fails_by_itself_is_told_so_before_any_kill(here: Site) -> None:
    code, output = try_out(here, here.script("import regrow\nsession = regrow.init()\nraise ValueError('mine')"))
    assert code == 1
    assert "fails without any kill" in output
    assert "ValueError: mine" in output
    assert "equal" not in output.replace("bitwise equal", "")
