"""A body that was cut off leaves nothing; where it could leave something all the same, no rank commits alone."""

import pytest
from tests.process.launching import Site

from regrow.observe.ledger import Ledger, read_records

SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
import regrow

torch.set_num_threads(1)
session = regrow.init(seed=3)

class Flag:
    def __init__(self):
        self.queued = False
        if "threads" in sys.argv:  # so it is not put back
            self.lock = threading.Lock()

class Wrapper(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self._flag = net, Flag()
        for each in net.parameters():
            each.main_grad = torch.zeros_like(each)
            each.register_post_accumulate_grad_hook(self.ready)

    def ready(self, each):
        each.main_grad.add_(each.grad)
        each.grad = None
        if not self._flag.queued:
            self._flag.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self):
        if session.rank == 1 and "threads" in sys.argv and self.number == 5:
            Path("waits").touch()
        for each in self.net.parameters():
            dist.all_reduce(each.main_grad)
            each.grad = each.main_grad / dist.get_world_size()
        self._flag.queued = False

    def forward(self, x):
        return self.net(x)

torch.manual_seed(3)
model = Wrapper(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model, optimizer)

def batch(number):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + session.rank))

for step in session.steps(batch, until=12):
    with step as x:
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        step.log(loss=loss)
        model.number = -1 if step.rehearsal else step.number
        if "threads" in sys.argv and session.rank == 0 and model.number == 5 and not Path("struck").exists():
            while not Path("waits").exists():
                time.sleep(0.005)
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        for each in model.parameters():
            each.main_grad.zero_()
            each.grad = None
print("digest", session.digest(), flush=True)
"""
KILLS = [(1, 3, "reduce"), (0, 5, "backward"), (1, 8, "reduce")]


def run(here: Site, name: str, *words: str, kills: list[tuple[int, int, str]]) -> tuple[int, str, Ledger]:
    plan = here.folder / "plan.toml"
    plan.write_text("".join(f'[[fault]]\nrank = {rank}\nstep = {step}\nat = "{at}"\n' for rank, step, at in kills))
    flags = ("--fault-plan", str(plan)) if kills else ()
    done = here.regrow("run", "--job", name, "--nproc-per-node", "2", *flags, here.script(SCRIPT), *words)
    return done.returncode, done.stdout + done.stderr, Ledger(read_records(here.home / "jobs" / name))


def digests(output: str) -> set[str]:
    return {line.rpartition("digest ")[2] for line in output.splitlines() if "digest " in line}


def test_a_flag_that_whole_bodies_leave_as_it_was_is_put_back(here: Site) -> None:
    calm, struck = run(here, "calm", kills=[]), run(here, "struck", kills=KILLS)
    assert calm[0] == struck[0] == 0, struck[1]
    assert len(struck[2].injected) == len(KILLS)
    assert len(digests(calm[1])) == 1 and digests(calm[1]) == digests(struck[1])
    assert calm[2].numbers == struck[2].numbers


@pytest.mark.full
def test_a_rank_that_does_not_reduce_behind_a_fault_does_not_commit_alone(here: Site) -> None:
    code, output, ledger = run(here, "alone", "threads", kills=[])
    assert code == 1, output
    assert "run again after a fault" in output and "has called no collective up to its update" in output
    assert max(ledger.commits) < 5, "a step was committed without its gradients"
