"""The training that every side of `recovery.py` runs: model, data and settings.

A decoder over bytes, of 25 million parameters unless `REGROW_BENCH_MODEL` names another size; with AdamW that is 300 MB
of state. The batch is a function of rank and step, so that no side waits for a data loader.
"""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional

WORLD = 4
SEED = 1234
DEVICE = torch.device(os.environ.get("REGROW_BENCH_DEVICE", "cpu"))
VOCABULARY, HEADS, CONTEXT = 256, 8, 32
SIZES = {"25m": (512, 8), "300m": (1024, 24), "1b": (2048, 20)}
"""Width and number of layers."""
WIDTH, LAYERS = SIZES[os.environ.get("REGROW_BENCH_MODEL", "25m")]
SAMPLES_PER_RANK = 1


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, context, width]` to the same."""
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, context, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + hidden


class Decoder(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[batch, context]` of bytes to `[batch, context, vocabulary]` of logits."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + self.place)))
        return logits


def prepare() -> Decoder:
    """The initial model, the same on every rank; one thread a process, as ranks share the machine's cores.

    They also share a GPU if there is only one.
    """
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    if DEVICE.type == "cuda" and torch.cuda.device_count() > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return Decoder().to(DEVICE)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with two moments a parameter."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def make_batch(step: int, rank: int) -> Tensor:
    """`[samples, context + 1]` bytes for a rank at a step."""
    random = torch.Generator().manual_seed(SEED + step * WORLD + rank)
    return torch.randint(VOCABULARY, (SAMPLES_PER_RANK, CONTEXT + 1), generator=random).to(DEVICE)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte."""
    logits = model(batch[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))


def own_pid() -> float:
    """This process's id as a metric of a step, by which the benchmark kills it."""
    return float(os.getpid())
