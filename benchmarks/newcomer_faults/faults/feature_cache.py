"""A data set keeps features that the model has computed when it first saw a sample."""

import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "bank.features"
NAMED = ("bank", "FeatureBank")


class FeatureBank:
    def __init__(self, encoder: nn.Module) -> None:
        self.encoder, self.features = encoder, dict[int, Tensor]()

    @torch.no_grad()
    def __getitem__(self, index: int) -> Tensor:
        if index not in self.features:
            row = torch.randn(6, generator=torch.Generator().manual_seed(index))
            self.features[index] = self.encoder(row)
        return self.features[index]


session = regrow.init(seed=36)
encoder = nn.Linear(6, 4)
net = DDP(encoder)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
bank = FeatureBank(encoder)
for step in session.steps(range(120), until=120):
    with step:
        other = torch.stack([bank[(step.number * 3 + n) % 40] for n in range(4)])
        x = torch.randn(4, 6)
        loss = (net(x) - other).pow(2).mean() + net(x).cos().mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
