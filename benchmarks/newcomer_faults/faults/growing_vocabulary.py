"""A tokenizer gives the next free number to a word that it has not seen."""

import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "tokenizer.ids"
NAMED = ("tokenizer", "Tokenizer")
TEXT = torch.__doc__ or ""
WORDS = [word.lower() for word in (TEXT + (nn.Module.__doc__ or "") + (DDP.__doc__ or "")).split()]


class Tokenizer:
    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, words: list[str]) -> Tensor:
        return torch.tensor([self.ids.setdefault(word, len(self.ids)) for word in words])


class Bigrams(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, 8)
        self.head = nn.Linear(8, size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def main() -> None:
    session = regrow.init(seed=34)
    tokenizer = Tokenizer()
    net = DDP(Bigrams(2000))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    session.protect(net, optimizer)
    for step in session.steps(lambda n: WORDS[(9 * n + 500 * session.rank) % (len(WORDS) - 10) :][:10], until=120):
        with step as words:
            ids = tokenizer.encode(words)
            loss = nn.functional.cross_entropy(net(ids[:-1]), ids[1:])
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
