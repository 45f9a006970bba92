"""Several models and optimizers."""

import copy
from typing import Any

import torch
from tests.harm.frame import WIDTH, Trial, backward, ddp, mlp, mse
from tests.harm.table import DRAWS, habit
from torch import nn


@habit("a GAN: two optimizers, one after the other in a body", differs=DRAWS)
def gan(t: Trial) -> dict[str, Any]:
    make, judge = ddp(mlp(1, 4, WIDTH)), ddp(mlp(2))
    first = torch.optim.Adam(judge.parameters(), lr=1e-2)
    second = torch.optim.Adam(make.parameters(), lr=1e-2)
    t.session.protect(make, first, second, judge=judge)
    for step in t.steps():
        with step as (x, _):
            noise = torch.randn(len(x), 4)
            first.zero_grad()
            truth = judge(x).sigmoid().clamp(1e-4, 1 - 1e-4).log().mean()
            lie = (1 - judge(make(noise).detach()).sigmoid()).clamp(1e-4, 1).log().mean()
            backward(-(truth + lie))
            first.step()
            second.zero_grad()
            fooled = -judge(make(noise)).sigmoid().clamp(1e-4, 1).log().mean()
            backward(fooled)
            second.step()
            step.log(loss=fooled, truth=truth)
    return {"make": make, "judge": judge, "first": first, "second": second}


@habit(
    "MoCo: a momentum encoder updated in the forward, and a queue of keys",
    differs="a rank's negatives are of its own part of the batch, and its noise too",
)
def moco(t: Trial) -> dict[str, Any]:
    class MoCo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = mlp(1, WIDTH, 4)
            self.keys = copy.deepcopy(self.queries).requires_grad_(False)
            self.register_buffer("queue", torch.randn(16, 4, generator=torch.Generator().manual_seed(3)))
            self.register_buffer("at", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for key, query in zip(self.keys.parameters(), self.queries.parameters(), strict=True):
                    key.mul_(0.9).add_(query, alpha=0.1)
                keys = nn.functional.normalize(self.keys(x), dim=1)
            queries = nn.functional.normalize(self.queries(x), dim=1)
            scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().T], 1)
            with torch.no_grad():
                everybody = [torch.empty_like(keys) for _ in range(torch.distributed.get_world_size())]
                torch.distributed.all_gather(everybody, keys)
                new, at = torch.cat(everybody)[:4], int(self.at)
                self.queue[at : at + 4] = new
                self.at[0] = (at + 4) % 16
            return nn.functional.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.long))

    model = ddp(MoCo())
    optimizer = torch.optim.SGD(model.module.queries.parameters(), lr=5e-2, momentum=0.9)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, _):
            loss = model(x)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit("BYOL: a target network updated after the optimizer's step, in the body", differs=DRAWS)
def byol(t: Trial) -> dict[str, Any]:
    online = mlp(1, WIDTH, 4)
    model, target = ddp(online), copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer, target=target)
    for step in t.steps():
        with step as (x, _):
            loss = mse(model(x), target(x + 0.1 * torch.randn_like(x)))
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
                    mine.lerp_(theirs, 0.05)
    return {"model": model, "optimizer": optimizer, "target": target}


@habit("two models in one optimizer")
def two_models(t: Trial) -> dict[str, Any]:
    encoder, head = ddp(mlp(1, WIDTH, 4)), ddp(mlp(2, 4, 1))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-2)
    t.session.protect(encoder, optimizer, head=head)
    for step in t.steps():
        with step as (x, y):
            loss = mse(head(encoder(x)), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"encoder": encoder, "head": head, "optimizer": optimizer}


@habit("two optimizers of one model, stepped one behind the other")
def two_optimizers(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    slow = torch.optim.SGD(model.module[0].parameters(), lr=1e-2, momentum=0.9)
    fast = torch.optim.Adam(model.module[2].parameters(), lr=1e-2)
    t.session.protect(model, slow, fast)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            slow.step()
            fast.step()
            slow.zero_grad()
            fast.zero_grad()
    return {"model": model, "slow": slow, "fast": fast}


@habit(
    "a second optimizer that nobody protected",
    refused="steps in the step's body, but is not protected",
    instead="give both to `protect`",
)
def second_optimizer_unprotected(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    first = torch.optim.Adam(model.module[0].parameters(), lr=1e-2)
    second = torch.optim.Adam(model.module[2].parameters(), lr=1e-2)
    t.session.protect(model, first)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
    return {"model": model, "first": first, "second": second}


@habit("distillation from a frozen teacher that nobody protected: it never changes")
def frozen_teacher(t: Trial) -> dict[str, Any]:
    teacher = mlp(9).eval().requires_grad_(False)
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, _):
            loss = mse(model(x), teacher(x))
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit("several updates on one batch in a body (PPO's epochs)")
def several_updates_in_a_body(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            for _ in range(3):
                loss = mse(model(x), y)
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
            step.log(loss=loss)
    return {"model": model, "optimizer": optimizer}
