"""Averages of weights."""

import copy
from typing import Any

import torch
from tests.harm.frame import Trial, backward, batch, ddp, mlp, mse
from tests.harm.table import habit
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import regrow


def ema_of(net: nn.Module) -> AveragedModel:
    return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))


@habit("EMA updated at the end of the body")
def ema_in_the_body(t: Trial) -> dict[str, Any]:
    net = mlp()
    model, ema = ddp(net), ema_of(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer, ema=ema)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(net)
    return {"model": model, "optimizer": optimizer, "ema": ema}


@habit("EMA updated after the body, guarded by `step.committed`")
def ema_after_the_body_guarded(t: Trial) -> dict[str, Any]:
    net = mlp()
    model, ema = ddp(net), ema_of(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer, ema=ema)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            ema.update_parameters(net)
    return {"model": model, "optimizer": optimizer, "ema": ema}


@habit("EMA updated after the body")
def ema_after_the_body(t: Trial) -> dict[str, Any]:
    net = mlp()
    model, ema = ddp(net), ema_of(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer, ema=ema)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        ema.update_parameters(net)
    return {"model": model, "optimizer": optimizer, "ema": ema}


@habit("EMA updated first in the body")
def ema_first(t: Trial) -> dict[str, Any]:
    net = mlp()
    model, ema = ddp(net), ema_of(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer, ema=ema)
    for step in t.steps():
        with step as (x, y):
            ema.update_parameters(net)
            loss = mse(model(x), y) + 0.1 * mse(model(x), ema(x).detach())
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "ema": ema}


@habit("EMA as a dictionary of tensors in an object with `state_dict`, updated in place")
def ema_as_a_dictionary(t: Trial) -> dict[str, Any]:
    class Shadow:
        def __init__(self, net: nn.Module) -> None:
            self.shadow = {name: p.detach().clone() for name, p in net.named_parameters()}

        def update(self, net: nn.Module) -> None:
            for name, p in net.named_parameters():
                self.shadow[name].lerp_(p.detach(), 0.1)

        def state_dict(self) -> dict[str, Any]:
            return self.shadow

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = dict(state)

    net = mlp()
    model, ema = ddp(net), Shadow(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer, ema=ema)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            ema.update(net)
    return {"model": model, "optimizer": optimizer, "ema": ema}


@habit("EMA weights swapped in for an evaluation (`@regrow.restartable`), and back", between=True)
def ema_swapped_for_evaluation(t: Trial) -> dict[str, Any]:
    net = mlp()
    model, ema = ddp(net), copy.deepcopy(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer, ema=ema)

    def evaluate() -> torch.Tensor:
        kept = copy.deepcopy(net.state_dict())
        net.load_state_dict(ema.state_dict())
        try:
            x, y = batch(5)
            score = mse(net(x), y).detach()
            torch.distributed.all_reduce(score)
        finally:
            net.load_state_dict(kept)
        return score

    evaluate = regrow.restartable(evaluate) if isinstance(t.session, regrow.Session) else evaluate
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for average, p in zip(ema.parameters(), net.parameters(), strict=True):
                    average.lerp_(p, 0.1)
        if step.number % 3 == 2:
            evaluate()
    return {"model": model, "optimizer": optimizer, "ema": ema}


@habit("stochastic weight averaging from a step on, each second step, with its own rate")
def swa(t: Trial) -> dict[str, Any]:
    net = mlp()
    model, average = ddp(net), AveragedModel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer, average=average)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if step.number >= 5 and step.number % 2:
                average.update_parameters(net)
    return {"model": model, "optimizer": optimizer, "average": average}


@habit(
    "EMA that nobody protected",
    refused="changes `ema` (AveragedModel), which is not protected",
    instead="give it to `protect(..., ema=ema)`",
)
def ema_unprotected(t: Trial) -> dict[str, Any]:
    net = mlp()
    model, ema = ddp(net), ema_of(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y) + 0.1 * mse(model(x), ema(x).detach())
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(net)
    return {"model": model, "optimizer": optimizer, "ema": ema}
