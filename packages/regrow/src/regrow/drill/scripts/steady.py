"""`steady.py plain|regrow ASKS ANSWERS`: a model that trains a block of steps on each request.

A line in the pipe ASKS is a request; the answer in the pipe ANSWERS is the milliseconds per step. One rank.
"""

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import regrow

BLOCK = 10
ENDLESS = 1_000_000


def device() -> torch.device:
    """The accelerator, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def drain() -> None:
    """Wait for the device to finish its work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class Blocks:
    """Blocks of steps, each on request. `block`: number of steps in a block; `drain`: waits for the device."""

    def __init__(self, asks: str, answers: str, *, block: int = BLOCK, drain: Callable[[], object] = drain) -> None:
        self._asks, self._answers = open(asks), open(answers, "w")  # noqa: SIM115 - open as long as the process
        self._block, self._drain = block, drain
        self._count, self._began = 0, 0.0

    def before(self) -> None:
        """Called before a step: at the beginning of a block, wait for a request."""
        if self._count % self._block == 0:
            self._asks.readline()
            self._drain()
            self._began = time.perf_counter()

    def after(self) -> None:
        """Called after a step: at the end of a block, answer with its milliseconds per step."""
        self._count += 1
        if self._count % self._block == 0:
            self._drain()
            self._answers.write(f"{1e3 * (time.perf_counter() - self._began) / self._block}\n")
            self._answers.flush()


class SteadyTraining:
    """The model, and a step of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._device = device()
        width, layers = (2048, 12) if self._device.type != "cpu" else (384, 4)
        modules = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.parallel.DistributedDataParallel(nn.Sequential(*modules).to(self._device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(256, width)

    def step(self) -> Tensor:
        """Train one step, with one update."""
        loss: Tensor = self.model(self.batch.to(self._device)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def main(side: str, asks: str, answers: str) -> None:
    """Train until the process is ended."""
    torch.set_num_threads(1)
    if side == "plain":
        backend = dist.get_default_backend_for_device(device())
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        training, blocks = SteadyTraining(), Blocks(asks, answers)
        for _ in range(ENDLESS):
            blocks.before()
            training.step()
            blocks.after()
        return
    session = regrow.init(seed=0)
    training = SteadyTraining()
    session.protect(training.model, training.optimizer)
    blocks = Blocks(asks, answers)
    for step in session.steps(lambda number: number, until=ENDLESS):
        counts = not step.rehearsal
        if counts:
            blocks.before()
        with step:
            step.log(loss=training.step())
        if counts:
            blocks.after()


if __name__ == "__main__":
    main(*sys.argv[1:])
