"""A habit as a script: `regrow run play.py HABIT --folder F`."""

import argparse
from pathlib import Path

from tests.harm.frame import LONGER, begin, play
from tests.harm.table import named

parser = argparse.ArgumentParser()
parser.add_argument("habit")
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--strike", action="append", default=[], metavar="PLACE:RANK:STEP")
parser.add_argument("--world", choices=["still", "changing"], default="")
args = parser.parse_args()

habit = named(args.habit)
strikes = [(place, int(rank), int(step)) for place, rank, step in (text.split(":") for text in args.strike)]
until = habit.until * (LONGER if args.world else 1)
trial = begin(args.folder, until=until, strikes=strikes, world=args.world, invariant=habit.invariant)
play(habit.run, trial)
