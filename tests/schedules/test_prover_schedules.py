"""A newcomer that is made for a proof is in nobody's way: every promise of a job holds with them as without."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from regrow.core.ids import StepNo
from regrow.core.messages.vocabulary import Role
from regrow.core.records import GenerationFormed, ReplacementJudged, WorkerSpawned
from regrow_lab.sim.draws import draw
from regrow_lab.sim.world import World

_OFTEN: dict[str, Any] = {"QUIET_S": 0.0, "AGAIN_S": 1.0, "CHANGED_S": 0.0, "SHARE": 1.0, "_CHANGED_SHARE": 1.0}
"""Far more of them than in any job, so that faults find them at every moment of their lives."""


def run(number: int) -> World:
    drawn = draw(number)
    spec = msgspec.structs.replace(drawn.spec, proof=True, proof_forks=True, standbys=number % 3 // 2)
    longer = msgspec.structs.replace(drawn.script, until=StepNo(25), build=0.5)
    schedule = msgspec.structs.replace(drawn, spec=spec, script=drawn.script if drawn.slots else longer)
    schedule.run(world := schedule.world())
    return world


@pytest.mark.parametrize("hundred", range(3))
def test_jobs_with_faults_come_to_their_ends_and_no_rank_is_held_by_one_that_was_made_for_a_proof(hundred: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(100 * hundred, 100 * hundred + 100):
        with patch.multiple("regrow.membership.recovery.proofs.provers", **_OFTEN):
            world = run(number)
        lines = [line for _, line in world.log]
        made = {line.worker for line in lines if isinstance(line, WorkerSpawned) and line.role == Role.PROVER}
        for line in lines:
            if isinstance(line, GenerationFormed):
                assert not made & set(line.workers.values()), number
        seen["made"] += len(made)
        seen["proven"] += sum(isinstance(line, ReplacementJudged) for line in lines)
    assert seen["made"] > 50 and seen["proven"] > 20, seen
