"""Momentum of a hand-made update is kept in a WeakKeyDictionary by parameter."""

import time
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "velocity"
NAMED = ("velocity",)
velocity: "WeakKeyDictionary[nn.Module, list[Tensor]]" = WeakKeyDictionary()


@torch.no_grad()
def nudge(layer: nn.Module) -> None:
    kept = velocity.setdefault(layer, [torch.zeros_like(p) for p in layer.parameters()])
    for p, v in zip(layer.parameters(), kept, strict=True):
        if p.grad is not None:
            v.mul_(0.9).add_(p.grad)
            p.sub_(0.01 * v)


session = regrow.init(seed=18)
layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
net = DDP(layers)
session.protect(net)
for step in session.steps(range(120), until=120):
    with step:
        x = torch.randn(16, 4)
        loss = (net(x)[:, 0] - x.prod(1)).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        step.update()
        for layer in (layers[0], layers[2]):
            nudge(layer)
        net.zero_grad()
