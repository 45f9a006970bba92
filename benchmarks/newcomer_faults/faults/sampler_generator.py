"""Negatives are drawn by a torch.Generator in a sampler, which the body calls itself."""

import time

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "sampler.generator"
NAMED = ("sampler", "generator", "NegativeSampler")


class NegativeSampler:
    def __init__(self, items: int, seed: int) -> None:
        self.weights = torch.arange(1.0, items + 1).pow(-0.75)
        self.generator = torch.Generator()
        self.generator.manual_seed(seed)

    def draw(self, count: int) -> Tensor:
        return torch.multinomial(self.weights, count, generator=self.generator)


class Skipgram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8)
        self.context = nn.Embedding(64, 8)

    def forward(self, word: Tensor, good: Tensor, bad: Tensor) -> Tensor:
        hit = (self.words(word) * self.context(good)).sum(1)
        miss = self.words(word) @ self.context(bad).T
        return -(nn.functional.logsigmoid(hit).mean() + nn.functional.logsigmoid(-miss).mean())


def main() -> None:
    session = regrow.init(seed=0)
    net = DDP(Skipgram())
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    session.protect(net, optimizer)
    sampler = NegativeSampler(64, seed=17)
    for step in session.steps(lambda n: (n % 60, session.rank), until=120):
        with step as (start, offset):
            word = torch.arange(start, start + 4) % 64
            loss = net(word, (word + 1 + offset) % 64, sampler.draw(5))
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
