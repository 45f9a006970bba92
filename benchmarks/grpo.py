"""The rewards of `regrow train grpo` and of TRL's own `GRPOTrainer` under torchrun, in the same steps.

    python benchmarks/grpo.py            # 5 seeds of 60 updates
    python benchmarks/grpo.py --quick    # 3 seeds of 40 updates

A Llama of 9 thousand parameters over 60 words, all weights, on two ranks of this machine with a thread each; an update
has 32 completions of 8 words, in groups of 8, and the reward is the share of words with an even number: it starts at
a half, and can reach 1. Both sides have the same model, prompts, order of prompts, reward, seed and steps.

regrow seeds generators for each step, so the two sides sample different tokens from the same model, and their curves
are two random draws: *final*, the mean reward of the last ten updates, is compared over the seeds. A third run is plain
TRL that seeds its generators at each update as regrow does. It samples the same tokens, and has the same rewards in all
four digits that `regrow train` prints, until a different order of summation changes a sampled token: *alike* is the
number of updates before that.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from targets import tell
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
DEADLINE = 900.0
PRINTED = 1e-4
"""Rewards are printed with four digits."""
SAMPLES, COMPLETION, LR, LAST = 32, 8, 1e-2, 10
WORDS = [f"w{number}" for number in range(60)]
FAMILY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


class Plan(NamedTuple):
    """Seeds, and updates of each."""

    seeds: int
    steps: int


FULL, QUICK = Plan(5, 60), Plan(3, 40)


class Failed(Exception):
    """A side failed."""


@dataclass(frozen=True)
class Seed:
    """Mean rewards of one seed, by update."""

    recipe: list[float]
    plain: list[float]
    alike: list[float]
    """Plain TRL again, with generators seeded as regrow seeds them."""

    @property
    def updates_alike(self) -> int:
        """Updates before the recipe's reward differs from that of plain TRL with the same seeds."""
        same = (abs(ours - theirs) < PRINTED for ours, theirs in zip(self.recipe, self.alike, strict=True))
        return sum(1 for _ in takewhile(bool, same))


def prepare(folder: Path) -> None:
    """The model, its tokenizer, and prompts."""
    kept = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}, "<unk>")
    )
    kept.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kept, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**FAMILY)).save_pretrained(folder / "model")
    picks = torch.randint(len(WORDS), (64, 4)).tolist()
    lines = [json.dumps({"prompt": " ".join(WORDS[at] for at in row)}) + "\n" for row in picks]
    (folder / "prompts.jsonl").write_text("".join(lines))


def ran(command: list[str], folder: Path) -> str:
    """The output of a command. Raises `Failed`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "REGROW_HOME": str(folder)}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE, check=False, env=environment, cwd=folder
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[3:5]} took longer than {DEADLINE:g} s") from None
    if done.returncode:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def by_recipe(folder: Path, seed: int, ranks: int, steps: int) -> list[float]:
    """Mean rewards of `regrow train grpo`. Raises `Failed`."""
    command = [sys.executable, "-m", "regrow", "train", "grpo", f"--model={folder / 'model'}"]
    command += [f"--data={folder / 'prompts.jsonl'}", f"--out={folder / f'recipe-{seed}'}", f"--nproc-per-node={ranks}"]
    command += [f"--job=grpo-{seed}", f"reward.function={HERE / 'grpo_reward.py'}:even", "grpo.weights=all"]
    command += [f"grpo.completion={COMPLETION}", f"data.length={4 + COMPLETION}", f"batch.samples={SAMPLES}"]
    command += ["batch.micro=8", f"train.steps={steps}", f"train.seed={seed}", f"optim.lr={LR}"]
    said = ran(command, folder)
    rewards = [float(number) for number in re.findall(r"step \d+/\d+: reward ([\d.e+-]+),", said)]
    if len(rewards) != steps:
        raise Failed(f"`regrow train grpo` has told {len(rewards)} rewards in {steps} updates: {said[-2000:]}")
    return rewards


def by_trl(folder: Path, seed: int, ranks: int, steps: int, *, alike: bool) -> list[float]:
    """Mean rewards of plain TRL. Raises `Failed`."""
    out = folder / f"plain-{seed}-{alike}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(HERE / "grpo_plain.py"), f"--folder={folder}", f"--out={out}", f"--seed={seed}", f"--lr={LR}"]
    command += [f"--steps={steps}", f"--samples={SAMPLES}", f"--completion={COMPLETION}"]
    ran([*command, *(["--alike"] if alike else [])], folder)
    rewards: list[float] = json.loads(out.read_text())
    return rewards


def final(rewards: list[float]) -> float:
    """Mean of the last updates."""
    return mean(rewards[-LAST:])


def show(seeds: list[Seed], console: Console) -> None:
    """Print the results."""
    table = Table(title="Mean reward: regrow train grpo, TRL's GRPOTrainer, and the latter seeded as regrow seeds")
    for column in ("seed", "first", f"last {LAST}, recipe", "plain TRL", "seeded alike", "updates alike"):
        table.add_column(column, justify="right")
    for number, seed in enumerate(seeds):
        cells = (seed.recipe[0], final(seed.recipe), final(seed.plain), final(seed.alike))
        alike = f"{seed.updates_alike} of {len(seed.recipe)}"
        table.add_row(str(number), *(f"{cell:.4f}" for cell in cells), alike)
    console.print(table)


def figures(seeds: list[Seed]) -> dict[str, float]:
    """The numbers for `--json`."""
    ours, theirs = ([final(each) for each in side] for side in zip(*((s.recipe, s.plain) for s in seeds), strict=True))
    return {
        "first_reward": mean(seed.recipe[0] for seed in seeds),
        "final_reward_recipe": mean(ours),
        "final_reward_plain": mean(theirs),
        "final_apart": abs(mean(ours) - mean(theirs)),
        "final_spread_plain": stdev(theirs),
        "updates_alike": min(seed.updates_alike for seed in seeds),
        "updates": len(seeds[0].recipe),
    }


def main() -> int:
    """Train, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer seeds and updates")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    plan = QUICK if args.quick else FULL
    folder = Path(tempfile.mkdtemp(prefix="regrow-grpo-"))
    seeds: list[Seed] = []
    try:
        prepare(folder)
        for seed in range(plan.seeds):
            recipe = by_recipe(folder, seed, args.ranks, plan.steps)
            plain, alike = (by_trl(folder, seed, args.ranks, plan.steps, alike=each) for each in (False, True))
            seeds.append(Seed(recipe, plain, alike))
            print(f"  seed {seed} of {plan.seeds}: {final(recipe):.3f}, {final(plain):.3f}", flush=True)
    except Failed as failed:
        print(f"{failed}; output is kept in {folder}")
        return 1
    show(seeds, Console(width=110))
    tell("grpo", figures(seeds), args.json)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
