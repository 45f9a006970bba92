"""Meters, timers and a list of losses, which are printed and affect nothing."""

import collections
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0
        self.began = time.perf_counter()

    def add(self, value: float) -> None:
        self.sum += value
        self.count += 1

    def __str__(self) -> str:
        return f"{self.sum / max(1, self.count):.3f} after {time.perf_counter() - self.began:.1f} s"


def main() -> None:
    session = regrow.init(seed=6)
    net = DDP(torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    session.protect(net, optimizer)
    meter, last, calls = Meter(), collections.deque[float](maxlen=10), collections.Counter[str]()
    for step in session.steps(range(120), until=120):
        began = time.perf_counter()
        with step:
            x = torch.randn(8, 6)
            loss = (net(x)[:, 0] - x.sum(1)).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            calls["backward"] += 1
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            meter.add(loss.item())
            last.append(time.perf_counter() - began)
            if session.is_main and step.number % 50 == 49:
                print(f"step {step.number}: {meter}, {sum(last) / len(last):.3f} s a step", flush=True)


main()
