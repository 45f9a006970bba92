"""The demo's own decisions: what is killed when, and which script is trained."""

from itertools import pairwise

import pytest

from regrow.core.errors import UsageError
from regrow.core.messages.vocabulary import STEP_STAGES, FaultHow
from regrow.launch.demo import KILLS, STEPS, WORLD, fault_plan, find_script, run_demo
from regrow.launch.plan import parse_faults


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("steps", [20, STEPS])
def test_three_different_ranks_are_killed_at_stages_of_steps_that_leave_room_in_between(seed: int, steps: int) -> None:
    faults = parse_faults(fault_plan(steps=steps, seed=seed), world=WORLD)
    assert len({fault.rank for fault in faults}) == len(faults) == KILLS
    assert all(fault.how is FaultHow.SIGKILL and fault.stage in STEP_STAGES for fault in faults)
    at = [fault.step or 0 for fault in faults]
    assert at[0] >= steps // 5
    assert at[-1] <= steps * 4 // 5
    assert all(late - early > steps // 10 for early, late in pairwise(at))


def test_the_plan_is_a_function_of_the_seed() -> None:
    assert fault_plan(steps=STEPS, seed=3) == fault_plan(steps=STEPS, seed=3)
    assert len({fault_plan(steps=STEPS, seed=seed) for seed in range(10)}) > 5


def test_the_script_of_the_repository_is_found() -> None:
    assert find_script().name == "02-ddp.py"


def test_too_few_steps_are_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="--steps 5 leaves no room for 3 faults"):
        run_demo(steps=5)
