"""A language model whose body samples from it under FSDP2 or HSDP: by its shards, and with all weights summoned.

It may die in the middle of a generation, as it scores one, and between two updates on one: lines `PLACE RANK STEP` in
a file beside the output say where.
"""

import argparse
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--shards", type=int, default=2, help="ranks that hold the model together")
parser.add_argument("--llama", action="store_true", help="transformers' model and its `generate`")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--out", type=Path, required=True)
options = parser.parse_args()

VOCABULARY, WIDTH, ROWS, ASKED, ANSWER = 32, 16, 6, 3, 6
kills = options.out.with_suffix(".kills")


class Layer(nn.Module):
    """Mixes each place with those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.out(self.mix(x).cumsum(1).tanh()))  # type: ignore[no-any-return]


class Writer(nn.Module):
    """A tiny language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def built() -> tuple[nn.Module, list[nn.Module]]:
    """The model, and its layers."""
    torch.manual_seed(3)
    if not options.llama:
        writer = Writer()
        return writer, list(writer.layers)
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, eos_token_id=1))
    return llama, list(llama.model.layers)


def die(place: str, step: Any) -> None:
    """Once, where it is asked."""
    where = f"{place} {session.rank} {step.number}"
    mark = kills.with_suffix(f".died-{where.replace(' ', '-')}")
    if not step.rehearsal and kills.exists() and where in kills.read_text().splitlines() and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def logits(tokens: torch.Tensor) -> torch.Tensor:
    """Of the token behind each place."""
    out: Any = model(tokens)
    return out.logits if options.llama else out  # type: ignore[no-any-return]


@contextmanager
def summoned() -> Iterator[None]:
    """Within this, each rank has all weights, and no forward gathers them."""
    parts = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for each in parts:
        each.set_reshard_after_forward(False, recurse=False)
        each.unshard()
    try:
        yield
    finally:
        for each in parts:
            each.set_reshard_after_forward(each is not model, recurse=False)
            each.reshard()


@torch.no_grad()
def generate(tokens: torch.Tensor, step: Any) -> torch.Tensor:
    """The tokens with answers behind them, during which this rank may die."""
    model.eval()
    halves = (ANSWER // 2, ANSWER - ANSWER // 2)
    for half in halves:
        if options.llama:
            whole: Any = model
            tokens = whole.generate(tokens, do_sample=True, min_new_tokens=half, max_new_tokens=half)
        else:
            for _ in range(half):
                tokens = torch.cat([tokens, torch.multinomial(logits(tokens)[:, -1].softmax(-1), 1)], 1)
        if half == halves[0]:
            die("generate", step)
    model.train()
    return tokens


torch.set_num_threads(1)
session = regrow.init(seed=7)
world = session.world_size
model, layers = built()
names = ("replica", "shard") if world > options.shards else ("shard",)
mesh = init_device_mesh("cpu", (world // options.shards, options.shards)[-len(names) :], mesh_dim_names=names)
for each in layers:
    fully_shard(each, mesh=mesh)
fully_shard(model, mesh=mesh)
if options.llama:
    register_fsdp_forward_method(model, "generate")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
session.protect(model, optimizer)


def questions(number: int) -> torch.Tensor:
    """Tokens of this rank's questions."""
    numbers = torch.Generator().manual_seed(31 * number + session.rank)
    return torch.randint(2, VOCABULARY, (ROWS, ASKED), generator=numbers)


for step in session.steps(questions, until=options.steps):
    with step as asked:
        if step.number % 2:
            with summoned():
                tokens = generate(asked, step)
        else:
            tokens = generate(asked, step)
        answers = tokens[:, ASKED:]
        reward = (answers % 2 == 0).float().mean(1)
        die("reward", step)
        gain = ((reward - reward.mean()) / (reward.std() + 1e-4)).unsqueeze(1)
        for at in range(2):
            told = logits(tokens)[:, ASKED - 1 : -1].log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)
            loss = -(gain * told).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if not at:
                die("update", step)
        places = torch.arange(1, answers.numel() + 1)
        step.log(loss=loss, reward=reward.mean(), tokens=float((answers.flatten() * places).sum()))

report = {"digest": session.digest(), "rank": session.rank, "tokens": answers.tolist()}
options.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(report))
