"""A habit as a script: `regrow run play.py HABIT --folder F`."""

import argparse
from pathlib import Path

from tests.harm.frame import begin, play
from tests.harm.table import named

parser = argparse.ArgumentParser()
parser.add_argument("habit")
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--strike", action="append", default=[], metavar="PLACE:RANK:STEP")
args = parser.parse_args()

habit = named(args.habit)
strikes = [(place, int(rank), int(step)) for place, rank, step in (text.split(":") for text in args.strike)]
play(habit.run, begin(args.folder, until=habit.until, strikes=strikes))
