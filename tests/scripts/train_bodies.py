"""Bodies as the world writes them: several updates, closures, logged reductions, a scaler; mishaps that come once."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["entwined", "late", "trainer", "sharded"], required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--out", type=Path)
parser.add_argument("--mishaps", type=Path, help="a folder in which each is marked, so that it comes once")
args = parser.parse_args()

torch.set_num_threads(1)
session = regrow.init(seed=3)


def mishap(name: str, rank: int) -> None:
    """Raise on that rank, the first time."""
    if args.mishaps is not None and session.rank == rank and not (args.mishaps / name).exists():
        (args.mishaps / name).touch()
        raise OSError(f"{name}: a moment")


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * number + session.rank))


def write_digest() -> None:
    if args.out is not None:
        args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps({"digest": session.digest()}))


def entwined() -> None:
    """A GAN, its critic's optimizer by a closure, LBFGS, and a reduction that is only logged."""
    maker = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.Linear(12, 12), nn.Linear(12, 6))
    )
    critic, tuned = DistributedDataParallel(nn.Linear(6, 1)), DistributedDataParallel(nn.Linear(6, 1))
    makers = torch.optim.AdamW(maker.parameters(), lr=1e-2)
    critics = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    tuners = torch.optim.LBFGS(tuned.parameters(), lr=0.1, max_iter=3)
    scheduler = torch.optim.lr_scheduler.StepLR(makers, 3)
    session.protect(maker, critic, tuned, makers, critics, tuners, scheduler)
    for step in session.steps(batch, until=args.steps):
        if args.mishaps is not None and session.is_main and step.number == 4 and not step.rehearsal:
            torch.rand(3)  # what is drawn here shifts nothing in the body
            for _ in range(100):  # an evaluation by one rank, while another dies
                tuned.module(torch.zeros(2, 6))
                time.sleep(0.005)
        with step as real:

            def judge(real: torch.Tensor = real) -> torch.Tensor:
                critics.zero_grad()
                wrong = critic(maker.module(real).detach()).mean() - critic(real).mean()
                wrong.backward()
                return wrong  # type: ignore[no-any-return]

            def tune(real: torch.Tensor = real) -> torch.Tensor:
                tuners.zero_grad()
                distance = (tuned(real) - real.sum(1, keepdim=True)).square().mean()
                distance.backward()
                mean: torch.Tensor = distance.detach().clone()
                dist.all_reduce(mean)  # LBFGS keeps the loss: it is to be the same on all ranks
                return mean

            critics.step(judge)
            made = -critic.module(maker(real)).mean()
            made.backward()
            makers.step()
            makers.zero_grad()
            tuners.step(tune)  # type: ignore[no-untyped-call]
            scheduler.step()
            loss = made.detach().clone()
            dist.all_reduce(loss)
            step.log(loss=loss)


def late() -> None:
    """A reduction after the update that the rehearsal does not come to, and two updates in a body."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.protect(model, optimizer)
    for step in session.steps(batch, until=args.steps):
        with step as real:
            for part in range(1 if step.number == 0 else 2):
                loss = (model(real + part) - real.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            step.log(loss=loss)


def trainer() -> None:
    """A trainer that has a loop of its own, and gives each step to the optimizer as a closure."""
    model = DistributedDataParallel(nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.protect(model, optimizer)

    @regrow.restartable(training=True)
    def fit() -> None:
        state = optimizer.state.get(model.module.weight, {})
        for number in range(int(state.get("step", 0)), args.steps):
            given = batch(number)

            def compute(real: torch.Tensor = given) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = (model(real) - real.sum(1, keepdim=True)).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(compute)

    fit()


def sharded() -> None:
    """FSDP2 with a scaler and clipping, as torch's page on mixed precision has it; some steps make no update."""
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    session.protect(net, optimizer, scaler)
    for step in session.steps(batch, until=args.steps):
        with step as real:
            loss = (net(real) - real.sum(1, keepdim=True)).square().mean()
            step.log(loss=loss)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if step.number == 2:
                mishap("unscaled", 1)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if step.number == 3:
                optimizer.zero_grad()
                scaler.update(8.0)  # as a script does that leaves out a batch which is not finite
                mishap("skipped", 1)
                continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step.number == 5:
                mishap("updated", 0)


{"entwined": entwined, "late": late, "trainer": trainer, "sharded": sharded}[args.mode]()
write_digest()
