"""Signs in a job's own records that its numbers are not to be believed."""

from typing import Any

from tests.process import verdicts

from regrow.core.ids import Generation, NodeId, Rank, StepNo, WorkerId
from regrow.core.records import (
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    Record,
    ReplacementJudged,
    ReplicaCorrupted,
    ReplicasDiverged,
    StepCommitted,
)
from regrow.observe.ledger import Ledger

WORKERS = {"0": WorkerId("w0"), "1": WorkerId("w1")}
FORMED = GenerationFormed(at=1.0, generation=Generation(1), step=StepNo(0), workers=WORKERS)
AGAIN = GenerationFormed(at=21.0, generation=Generation(2), step=StepNo(2), workers=WORKERS)


def commit(step: int, rank: int, loss: float, *, at: float | None = None, generation: int = 1) -> StepCommitted:
    return StepCommitted(
        at=10.0 + step if at is None else at,
        step=StepNo(step),
        rank=Rank(rank),
        worker=WorkerId(f"w{rank}"),
        generation=Generation(generation),
        seconds=0.1,
        metrics={"loss": loss},
    )


def closed(rung: str, *, kind: str = "exit", at: float = 22.0) -> IncidentClosed:
    fields: dict[str, Any] = dict.fromkeys(("detect", "abort", "regroup", "hydrate", "redo"), 0.1)
    return IncidentClosed(
        at=at,
        incident=1,
        generation=Generation(2),
        step=StepNo(2),
        kind=kind,
        ranks=[Rank(1)],
        cause="it died",
        rung=rung,
        faults=1,
        total=1.0,
        steps_lost=0,
        hydrated_bytes=0,
        opened_at=20.0,
        fault_at=20.0,
        before=0,
        after=0,
        **fields,
    )


CALM = [FORMED, *(commit(step, rank, 0.5 / (1 + step)) for step in range(3) for rank in (0, 1))]
ENDED = JobEnded(at=40.0, code=0, diagnosis="")


def told(*more: Record) -> list[str]:
    return verdicts.complaints(Ledger([*CALM, AGAIN, *more, ENDED]))


def test_a_job_that_was_mended_well_is_believed() -> None:
    well = Ledger([*CALM, AGAIN, closed("fork"), commit(2, 1, 0.5 / 3, at=23.0, generation=2), ENDED])
    assert verdicts.succeeded(well) and verdicts.faulted(well) and verdicts.complaints(well) == []
    assert not verdicts.faulted(Ledger([*CALM, closed("grow", kind="grow"), ENDED]))


def test_a_step_that_is_computed_again_has_the_same_numbers() -> None:
    assert told(closed("retry"), commit(1, 1, 0.3, at=23.0, generation=2))[0] == (
        "step 1 of rank 1 was committed twice, with loss 0.25 and 0.3"
    )
    smaller = GenerationFormed(at=21.0, generation=Generation(2), step=StepNo(2), workers={"0": WorkerId("w0")})
    assert verdicts.complaints(Ledger([*CALM, smaller, commit(1, 0, 0.3, at=23.0, generation=2), ENDED])) == []


def test_a_number_that_all_ranks_had_alike_stays_so() -> None:
    unlike = [commit(3, rank, 0.1 + rank, at=24.0, generation=2) for rank in (0, 1)]
    assert told(closed("fork"), *unlike) == [
        "all ranks had the same loss before the first fault, and at step 3 0.1, 1.1"
    ]


def test_what_makes_a_result_doubtful_does_not_end_with_0() -> None:
    differ = ReplicasDiverged(at=23.0, step=StepNo(3), alike=[[Rank(0)], [Rank(1)]], parts=["w"], text="w differs")
    assert told(closed("fork"), differ) == ["replicas differ and a rank was replaced: w differs"]
    assert told(closed("retry"), differ) == [], "no rank has got the state of another"
    refuted = ReplacementJudged(at=30.0, rank=Rank(1), step=StepNo(4), reason="it counts")
    assert told(closed("standby"), refuted) == ["a newcomer had trained before newcomers were refuted: it counts"]
    assert told(closed("all"), refuted) == []
    corrupt = ReplicaCorrupted(
        at=23.0, step=StepNo(3), rank=Rank(1), worker=WorkerId("w1"), node=NodeId("n"), tensors=[], on_node=1
    )
    assert told(corrupt) == ["the state of rank 1 was corrupted, and nothing was run again"]
    opened = IncidentOpened(
        at=23.0, incident=2, generation=Generation(2), step=StepNo(3), kind="exit", ranks=[], cause="it died"
    )
    assert told(closed("fork"), opened) == ["incident 2 was never closed: it died"]


def test_two_runs_are_compared_in_all_digits_and_steps() -> None:
    mine = verdicts.numbers(Ledger(CALM))
    assert verdicts.differences(mine, mine) == []
    other = verdicts.numbers(Ledger([*CALM, commit(1, 0, 0.250001, at=12.5), commit(3, 0, 0.1)]))
    assert verdicts.differences(mine, other) == [
        "step/rank/name 1/0/loss: 0.25, undisturbed 0.250001",
        "nobody has committed the steps [3]",
    ]
