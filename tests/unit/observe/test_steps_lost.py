"""The tests' own judgement: a step runs again after a fault only where nobody who lives had committed it."""

from typing import Any

import msgspec
import pytest
from tests.process.training import alive_and_ahead

from regrow.core.ids import Generation, Rank, StepNo, WorkerId
from regrow.core.records import GenerationFormed, IncidentClosed, StepCommitted
from regrow.observe.ledger import Ledger


def made(kind: Any, **known: Any) -> Any:
    """A record of which only some fields matter."""
    rest: dict[str, Any] = {"at": 0.0}
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in known:
            rest[field.name] = [] if field.name == "ranks" else "" if field.type is str else rest.get(field.name, 0)
    return kind(**(rest | known))


@pytest.mark.parametrize(("by", "said"), [(1, []), (0, [(4, 0)])])
def test_only_the_dead_may_have_committed_what_runs_again(by: int, said: list[tuple[int, int]]) -> None:
    ledger = Ledger(
        [
            made(GenerationFormed, generation=Generation(1), workers={}),
            made(StepCommitted, step=StepNo(3), rank=Rank(0), worker=WorkerId("a"), generation=Generation(1)),
            made(StepCommitted, step=StepNo(4), rank=Rank(by), worker=WorkerId("b"), generation=Generation(1)),
            made(GenerationFormed, generation=Generation(2), step=StepNo(4), workers={}),
            made(StepCommitted, step=StepNo(4), rank=Rank(0), worker=WorkerId("a"), generation=Generation(2)),
        ]
    )
    incident = made(IncidentClosed, generation=Generation(2), step=StepNo(4), ranks=[Rank(1)], steps_lost=1)
    assert alive_and_ahead(ledger, incident) == said
