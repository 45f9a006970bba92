"""SIDE: a GPT that trains on request; SIDE is `regrow`, or the number of drains of the device in a plain step."""

import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import regrow
from gpu_parts.jobs import DEVICE
from regrow.drill.scripts.steady import Blocks

CUDA = DEVICE == "cuda"
# 168 million parameters, 45 ms a step on an H200; on a CPU a model small enough to train.
WIDTH, LAYERS, HEADS, VOCABULARY, CONTEXT = (1024, 12, 16, 8192, 512) if CUDA else (64, 2, 4, 256, 32)
BATCH, BLOCK = (24, 20) if CUDA else (4, 10)
ENDLESS = 1_000_000


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, context, width]` to the same."""
        heads = self.mix(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        fed: Tensor = self.feed(self.norms[1](x))
        return x + fed


class Decoder(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """`[batch, context]` to `[batch, context, vocabulary]`."""
        logits: Tensor = self.head(self.blocks(self.embed(tokens) + self.place))
        return logits


def drain() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def turns_here() -> Blocks:
    """The blocks that are requested from this process."""
    return Blocks(os.environ["TURN_GO"], os.environ["TURN_DONE"], block=BLOCK, drain=drain)


class Training:
    """The model and its training step."""

    def __init__(self, drains: int) -> None:
        torch.manual_seed(0)
        self._drains = drains
        self.model = nn.parallel.DistributedDataParallel(Decoder().to(DEVICE))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(VOCABULARY, (4096, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(tokens)
        self.loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)

    def step(self, tokens: Tensor) -> Tensor:
        """One update; the loss stays on the device."""
        tokens = tokens.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            logits = self.model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        if self._drains > 0:
            drain()
        self.optimizer.step()
        if self._drains > 1:
            drain()
        self.optimizer.zero_grad()
        return loss


def endless(loader: "torch.utils.data.DataLoader[tuple[Tensor, ...]]") -> Iterator[Tensor]:
    """The loader's batches, repeated without end."""
    while True:
        for (tokens,) in loader:
            yield tokens


def plain(drains: int) -> None:
    """Train without regrow, in a group of one rank, as torchrun would make it."""
    backend = "nccl" if CUDA else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    training, turns = Training(drains), turns_here()
    for number, tokens in enumerate(endless(training.loader)):
        turns.before()
        loss = training.step(tokens)
        if number % 10 == 0:
            float(loss.detach())  # as scripts log
        turns.after()


def under_regrow() -> None:
    """Train under regrow."""
    session = regrow.init(seed=3)
    training = Training(0)
    session.protect(training.model, training.optimizer)
    turns = turns_here()
    for step in session.steps(training.loader, until=ENDLESS):
        counts = not step.rehearsal
        if counts:
            turns.before()
        with step as (tokens,):
            step.log(loss=training.step(tokens))
        if counts:
            turns.after()


if __name__ == "__main__":
    if CUDA:
        torch.cuda.set_device(0)
    torch.set_num_threads(1)
    if sys.argv[1] == "regrow":
        under_regrow()
    else:
        plain(int(sys.argv[1]))
