"""Effect of the penalties of `lz.py` on a small model's outputs, and on its accuracy on held-out text."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import NamedTuple

import torch
from lz_model import CONTEXT, END, OUTPUT, PROMPT, VOCABULARY, Corpus, SmallGRU
from torch import Tensor

from lz_penalty.detector import ExactLoop, examine
from lz_penalty.parameters import LZParameters
from lz_penalty.penalty import LZPenalty

GRAM = 4


@dataclass(frozen=True)
class Side:
    """A penalty at one strength. All penalties read the output alone.

    Attributes:
        name: of the penalty.
        strength: in the penalty's unit: for *repetition* the divisor of logits, for *frequency* the deduction for each
                occurrence of a token.
        lz: the parameters, for the LZ penalty.
    """

    name: str
    strength: float = 0.0
    lz: LZParameters | None = None


def lz(strength: float, **parameters: object) -> Side:
    """A side with the LZ penalty."""
    given = LZParameters(strength=strength, **parameters)  # type: ignore[arg-type]
    name = f"LZ {given.mode}" + (f", min_match {given.min_match}" if given.min_match > 1 else "")
    return Side(name, strength, given)


class Penalised:
    """A side applied to a batch of sequences."""

    def __init__(self, side: Side, batch: int) -> None:
        self._side = side
        self._counts = torch.zeros(batch, VOCABULARY)
        self._lz = LZPenalty([side.lz] * batch) if side.lz is not None else None

    def apply(self, logits: Tensor) -> Tensor:
        """Penalise the logits of the next tokens, in place if possible."""
        strength = self._side.strength
        if self._lz is not None:
            return self._lz.apply(logits)
        if self._side.name == "repetition":
            divided = torch.where(logits > 0, logits / strength, logits * strength)
            return torch.where(self._counts > 0, divided, logits)
        return logits - strength * self._counts if self._side.name == "frequency" else logits

    def push(self, tokens: Tensor) -> None:
        """Append the sampled tokens, [batch]."""
        if self._lz is not None:
            self._lz.push(tokens)
        else:
            self._counts.scatter_add_(1, tokens.unsqueeze(1), torch.ones(len(tokens), 1))


class Share(NamedTuple):
    """A share in percent, with its 95 % confidence interval."""

    percent: float
    low: float
    high: float

    @classmethod
    def of_count(cls, count: int, total: int) -> "Share":
        """The share of events among `total` trials (Wilson, 1927)."""
        z, p = 1.96, count / total
        middle = (p + z * z / (2 * total)) / (1 + z * z / total)
        half = z / (1 + z * z / total) * sqrt(p * (1 - p) / total + z * z / (4 * total * total))
        return cls(100 * p, 100 * max(0.0, middle - half), 100 * min(1.0, middle + half))

    @classmethod
    def of_mean(cls, shares: Sequence[float]) -> "Share":
        """The mean of values from independent texts."""
        half = 1.96 * stdev(shares) / sqrt(len(shares))
        return cls(100 * mean(shares), 100 * max(0.0, mean(shares) - half), 100 * min(1.0, mean(shares) + half))

    def __str__(self) -> str:
        return f"{self.percent:.1f} ({self.low:.1f}–{self.high:.1f})"


class Outcome(NamedTuple):
    """Outcome of one side at one temperature.

    Attributes:
        loops: outputs that ended in an exact loop, cut off by the limit on their length.
        degenerate: outputs that ended in a loop of either kind, cut off likewise.
        repeated: 4-grams of an output that had occurred in it before.
        prompts: their number.
    """

    loops: Share
    degenerate: Share
    repeated: Share
    prompts: int


def prompts_of(text: Corpus, count: int) -> Tensor:
    """Prompts from the held-out text, evenly spread, [count, PROMPT]."""
    starts = torch.linspace(0, len(text.held_out) - PROMPT, count).to(torch.int64)
    return text.held_out[starts.unsqueeze(1) + torch.arange(PROMPT)]


@torch.inference_mode()
def generate(model: SmallGRU, side: Side, prompts: Tensor, temperature: float) -> list[list[int]]:
    """Outputs up to the end token, or to the limit. All sides use the same random numbers."""
    penalised, state = Penalised(side, len(prompts)), None
    noise = torch.Generator().manual_seed(0)
    tokens, said = prompts, []
    for _ in range(OUTPUT):
        logits, state = model(tokens, state)
        logits = penalised.apply(logits[:, -1].contiguous())
        if temperature > 0:
            uniform = torch.rand(logits.shape, generator=noise).clamp_(1e-9, 1 - 1e-7)
            logits = logits / temperature - uniform.log().neg_().log_()
        newest = logits.argmax(1)
        penalised.push(newest)
        said.append(newest)
        tokens = newest.unsqueeze(1)
    outputs = torch.stack(said, 1).tolist()
    return [output[: output.index(END)] if END in output else output for output in outputs]


def outcome(outputs: Sequence[Sequence[int]]) -> Outcome:
    """Summarize the outputs of the prompts."""
    verdicts = [examine(output, hit_length_limit=len(output) == OUTPUT) for output in outputs]
    loops = sum(verdict.degenerate and isinstance(verdict.loop, ExactLoop) for verdict in verdicts)
    degenerate = sum(verdict.degenerate for verdict in verdicts)
    repeated = [repeated_grams(output) for output in outputs]
    total = len(outputs)
    return Outcome(Share.of_count(loops, total), Share.of_count(degenerate, total), Share.of_mean(repeated), total)


def repeated_grams(output: Sequence[int]) -> float:
    """The share of 4-grams that had occurred before."""
    grams = [tuple(output[at : at + GRAM]) for at in range(len(output) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@torch.inference_mode()
def accuracies(model: SmallGRU, side: Side, text: Corpus, temperatures: Sequence[float]) -> dict[float, Share]:
    """Accuracy of the next token on held-out text, given the text's own previous tokens.

    At temperature 0 the most probable token is compared; above it, the probability of the right one counts. The first
    tokens of each piece are its prompt, which no penalty reads.
    """
    count = len(text.held_out) // CONTEXT
    stretches = text.held_out[: count * CONTEXT].view(count, CONTEXT)
    logits = torch.cat([model(some)[0] for some in torch.split(stretches, 16)])
    penalised = Penalised(side, count)
    right = {temperature: torch.zeros(count) for temperature in temperatures}
    for place in range(PROMPT, CONTEXT):
        after, wanted = penalised.apply(logits[:, place - 1].clone()), stretches[:, place]
        for temperature in temperatures:
            if temperature == 0:
                right[temperature] += after.argmax(1) == wanted
            else:
                right[temperature] += (after / temperature).softmax(1).gather(1, wanted.unsqueeze(1)).squeeze(1)
        penalised.push(wanted)
    return {each: Share.of_mean((hits / OUTPUT).tolist()) for each, hits in right.items()}
