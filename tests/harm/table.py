"""The habits of the world's training scripts, and what regrow makes of each; `python -m tests.harm.table` prints it."""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HABITS: dict[str, "Habit"] = {}
OPEN: dict[str, str] = {}
"""Habits that do not hold yet, and why."""
BATCHES_OF_A_RANK = "the global batch would follow the number of ranks"
"""Why the world keeps its size where a script's batches are each rank's own."""
DRAWS = "random numbers are drawn by rank (in world-invariant mode by micro-batch)"
FP16 = "float16 rounds gradients of another number of rows to others"
BF16 = "bfloat16 rounds sums over another number of rows to others"
Run = Callable[..., Mapping[str, Any]]
RECIPE = "recipe-"
"""Habits whose name begins so are composed (`recipes.py`)."""


@dataclass(frozen=True)
class Habit:
    """One way to write a training script.

    Attributes:
        name: of its function.
        group: the module it is in, as a heading.
        what: one line, for the table.
        run: trains, and returns what its author calls the result.
        refused: the sentence with which regrow refuses it before step 0; empty: it works.
        instead: what to write instead, or what to know.
        between: it has functions that run between steps, so faults strike in them too.
        compared: whether its numbers are those of plain torch; not where torch itself would draw others.
        invariant: it runs in world-invariant mode.
        fixed: with which words regrow refuses it another size of the world; empty: it may have one.
        differs: why its numbers are others in a world of another size; empty: they are the same.
        faults: (rank, step, stage) of the faults that strike it.
        until: steps.
        imports: what its processes import as they train: seconds for each, where the process they are forked from has
            not imported it.
        flags: of `regrow run` in addition.
        strikes: place:rank:step of the kills at places of its own (`Trial.strike`).
    """

    name: str
    group: str
    what: str
    run: Run
    refused: str = ""
    instead: str = ""
    between: bool = False
    compared: bool = True
    alone: bool = True
    invariant: bool = False
    fixed: str = ""
    differs: str = ""
    faults: tuple[tuple[int, int, str], ...] = ((0, 2, "reduce"), (1, 4, "update"), (2, 6, "commit"), (1, 10, "update"))
    until: int = 12
    imports: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    strikes: tuple[str, ...] = ()


def habit(what: str, **facts: Any) -> Callable[[Run], Run]:
    """Enter a function into the table."""

    def enter(run: Run) -> Run:
        module = inspect.getmodule(run)
        heading = (inspect.getdoc(module) or "").splitlines()[0].rstrip(".") if module else ""
        HABITS[run.__name__] = Habit(run.__name__, heading, what, run, **facts)
        return run

    return enter


def all_habits() -> dict[str, Habit]:
    """Every habit, in the order of the table."""
    from tests.harm import habits

    for module in sorted(pkgutil.iter_modules(habits.__path__), key=lambda each: each.name):
        importlib.import_module(f"tests.harm.habits.{module.name}")
    return HABITS


def named(name: str) -> Habit:
    """One of the table, or a composed one."""
    if name.startswith(RECIPE):
        return importlib.import_module("tests.harm.recipes").habit_of(name)  # type: ignore[no-any-return]
    for file in sorted((Path(__file__).parent / "habits").glob("*.py")):
        if f"\ndef {name}(" in file.read_text(encoding="utf-8"):  # a job imports its own file alone, as a script would
            importlib.import_module(f"tests.harm.habits.{file.stem}")
    return HABITS[name]


def document(habits: Mapping[str, Habit]) -> str:
    """`docs/habits.md`."""
    lines = [_HEAD]
    for group in dict.fromkeys(habit.group for habit in habits.values()):
        lines += [f"## {group}", "", _COLUMNS, "| --- | --- | --- | --- |"]
        for habit in habits.values():
            if habit.group == group:
                cells = (_cell(habit.what), _verdict(habit), _elastic(habit), _cell(habit.instead))
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


_HEAD = """# Habits of training scripts, and what regrow makes of them

Made by `python -m tests.harm.table > docs/habits.md` from `tests/harm/habits`, where each habit is a small script.
`tests/harm/test_harm.py` trains each of them without regrow, alone, undisturbed under regrow, and struck by kills in a
step and between steps, by standby and by fork. `tests/harm/test_elastic_habits.py` trains each that works in a world
of 2, 3 and again 2 ranks, over batches of one global size, and in one of 2.

- **works**: undisturbed it gives what plain torch gives, but for the order of summation; struck it gives the same bits.
- **refused**: before step 0, by an error with these words.
- **not yet**: it should be one of the two, and is not.

Grown and shrunk:

- **the same**: it gives what the world of 2 ranks gives, but for the order of summation; **the same bits**: bitwise.
- **fixed**: the world keeps its size; who asks for another is refused with these words, and the job goes on.
- **goes through**: the world changes, and every step is made; the numbers are not compared, for this reason.
"""
_COLUMNS = "| habit | under regrow | grown and shrunk | instead, or to know |"


def _verdict(habit: Habit) -> str:
    if habit.name in OPEN:
        return f"not yet: {_cell(OPEN[habit.name])}"
    return f"refused: \u201c\u2026 {_cell(habit.refused)} \u2026\u201d" if habit.refused else "works"


def _elastic(habit: Habit) -> str:
    if habit.refused:
        return ""
    if habit.fixed:
        return f"fixed: \u201c\u2026 {_cell(habit.fixed)} \u2026\u201d"
    if habit.differs:
        return f"goes through: {_cell(habit.differs)}"
    return "the same bits" if habit.invariant else "the same"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    from tests.harm import table  # not this module, which runs as `__main__`: habits enter themselves there

    sys.stdout.write(table.document(table.all_habits()))
