"""Cost of a recipe's steps against the same loop in plain PyTorch, without faults: `regrow train` and torchrun.

    python benchmarks/recipes.py            # about 6 minutes: pretrain and lora
    python benchmarks/recipes.py --quick    # about 2 minutes

A Llama of 3 million parameters over bytes, on packed prose, under DDP on two ranks of this machine, with a thread each;
2 micro-batches of 2 rows of 256 tokens for each rank in a step. Both sides have the same model, rows, loss, clipping,
schedule and printed lines; the plain one (`recipes_plain.py`) uses DDP's own reduction over gloo, and none of its steps
can be undone, voted on or moved to another rank.

Both jobs run in turns, the other paused while one trains, and they alternate in going first. A turn's figure is the
mean time of its steps; *ratio* is the median of the rounds' ratios. Also printed are its spread and two ratios that
other load on the machine affects less: of the first quartile of the step times, and of the ranks' CPU time.
"""

import argparse
import json
import os
import pydoc_data.topics
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from contest import Job, JobStuck
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy
from tests.scripts.tiny_families import save_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from regrow.core.ids import Rank

HERE = Path(__file__).resolve().parent
ENDLESS = 1_000_000
START_DEADLINE = 180.0
FAMILY = {
    "vocab_size": 260,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
METHODS = {"pretrain": "text", "lora": "chat"}
"""Methods, with the data of each."""


class Plan(NamedTuple):
    """Rounds, and the counted steps of a turn."""

    rounds: int
    block: int


FULL, QUICK = Plan(24, 8), Plan(8, 5)


class Turn(NamedTuple):
    """Step time in a turn: mean seconds, CPU seconds of the ranks, and the seconds of each step."""

    step_s: float
    processor_s: float
    steps: tuple[float, ...]


class Side(Job):
    """One of the two jobs."""

    def pid(self, rank: int) -> int:
        """Process id of a rank, from regrow's records or the plain side's log."""
        place = self.scene.places.get(Rank(rank))
        return place.pid if place is not None and place.pid is not None else super().pid(rank)

    def processor_s(self) -> float:
        """CPU seconds of its ranks so far."""
        times = [psutil.Process(self.pid(rank)).cpu_times() for rank in self.ranks]
        return float(sum(each.user + each.system for each in times))


@dataclass
class Pair:
    """A method, trained by both sides."""

    method: str
    recipe: list[Turn] = field(default_factory=list)
    plain: list[Turn] = field(default_factory=list)

    def ratios(self, of: str = "step_s") -> list[float]:
        """The ratio of each round."""
        return [getattr(ours, of) / getattr(theirs, of) for ours, theirs in zip(self.recipe, self.plain, strict=True)]

    @property
    def quick_ratio(self) -> float:
        """Ratio of the first quartiles of the step times."""
        ours, theirs = (
            quantiles([each for turn in side for each in turn.steps])[0] for side in (self.recipe, self.plain)
        )
        return ours / theirs


def prepare(folder: Path) -> None:
    """Write the model, its tokenizer, and prose as text and as conversations."""
    save_tokenizer(folder / "model")
    AutoModelForCausalLM.from_config(LlamaConfig(**FAMILY)).save_pretrained(folder / "model")
    topics: dict[str, str] = pydoc_data.topics.topics
    words = " ".join(topics.values()).split()
    pieces = [" ".join(words[at : at + 40]) for at in range(0, 40_000, 40)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    with (folder / "chat.jsonl").open("w") as file:
        for asked, answered in zip(pieces[::2], pieces[1::2], strict=True):
            turns = [{"role": "user", "content": asked[:40]}, {"role": "assistant", "content": answered}]
            file.write(json.dumps({"messages": turns}) + "\n")


def recipe_side(stack: ExitStack, folder: Path, method: str, ranks: int) -> Side:
    """`regrow train`, paused after its first steps. Raises `JobStuck`."""
    command = [sys.executable, "-m", "regrow", "train", method, f"--model={folder / 'model'}"]
    command += [f"--data={folder / METHODS[method]}.jsonl", f"--out={folder / method}", f"--nproc-per-node={ranks}"]
    command += [f"--job={method}", "--quiet", "--hang-timeout=60min"]
    command += [f"train.steps={ENDLESS}", "data.length=256", f"batch.samples={4 * ranks}", "batch.micro=2"]
    environment = {"REGROW_HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    return _started(stack, Side, f"{method}, recipe", command, folder / "jobs" / method, ranks, environment)


def plain_side(stack: ExitStack, folder: Path, method: str, ranks: int) -> Side:
    """A loop of plain PyTorch under torchrun, paused after its first steps. Raises `JobStuck`."""
    records = folder / f"plain-{method}"
    records.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(HERE / "recipes_plain.py"), f"--told={folder / method / 'run.json'}", f"--dir={records}"]
    return _started(stack, Side, f"{method}, plain", command, records, ranks, {})


def _started(
    stack: ExitStack, kind: type[Side], name: str, command: list[str], records: Path, ranks: int, more: dict[str, str]
) -> Side:
    log = records.parent / f"{name.replace(', ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", **more}
    side = kind(name, command, records=records, log=log, world=ranks, environment=environment)
    stack.enter_context(side)
    side.wait(lambda: side.world_step >= 3, deadline=START_DEADLINE, what="step 3")
    side.pause()
    return side


def turn(side: Side, block: int) -> Turn:
    """Let a paused job run for a block of steps; the mean time between two steps of the whole world."""
    began, first, used = time.monotonic(), side.world_step, side.processor_s()
    side.go_on()
    side.wait_steps(block + 2)
    side.pause()
    used = side.processor_s() - used
    side.look()
    commits = [at for _, at in side.ledger.world_commits() if at > began]
    counted = commits[1 : block + 2]
    steps = tuple(after - before for before, after in pairwise(counted))
    return Turn((counted[-1] - counted[0]) / block, used / (side.world_step - first), steps)


def measure(folder: Path, method: str, ranks: int, plan: Plan) -> Pair:
    """Run both sides in turns. Raises `JobStuck`."""
    pair = Pair(method)
    with ExitStack() as stack:
        sides = [recipe_side(stack, folder, method, ranks), plain_side(stack, folder, method, ranks)]
        for number in range(plan.rounds):
            told = [pair.recipe, pair.plain]
            for at in (0, 1) if number % 2 == 0 else (1, 0):
                told[at].append(turn(sides[at], plan.block))
            print(f"  {method}, round {number + 1} of {plan.rounds}: {pair.ratios()[-1]:.3f}", flush=True)
    return pair


def show(pairs: list[Pair], ranks: int, console: Console) -> None:
    """Print the results."""
    table = Table(title=f"A step of a recipe and of plain PyTorch, on {ranks} ranks of one machine")
    for column in (
        "method",
        "recipe (s)",
        "plain (s)",
        "ratio",
        "middle half of the rounds",
        "quickest quarter",
        "processor time",
    ):
        table.add_column(column, justify="right")
    for pair in pairs:
        ratios = sorted(pair.ratios())
        quarter = len(ratios) // 4
        spread = f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}"
        steps = (f"{median(each.step_s for each in side):.4f}" for side in (pair.recipe, pair.plain))
        used = f"{median(pair.ratios('processor_s')):.3f}"
        table.add_row(pair.method, *steps, f"{median(ratios):.3f}", spread, f"{pair.quick_ratio:.3f}", used)
    console.print(table)


def figures(pairs: list[Pair]) -> Iterator[tuple[str, float]]:
    """The numbers for `--json`."""
    for pair in pairs:
        yield f"recipe_s_{pair.method}", median(each.step_s for each in pair.recipe)
        yield f"plain_s_{pair.method}", median(each.step_s for each in pair.plain)
        yield f"recipe_over_plain_{pair.method}", median(pair.ratios())
        yield f"quickest_over_plain_{pair.method}", pair.quick_ratio
        yield f"processor_over_plain_{pair.method}", median(pair.ratios("processor_s"))


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="turns of each side")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--method", choices=METHODS, help="one of them alone")
    parser.add_argument("--quick", action="store_true", help="short turns, fewer rounds")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    plan = QUICK if args.quick else FULL
    plan = plan._replace(rounds=args.rounds or plan.rounds)
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="regrow-recipes-"))
    try:
        prepare(folder)
        pairs = [measure(folder, each, args.ranks, plan) for each in ([args.method] if args.method else METHODS)]
    except JobStuck as stuck:
        print(f"{stuck}; records and output are kept in {folder}")
        return 1
    show(pairs, args.ranks, Console(width=110))
    tell("recipes", dict(figures(pairs)), args.json)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
