"""Updates of all kinds."""

import math
import sys
from typing import Any

import numpy as np
import torch
from tests.harm.frame import Trial, backward, ddp, mlp, mse
from tests.harm.table import BF16, DRAWS, habit
from torch import nn


@habit("`clip_grad_norm_`")
def clipping(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            optimizer.zero_grad()
            backward(loss)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            step.log(loss=loss, norm=norm)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit("`GradScaler` with `unscale_` and clipping", differs=BF16)
def scaler_with_clipping(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    t.session.protect(model, optimizer, scaler=scaler)
    for step in t.steps():
        with step as (x, y):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mse(model(x).float(), y)
            step.log(loss=loss)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return {"model": model, "scaler": scaler}


@habit("`GradScaler` whose first scales overflow, so that its first steps make no update")
def scaler_that_overflows(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-40, growth_interval=100)
    t.session.protect(model, optimizer, scaler=scaler)
    for step in t.steps():
        with step as (x, y):
            optimizer.zero_grad()
            loss = mse(model(x), y)
            step.log(loss=loss)
            scaler.scale(8 * loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


@habit("`optimizer.step(closure)` with Adam (Lightning's form)")
def closure(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):

            def compute(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mse(model(x), y)
                backward(loss)
                return loss

            loss = optimizer.step(compute)
            step.log(loss=loss)
    return {"model": model, "optimizer": optimizer}


@habit("LBFGS, which calls its closure several times", differs="it magnifies what another order of summation does")
def lbfgs(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):

            def compute(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mse(model(x), y)
                backward(loss)
                torch.distributed.all_reduce(shared := loss.detach().clone())
                return shared / torch.distributed.get_world_size()

            step.log(loss=optimizer.step(compute))
    return {"model": model}


@habit("bf16 autocast", differs=BF16)
def autocast(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mse(model(x).float(), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return {"model": model, "optimizer": optimizer}


@habit("micro-batches accumulated by hand inside a step, under `no_sync`")
def accumulation_inside_a_step(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            total = 0.0
            with model.no_sync():
                for at in range(len(x) - 1):
                    loss = mse(model(x[at : at + 1]), y[at : at + 1]) / len(x)
                    backward(loss)
                    total += float(loss)
            loss = mse(model(x[-1:]), y[-1:]) / len(x)
            backward(loss)
            step.log(loss=total + float(loss))
            optimizer.step()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@habit("gradients accumulated over several steps", refused="accumulate inside one step", instead="`microbatches=`")
def accumulation_across_steps(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y) / 4
            step.log(loss=loss)
            backward(loss)
            if (step.number + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@habit("a step whose loss is not finite makes no update")
def skips_what_is_not_finite(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            optimizer.zero_grad()
            loss = mse(model(x), y) * (math.nan if step.number in (2, 6) else 1.0)
            backward(loss)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm):
                step.log(loss=loss)
                optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit("a body that swallows exceptions and skips the batch")
def swallows_exceptions(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            try:
                optimizer.zero_grad()
                loss = mse(model(x), y)
                step.log(loss=loss)
                backward(loss)
                optimizer.step()
            except Exception as error:  # noqa: BLE001 - as its author would
                sys.stdout.write(f"skipping step {step.number}: {error}\n")
    return {"model": model, "optimizer": optimizer}


@habit(
    "noise on the gradients from a `torch.Generator` of one's own",
    refused="draws from `noise` (Generator), which is not protected",
    instead="protect the generator",
)
def generator_of_ones_own(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    noise = torch.Generator().manual_seed(11)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            for p in model.parameters():
                p.grad += 1e-2 * torch.randn(p.shape, generator=noise)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit(
    "a protected `torch.Generator`: drawn anew from the session's seed in each step",
    compared=False,
    alone=False,
    differs=DRAWS,
)
def generator_protected(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    noise = torch.Generator().manual_seed(11)
    t.session.protect(model, optimizer, noise=noise)
    for step in t.steps():
        with step as (x, y):
            x = x + 0.1 * torch.randn(x.shape, generator=noise)
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit("dropout, and noise from numpy's global generator", differs=DRAWS)
def dropout(t: Trial) -> dict[str, Any]:
    model = ddp(mlp(1, 8, 1, nn.Dropout(0.3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            x = x + torch.from_numpy(np.random.randn(*x.shape).astype("float32")) * 0.1
            loss = mse(model(x), y)
            step.log(loss=loss)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@habit("an optimizer a parameter, stepped by a hook in the backward")
def optimizer_in_the_backward(t: Trial) -> dict[str, Any]:
    net = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=5e-2, momentum=0.9) for p in net.parameters()}
    t.session.protect(net, *optimizers.values())

    def update(p: torch.Tensor) -> None:
        torch.distributed.all_reduce(p.grad, op=torch.distributed.ReduceOp.SUM)
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    for step in t.steps():
        with step as (x, y):
            loss = mse(net(x), y)
            step.log(loss=loss)
            backward(loss / t.session.world_size)
    return {"net": net, "optimizers": [each.state_dict() for each in optimizers.values()]}


@habit("no DDP: gradients are reduced by hand")
def gradients_reduced_by_hand(t: Trial) -> dict[str, Any]:
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, foreach=True)
    t.session.protect(net, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(net(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            for p in net.parameters():
                torch.distributed.all_reduce(p.grad)
                p.grad /= t.session.world_size
            optimizer.step()
    return {"net": net, "optimizer": optimizer}


@habit("parameters changed by hand, announced by `step.update()`")
def parameters_changed_by_hand(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    t.session.protect(model)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            model.zero_grad()
            backward(loss)
            step.update()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 5e-2 * p.grad
    return {"model": model}


@habit("parameters clamped after the optimizer's step, in the body (WGAN)")
def clamped_after_the_update(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.3, 0.3)
    return {"model": model, "optimizer": optimizer}


@habit("parameters clamped after the body, guarded by `step.committed`")
def clamped_after_the_body(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        if step.committed:
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.3, 0.3)
    return {"model": model, "optimizer": optimizer}
