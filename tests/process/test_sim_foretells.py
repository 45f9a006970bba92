"""The simulator and a real job: goodput that was foretold, and goodput that was measured."""

from pathlib import Path

import pytest
from simulator import demo_run, foretold

STEPS = 60


def test_the_goodput_of_a_run_with_kills_is_foretold_from_another_within_a_fifth(tmp_path: Path) -> None:
    known, unknown = (demo_run(tmp_path, seed=seed, steps=STEPS) for seed in (1, 2))
    assert sum(len(found) for found in known.stages.values()) >= 2
    assert foretold(known, steps=STEPS) == pytest.approx(unknown.goodput, rel=0.2)
