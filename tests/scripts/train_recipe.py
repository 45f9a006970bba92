"""A recipe's training as `regrow train` starts it, which tells besides what its final state is."""

import argparse
import json
from pathlib import Path

import msgspec

from regrow.recipes.schema import Run
from regrow.recipes.training import train

parser = argparse.ArgumentParser()
parser.add_argument("--run", type=Path, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--out", type=Path, required=True)
options = parser.parse_args()

run = msgspec.json.decode(options.run.read_bytes(), type=Run)
session = train(msgspec.structs.replace(run, steps=options.steps))
report = {"digest": session.digest(), "rank": session.rank}
options.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(report))
