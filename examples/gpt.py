"""A small GPT over bytes, and real text that is on every machine: the source of Python's standard library."""

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. `block`: tokens of context; `width` must be a multiple of `heads`."""

    vocab: int = 256
    block: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 160
    dropout: float = 0.1


PRESETS = {
    "demo": GPTConfig(),  # 1.3M parameters
    "bench": GPTConfig(block=32, layers=8, heads=8, width=512),  # 25M
}


class Attention(nn.Module):
    """Causal self-attention: (batch, tokens, width) → the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.out_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attends from each token to itself and those before it."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return self.out_dropout(mixed)  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and a two-layer network, each on a normalized input and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) → the same."""
        x = x + self.attention(self.norm_1(x))
        y: Tensor = x + self.mlp(self.norm_2(x))
        return y


class GPT(nn.Module):
    """A decoder-only transformer whose input and output embeddings share one matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.block, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "mlp.2.weight")):  # GPT-2: residual outputs, smaller with the depth
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean cross-entropy (nats a token, a scalar) of the targets `y`; without `y` the logits of `x`.

        x, y: int64, (batch, tokens) with at most `block` tokens. Logits: (batch, tokens, vocab).
        """
        stream = self.dropout(self.tokens(x) + self.positions.weight[: x.size(1)])
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        if y is None:
            return logits
        return functional.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1))

    @torch.no_grad()
    def generate(self, x: Tensor, tokens: int) -> Tensor:
        """Continue `x`, int64 of shape (batch, n), by `tokens` sampled tokens."""
        for _ in range(tokens):
            logits = self(x[:, -self.config.block :])[:, -1]
            x = torch.cat([x, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return x


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Text cut into windows of `block` bytes: (x, y), both int64 of shape (block,), y one byte ahead of x."""

    def __init__(self, text: bytes, block: int) -> None:
        self.text = np.frombuffer(text, dtype=np.uint8)
        self.block = block

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.block)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = torch.from_numpy(self.text[index * self.block : (index + 1) * self.block + 1].astype(np.int64))
        return window[:-1], window[1:]


def corpus(megabytes: float = 4.0) -> bytes:
    """The first `megabytes` of the source of this Python's standard library, its files in the order of their names."""
    wanted = int(megabytes * 1_000_000)
    text = bytearray()
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - skipped)
        for name in sorted(files):
            if name.endswith(".py"):
                text += (Path(folder) / name).read_bytes()
        if len(text) >= wanted:
            break
    return bytes(text[:wanted])
