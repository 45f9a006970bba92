"""Runs every benchmark's `--quick` of another checkout and of this one, and puts their figures into one table.

    git worktree add ../before COMMIT && make -C ../before venv
    python benchmarks/compare.py ../before --out build/compare.md

The two sides take turns, benchmark by benchmark and round by round, so that load affects both; they alternate in going
first. A figure is the median of its rounds. A benchmark that only one side has is left out; one that fails or takes too
long is named, and the others continue.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
LONGEST_S = 1_200.0
"""Time limit for one benchmark of one side."""

Figures = Mapping[str, float]


def comparable(before: Path, after: Path) -> list[str]:
    """The names of the benchmarks that both checkouts have, with options `--quick` and `--json`."""
    return [
        path.stem
        for path in sorted((after / "benchmarks").glob("*.py"))
        if path.resolve() != Path(__file__).resolve()
        and all(_measures(side / "benchmarks" / path.name) for side in (before, after))
    ]


def _measures(path: Path) -> bool:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return '"--quick"' in text and '"--json"' in text


def measured(side: Path, benchmark: str) -> Figures:
    """The figures of one benchmark.

    Raises:
        RuntimeError: it failed, or took longer than `LONGEST_S`; with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [str(side / ".venv" / "bin" / "python"), f"benchmarks/{benchmark}.py", "--quick", "--json", str(out)]
        try:
            done = subprocess.run(command, cwd=side, capture_output=True, text=True, timeout=LONGEST_S, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {LONGEST_S:g} s") from None
        if not out.exists():
            raise RuntimeError((done.stdout + done.stderr).strip()[-300:] or f"exit code {done.returncode}")
        figures = json.loads(out.read_text(encoding="utf-8"))["figures"]
        return {name: value for name, value in figures.items() if isinstance(value, int | float)}


def table(benchmark: str, before: Sequence[Figures], after: Sequence[Figures]) -> Iterator[str]:
    """A row for each figure of both sides, and the names of the figures of only one."""
    old, new = _medians(before), _medians(after)
    for name in sorted(old.keys() & new.keys()):
        ratio = f"{new[name] / old[name]:.2f}" if old[name] else "-"
        yield f"| {benchmark} | {name} | {old[name]:.4g} | {new[name]:.4g} | {ratio} |"
    for name in sorted(old.keys() ^ new.keys()):
        sides = [f"{side[name]:.4g}" if name in side else "-" for side in (old, new)]
        yield f"| {benchmark} | {name} | {sides[0]} | {sides[1]} | - |"


def _medians(rounds: Sequence[Figures]) -> dict[str, float]:
    every: dict[str, list[float]] = defaultdict(list)
    for figures in rounds:
        for name, value in figures.items():
            every[name].append(value)
    return {name: statistics.median(values) for name, values in every.items()}


def compare(before: Path, benchmark: str, rounds: int) -> list[str]:
    """Rows of the table for one benchmark, or one row with the reason for having none."""
    sides: dict[Path, list[Figures]] = {before: [], HERE: []}
    for turn in range(rounds):
        for side in (before, HERE) if turn % 2 == 0 else (HERE, before):
            began = time.monotonic()
            try:
                sides[side].append(measured(side, benchmark))
            except RuntimeError as error:
                said = " ".join(str(error).split()).replace("|", "/")
                return [f"| {benchmark} | failed {'before' if side == before else 'after'} | {said} | | |"]
            print(f"{benchmark}, {side.name}: {time.monotonic() - began:.0f} s", flush=True)
    return list(table(benchmark, sides[before], sides[HERE]))


def main() -> None:
    """Run all benchmarks, and print the table row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout, with its own .venv")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side; more than one gives medians")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these benchmarks")
    parser.add_argument("--out", type=Path, help="write the table here too")
    args = parser.parse_args()
    before = args.before.resolve()
    if not (before / ".venv" / "bin" / "python").exists():
        parser.error(f"{before} has no .venv: run `make -C {args.before} venv`")
    rows = ["| benchmark | figure | before | after | after / before |", "| --- | --- | --: | --: | --: |"]
    for benchmark in comparable(before, HERE):
        if args.only and benchmark not in args.only:
            continue
        found = compare(before, benchmark, args.rounds)
        rows += found
        print("\n".join(found), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
