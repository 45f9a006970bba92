"""Micro-batches: what regrow gives to scripts whose world shall grow and shrink."""

from typing import Any

import torch
from tests.harm.frame import WIDTH, Trial, batch, ddp, mlp, mse
from tests.harm.habits.b_averages import ema_of
from tests.harm.table import habit
from torch import nn

MICROBATCHES = 6


def train(t: Trial, *middle: nn.Module) -> dict[str, Any]:
    """A step of micro-batches, then clipping, a schedule and an average."""
    net = mlp(1, WIDTH, 1, *middle)
    model, ema = ddp(net), ema_of(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    t.session.protect(model, optimizer, scheduler=scheduler, ema=ema)
    for step in t.steps(lambda number, share: batch(97 * number + share), microbatches=MICROBATCHES):
        with step:
            optimizer.zero_grad()
            for micro in step.microbatches:
                x, y = micro.batch
                loss = mse(model(x), y)
                micro.log(loss=loss)
                micro.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            ema.update_parameters(net)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema}


@habit("micro-batches, clipping, a schedule and an average")
def micro_batches(t: Trial) -> dict[str, Any]:
    return train(t)


@habit("the same with dropout in world-invariant mode", invariant=True, compared=False, alone=False)
def micro_batches_invariant(t: Trial) -> dict[str, Any]:
    return train(t, nn.Dropout(0.2))
