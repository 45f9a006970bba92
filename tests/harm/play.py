"""A habit as a script: `regrow run play.py HABIT --folder F`."""

import argparse
import time
from pathlib import Path

from tests.harm.frame import LONGER, begin, play
from tests.harm.table import named

from regrow.train.loop import StepLoop
from regrow.train.step import Step

JUDGED_FROM, PACE_S = 3, 10.0


def slowly(folder: Path) -> None:
    """From now on wait before each step, for a while, for somebody who wants to see it; until there is `enough`."""
    prepare = StepLoop.prepare

    def paced(loop: StepLoop) -> Step | None:
        number, until = loop.worker.step, time.monotonic() + PACE_S
        asked = folder / f"asked-{number}"
        while number >= JUDGED_FROM and time.monotonic() < until and not (folder / "enough").exists():
            if loop.worker.proofs is not None and loop.worker.proofs.wanted:
                asked.touch()
            if asked.exists():
                break
            time.sleep(0.01)
        return prepare(loop)

    StepLoop.prepare = paced  # type: ignore[assignment, method-assign]


parser = argparse.ArgumentParser()
parser.add_argument("habit")
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--strike", action="append", default=[], metavar="PLACE:RANK:STEP")
parser.add_argument("--world", choices=["still", "changing"], default="")
parser.add_argument("--until-judged", action="store_true")
args = parser.parse_args()
if args.until_judged:
    slowly(args.folder)

habit = named(args.habit)
strikes = [(place, int(rank), int(step)) for place, rank, step in (text.split(":") for text in args.strike)]
until = habit.until * (LONGER if args.world else 1)
trial = begin(args.folder, until=until, strikes=strikes, world=args.world, invariant=habit.invariant)
play(habit.run, trial)
