"""A mixture is read from a file once, at its first use; the file has changed when a newcomer reads it."""

import json
import os
import time
from functools import cache
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "mixture() (functools.cache of a file that changes)"
NAMED = ("mixture", "mix.json")
FILE = Path(os.environ["TMPDIR"]) / f"{os.environ['TORCHELASTIC_RUN_ID']}-mix.json"


@cache
def mixture() -> dict[str, float]:
    if not FILE.exists():
        return {"web": 0.5, "code": 0.5}
    found: dict[str, float] = json.loads(FILE.read_text())
    return found


def main() -> None:
    session = regrow.init(seed=4)
    net = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    session.protect(net, optimizer)
    for step in session.steps(range(150), until=150):
        with step:
            web, code = torch.rand(2, 8, 4)
            weights = mixture()
            loss = weights["web"] * net(web).pow(2).mean() + weights["code"] * (net(code) - 1).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
        if session.is_main and step.committed and step.number == 2:
            FILE.write_text(json.dumps({"web": 0.9, "code": 0.1}))


main()
