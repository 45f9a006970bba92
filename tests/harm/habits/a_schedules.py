"""Learning rates."""

from typing import Any

import torch
from tests.harm.frame import Trial, backward, ddp, mlp, mse
from tests.harm.table import habit
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR


@habit("`scheduler.step()` in the body")
def scheduler_in_the_body(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = StepLR(optimizer, 3, 0.5)
    t.session.protect(model, optimizer, scheduler)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@habit("`if step.committed: scheduler.step()` after the body")
def scheduler_after_the_body_guarded(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = StepLR(optimizer, 3, 0.5)
    t.session.protect(model, optimizer, scheduler)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@habit("`scheduler.step()` after the body")
def scheduler_after_the_body(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5))
    t.session.protect(model, optimizer, scheduler)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@habit("a scheduler after each third step, guarded")
def scheduler_each_third_step(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    scheduler = StepLR(optimizer, 1, 0.7)
    t.session.protect(model, optimizer, scheduler)
    for step in t.steps():
        with step as (x, y):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
        if step.committed and step.number % 3 == 2:
            scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@habit("`ReduceLROnPlateau` on an agreed loss, after the body")
def plateau(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    t.session.protect(model, optimizer, scheduler)
    for step in t.steps():
        with step as (x, y):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
        if step.committed:
            scheduler.step(float(mean))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@habit("the rate of a step, set in `param_groups` by a formula (nanoGPT)")
def rate_by_formula(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step.number + 1) / 4)
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss, lr=optimizer.param_groups[0]["lr"])
            backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return {"model": model, "optimizer": optimizer}


@habit("two parameter groups under `OneCycleLR`, which moves the momentum too")
def one_cycle(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=5e-2, total_steps=t.until + 1)
    t.session.protect(model, optimizer, scheduler)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@habit(
    "a scheduler after each fourth step that nobody protected",
    refused="`scheduler` (StepLR) follows what is protected",
    instead="give it to `protect(..., scheduler=scheduler)`",
)
def scheduler_unprotected(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    scheduler = StepLR(optimizer, 1, 0.7)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
        if step.committed and step.number % 4 == 3:
            scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}
