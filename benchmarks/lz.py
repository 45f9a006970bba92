"""Effect of the LZ penalty on degenerate output and on accuracy, and its cost.

    python benchmarks/lz.py            # all settings; estimated at 20 minutes, not timed yet
    python benchmarks/lz.py --quick    # about 4 minutes: fewer strengths, temperatures and prompts
    python benchmarks/lz.py --quick --arrivals    # seconds: only the cost of requests that arrive under a server

A small recurrent model (0.4 million parameters, 512 tokens) is trained here on Python's own documentation, a fifth of
which is held out. It continues prompts from that fifth, 320 tokens each, without a penalty, and with a repetition
penalty, a frequency penalty and the LZ penalty, at several strengths and temperatures; all of them read the output
alone. An output is degenerate if `lz_penalty.detector` finds a loop at its end and only the limit on the length ended
it. The accuracy is that of the next token on the held-out text. In parentheses: 95 % confidence intervals, over the
prompts and over the pieces of text.

Then the time of a step is measured, against transformers' own repetition penalty, the sides in turns. Both return new
scores, as `generate` expects; servers let the penalty edit their logits, which is the column *in place*.

The small model shows that the penalty works, not its effect on a large model. These are not the
paper's figures.
"""

import argparse
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import lz_arrivals
import lz_cost
import torch
from lz_decoding import Outcome, Share, Side, accuracies, generate, lz, outcome, prompts_of
from lz_model import OUTPUT, Corpus, SmallGRU, corpus, train
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

STRENGTH = 0.27
"""The paper's 0.15, for a vocabulary of 512 tokens instead of about 150,000: the largest penalty is the same, since
there a token that ends a long match saves 17.2 + 1 bits, and here 9 + 1."""

NONE, DEFAULT, SCALED = Side("none"), lz(0.15), lz(STRENGTH)
GREEDY = (NONE, Side("repetition", 1.1), Side("frequency", 0.1), DEFAULT, SCALED, lz(STRENGTH, min_match=3))
"""Sides that continue many prompts at temperature 0. Both plans have all of them."""


class Plan(NamedTuple):
    """Size of the measurements.

    Attributes:
        steps: of the training.
        sides: those at each temperature.
        temperatures: from greedy to the model's own distribution.
        prompts: number for each side at each temperature.
        greedy: number of prompts for the sides in `GREEDY`, at temperature 0.
        rounds: of the measurement of the cost.
    """

    steps: int
    sides: tuple[Side, ...]
    temperatures: tuple[float, ...]
    prompts: int
    greedy: int
    rounds: int


FULL = Plan(
    steps=600,
    sides=(
        NONE,
        *(Side("repetition", strength) for strength in (1.05, 1.1, 1.2, 1.4)),
        *(Side("frequency", strength) for strength in (0.1, 0.3, 0.6, 1.0)),
        *(lz(strength) for strength in (0.05, 0.1, 0.15, 0.2, STRENGTH, 0.4)),
        *(lz(strength, min_match=3) for strength in (0.15, STRENGTH)),
        *(lz(strength, mode="amortized") for strength in (0.15, STRENGTH)),
        *(lz(strength, mode="distance") for strength in (0.15, STRENGTH)),
    ),
    temperatures=(0.0, 0.3, 0.6, 1.0),
    prompts=200,
    greedy=4096,
    rounds=40,
)

QUICK = Plan(
    steps=300,
    sides=(
        NONE,
        *(Side("repetition", strength) for strength in (1.1, 1.3)),
        *(Side("frequency", strength) for strength in (0.1, 0.5)),
        *(lz(strength) for strength in (0.05, 0.15, STRENGTH)),
        lz(STRENGTH, min_match=3),
        lz(STRENGTH, mode="amortized"),
        lz(STRENGTH, mode="distance"),
    ),
    temperatures=(0.0, 0.5, 1.0),
    prompts=64,
    greedy=1024,
    rounds=12,
)

BATCH = 128
"""Prompts in one batch."""


def outcome_of(model: SmallGRU, side: Side, text: Corpus, count: int, temperature: float) -> Outcome:
    """The outcome of `count` prompts."""
    prompts = prompts_of(text, count)
    return outcome(
        [output for some in torch.split(prompts, BATCH) for output in generate(model, side, some, temperature)]
    )


def show_decoding(
    temperature: float, rows: Sequence[tuple[Side, Outcome, Share]], prompts: int, console: Console
) -> None:
    """One table a temperature."""
    table = Table(title=f"temperature {temperature:g}, {prompts} prompts, {OUTPUT} tokens: percent (95 % interval)")
    table.add_column("penalty")
    for column in ("strength", "exact loops", "degenerate", "repeated 4-grams", "accuracy"):
        table.add_column(column, justify="right", no_wrap=True)
    for side, found, accuracy in rows:
        strength = f"{side.strength:g}" if side.strength else ""
        told = (str(share) for share in (found.loops, found.degenerate, found.repeated, accuracy))
        table.add_row(side.name, strength, *told)
    console.print(table)


def show_cost(costs: Sequence[lz_cost.Cost], console: Console) -> None:
    """One table."""
    table = Table(title=f"a step on {torch.get_num_threads()} threads of a CPU, microseconds, medians")
    for column in ("vocabulary", "batch", "context", "repetition", "LZ", "LZ in place", "LZ / repetition"):
        table.add_column(column, justify="right")
    for cost in costs:
        shape = (f"{cost.vocabulary:,}", f"{cost.batch}", f"{cost.context:,}")
        times = (f"{each:,.0f}" for each in (cost.theirs, cost.ours, cost.in_place))
        table.add_row(*shape, *times, f"{cost.ratio:.2f}")
    console.print(table)


def decoding(plan: Plan, console: Console) -> tuple[dict[str, float], dict[str, object]]:
    """Train the model, and measure all sides. Returns figures, and the tables for the JSON."""
    # One thread: the model is small, and on a busy machine two would wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    text = corpus()
    sizes = f"{len(text.train):,} tokens to train on, {len(text.held_out):,} held out"
    print(f"{sizes}; the documentation of Python {platform.python_version()}")
    model = train(text, plan.steps)
    accuracy = {side: accuracies(model, side, text, plan.temperatures) for side in plan.sides}
    tables: dict[str, object] = {}
    for temperature in plan.temperatures:
        rows = [
            (side, outcome_of(model, side, text, plan.prompts, temperature), accuracy[side][temperature])
            for side in plan.sides
        ]
        show_decoding(temperature, rows, plan.prompts, console)
        tables[f"temperature {temperature:g}"] = [
            {"penalty": side.name, "strength": side.strength, **found._asdict(), "accuracy": share}
            for side, found, share in rows
        ]
    greedy = {side: outcome_of(model, side, text, plan.greedy, 0.0) for side in GREEDY}
    rows = [(side, found, accuracy[side][0.0]) for side, found in greedy.items()]
    show_decoding(0.0, rows, plan.greedy, console)
    torch.set_num_threads(threads)
    return figures_of(greedy, accuracy), tables


def figures_of(greedy: Mapping[Side, Outcome], accuracy: Mapping[Side, Mapping[float, Share]]) -> dict[str, float]:
    """Figures in percent, of the prompts and of the tokens."""
    named = {"none": NONE, "lz_at_0.15": DEFAULT, "lz": SCALED}
    figures = {f"exact_loops_{name}": greedy[side].loops.percent for name, side in named.items()}
    figures |= {f"degenerate_{name}": greedy[side].degenerate.percent for name, side in named.items()}
    figures |= {f"accuracy_{name}": accuracy[side][0.0].percent for name, side in named.items()}
    return figures | {"degenerate_lz_high": greedy[SCALED].degenerate.high, "lz_strength": STRENGTH}


def cost(plan: Plan, console: Console) -> dict[str, float]:
    """Measure steps. The figure is the worst ratio over all vocabularies and contexts."""
    costs = list(lz_cost.measure(plan.rounds))
    show_cost(costs, console)
    if not torch.cuda.is_available():
        print("no GPU here: the share of a decode step on one was not measured, and the Triton kernels did not run")
    return {
        f"cost_over_hf_b{batch}": max(each.ratio for each in costs if each.batch == batch) for batch in lz_cost.BATCHES
    }


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about 4 minutes")
    parser.add_argument("--arrivals", action="store_true", help="only what arriving requests cost")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    plan, began, console = QUICK if arguments.quick else FULL, time.monotonic(), Console(width=120)
    warn_if_busy()
    figures, tables = ({}, {}) if arguments.arrivals else decoding(plan, console)
    if not arguments.arrivals:
        figures |= cost(plan, console)
    figures |= lz_arrivals.measure()
    figures["seconds"] = time.monotonic() - began
    print(f"{figures['seconds']:.0f} s in all")
    tell("lz", figures, arguments.json, decoding=tables)


if __name__ == "__main__":
    main()
