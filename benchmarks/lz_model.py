"""The small model of `lz.py`, trained on Python's own documentation, which every Python installation contains."""

import math
import pydoc_data.topics
import random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

VOCABULARY = 512
END = 0
"""The token between two texts."""

EMBEDDING, HIDDEN = 128, 256
STREAMS, STRETCH, RATE = 32, 64, 6e-3
PROMPT, OUTPUT = 32, 320
CONTEXT = PROMPT + OUTPUT


class Corpus(NamedTuple):
    """Training tokens, and held-out tokens."""

    train: Tensor
    held_out: Tensor
    tokenizer: Tokenizer


def corpus() -> Corpus:
    """The topics of `help()`, a fifth of them held out."""
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    random.Random(0).shuffle(texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    split = len(texts) // 5
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts[split:], trainer)

    def tokens(some: list[str]) -> Tensor:
        return torch.tensor([token for text in some for token in [*tokenizer.encode(text).ids, END]])

    return Corpus(tokens(texts[split:]), tokens(texts[:split]), tokenizer)


class SmallGRU(nn.Module):
    """A recurrent network of 0.4 million parameters, a size that learns well from few tokens in a short time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, EMBEDDING)
        self.recurrent = nn.GRU(EMBEDDING, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, EMBEDDING)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [batch, length, vocabulary] of tokens [batch, length], and the state after them."""
        hidden, state = self.recurrent(self.tokens(tokens), state)
        return self.out(hidden) @ self.tokens.weight.T + self.bias, state


def train(text: Corpus, steps: int) -> SmallGRU:
    """Train a model, which is the same for the same text and steps."""
    torch.manual_seed(0)
    model, state, place = SmallGRU(), None, 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    streams = text.train[: len(text.train) // STREAMS * STREAMS].view(STREAMS, -1)
    for step in range(steps):
        if place + STRETCH + 1 > streams.shape[1]:
            state, place = None, 0
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        some = streams[:, place : place + STRETCH + 1]
        place += STRETCH
        logits, state = model(some[:, :-1], state)
        state = state.detach()
        loss = F.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"  step {step + 1} of {steps}: loss {loss.item():.2f}", flush=True)
    return model.eval()
