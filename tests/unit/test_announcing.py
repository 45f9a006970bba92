"""What a worker says of its steps to who reads its logging."""

import subprocess
import sys

SCRIPT = """
import logging
logging.basicConfig(level=logging.INFO)
import regrow, torch
session = regrow.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model, optimizer)
{more}
for step in session.steps(lambda number: torch.ones(1, 2), until=2):
    with step as batch:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    step.log(loss=loss)
"""


def said(more: str) -> str:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(more=more)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_steps_are_no_lines_of_a_script_that_configures_logging_unless_it_asks_for_them() -> None:
    assert "step 1" not in said("")
    assert said("logging.getLogger('regrow.steps').setLevel(logging.INFO)").count("INFO:regrow.steps:step ") == 2
