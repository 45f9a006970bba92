"""Log lines of a worker about its steps."""

import subprocess
import sys

PATIENCE_S = 300.0
SCRIPT = """
import logging, os, sys
logging.basicConfig(level=logging.INFO)
import regrow, torch

asks = os.fork() == 0  # so that torch is imported once
if not asks:
    _, status = os.wait()
    assert status == 0
    print("does not ask", file=sys.stderr, flush=True)
session = regrow.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model, optimizer)
if asks:
    logging.getLogger("regrow.steps").setLevel(logging.INFO)
for step in session.steps(lambda number: torch.ones(1, 2), until=2):
    with step as batch:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    step.log(loss=loss)
"""


def test_steps_are_no_lines_of_a_script_that_configures_logging_unless_it_asks_for_them() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    asks, does_not = done.stderr.split("does not ask\n")
    assert asks.count("INFO:regrow.steps:step ") == 2, asks
    assert "step 1" not in does_not
