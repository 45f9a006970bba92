"""The simulator and a real job: goodput that was foretold, and goodput that was measured."""

from pathlib import Path

import pytest
from simulator import demo_run, foretold

STEPS = 60


def test_the_goodput_of_a_run_with_kills_is_foretold_from_its_costs_within_a_fifth(tmp_path: Path) -> None:
    """From its own: what another run costs depends on what else the machine does then (see `benchmarks/simulator.py`).

    The costs are means over incidents, and the kills foretold are others, so what agrees is how they are put together.
    """
    run = demo_run(tmp_path, seed=1, steps=STEPS)
    assert sum(len(found) for found in run.stages.values()) >= 2
    assert foretold(run, steps=STEPS) == pytest.approx(run.goodput, rel=0.2)
