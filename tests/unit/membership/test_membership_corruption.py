"""Replicas that differ: the world goes back to what they agreed upon, and the node of the wrong one is counted."""

from tests.unit.membership.membership_job import Job

from regrow.core.exit_codes import RUN_AGAIN, SCRIPT_ERROR
from regrow.core.ids import NO_STATE, NodeId, Rank, StepNo
from regrow.core.messages import facts
from regrow.core.messages.orders import FormGeneration, HaltGeneration
from regrow.core.messages.replicas import CorruptionNamed, ReplicasDiffer
from regrow.core.records import IncidentClosed, IncidentOpened, ReplicaCorrupted
from regrow.launch.listing import status_lines
from regrow.membership.recovery.corruption import MOST_TIMES
from regrow.membership.recovery_point import Start, SurvivorState, go_back
from regrow.membership.states import Ended

NODE = NodeId("a")


def survivor(rank: int, at: int, verified: int, holding: str = "all") -> SurvivorState:
    return SurvivorState(Rank(rank), holding, StepNo(at), NODE, verified=StepNo(verified))


def rewound(step: int, *ranks: int) -> Start:
    return Start(StepNo(step), frozenset(map(Rank, ranks)), rewind=True)


# --- where to go back to


def test_all_go_back_to_the_state_upon_which_they_agreed() -> None:
    assert go_back([survivor(0, 8, 4), survivor(1, 8, 4)], StepNo(8)) == rewound(4, 0, 1)


def test_a_newcomer_receives_that_state_from_a_replica() -> None:
    assert go_back([survivor(0, 8, 4), survivor(1, -1, -1), survivor(2, 8, -1)], StepNo(8)) == rewound(4, 0)


def test_who_has_gone_back_already_stays_there() -> None:
    assert go_back([survivor(0, 4, 4), survivor(1, 4, -1), survivor(2, 8, 4)], StepNo(8)) == rewound(4, 0, 1, 2)


def test_a_torn_state_is_made_whole_by_the_own_copy() -> None:
    assert go_back([survivor(0, NO_STATE, 4), survivor(1, 8, -1)], StepNo(8)) == rewound(4, 0)


def test_every_shard_must_be_there() -> None:
    world = [survivor(0, 8, 8, "a"), survivor(1, 8, 4, "a"), survivor(2, 8, 4, "b")]
    assert go_back(world, StepNo(8)) == rewound(4, 1, 2)
    assert go_back(world[:1] + world[2:], StepNo(8)) is None


def test_nobody_stands_at_the_doubted_step_but_by_its_copy() -> None:
    assert go_back([survivor(0, 8, 8), survivor(1, 8, 4)], StepNo(8)) == rewound(8, 0)


# --- the job


def differs(job: Job, rank: int, step: int, wrong: list[int], undecided: list[int]) -> None:
    ranks, between = [Rank(each) for each in wrong], [Rank(each) for each in undecided]
    generation = job.machine.generation
    job.tell(ReplicasDiffer(job.of(rank), generation, StepNo(step), ranks, between, ["model.weight"]))


def halted(job: Job, rank: int, state: int, verified: int) -> None:
    generation = job.machine.generation
    job.tell(facts.WorkerHalted(job.of(rank), generation, StepNo(state), verified=StepNo(verified)))


def disagree(job: Job, step: int, wrong: list[int], undecided: list[int], verified: int) -> None:
    """All ranks say so and halt."""
    for rank in job.ranks:
        differs(job, rank, step, wrong, undecided)
    if not isinstance(job.machine.state, Ended):
        for rank in job.ranks:
            halted(job, rank, step, verified)


def orders(job: Job) -> list[FormGeneration]:
    return job.all(FormGeneration)[-len(job.ranks) :]


def trained(world: int, step: int) -> Job:
    return Job(world).trained(step - 1)


def test_the_odd_one_is_named_and_counted_against_its_node_and_nobody_is_ended() -> None:
    job = trained(3, 8)
    disagree(job, 8, [1], [], 4)
    assert len(job.all(HaltGeneration)) == 3
    assert [(form.step, form.rewind, form.holders) for form in orders(job)] == [(4, True, [0, 1, 2])] * 3
    [found] = job.all(ReplicaCorrupted)
    assert (found.rank, found.worker, found.node, found.step) == (1, job.of(1), "n0", 8)
    assert found.tensors == ["model.weight"]
    assert job.machine.snapshot().nodes[0].corruptions == 1
    assert any("n0" in line and "wrong state" in line for line in status_lines(job.machine.snapshot()))
    opened = job.last(IncidentOpened)
    assert (opened.kind, opened.ranks, opened.step) == ("corruption", [1], 8)


def test_the_incident_says_how_many_steps_were_lost() -> None:
    job = trained(3, 8)
    disagree(job, 8, [1], [], 4)
    job.joined().stepped(4)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.steps_lost, closed.rung, closed.faults) == ("corruption", 4, "retry", 1)


def test_two_replicas_run_the_steps_again_and_then_the_wrong_one_is_named() -> None:
    job = trained(2, 8)
    disagree(job, 8, [], [0, 1], 4)
    assert job.all(ReplicaCorrupted) == []
    job.joined().stepped(7)
    for rank in job.ranks:
        job.tell(CorruptionNamed(job.of(rank), job.machine.generation, StepNo(8), [Rank(0)]))
    assert [found.rank for found in job.all(ReplicaCorrupted)] == [0]


def test_two_replicas_that_differ_again_end_the_job() -> None:
    job = trained(2, 8)
    disagree(job, 8, [], [0, 1], 4)
    job.joined().stepped(7)
    disagree(job, 8, [], [0, 1], 4)
    assert job.end.code == SCRIPT_ERROR
    assert "rank 0" in job.end.diagnosis and "rank 1" in job.end.diagnosis and "n0" in job.end.diagnosis


def test_a_rank_that_is_wrong_at_the_same_step_time_and_again_ends_the_job() -> None:
    job = trained(3, 8)
    for _ in range(MOST_TIMES - 1):
        disagree(job, 8, [1], [], 4)
        job.joined().stepped(7)
    disagree(job, 8, [1], [], 4)
    assert job.end.code == RUN_AGAIN
    assert "n0" in job.end.diagnosis


def test_who_dies_in_the_same_incident_receives_what_the_others_went_back_to() -> None:
    job = trained(3, 8)
    differs(job, 0, 8, [1], [])
    job.exited(job.of(2))
    halted(job, 0, 8, 4)
    halted(job, 1, 8, 4)
    job.ready(job.of(2))
    assert [(form.step, form.rewind, form.holders) for form in orders(job)] == [(4, True, [0, 1])] * 3
    assert job.last(IncidentOpened).incident == 1


def test_a_fault_while_they_go_back_does_not_bring_the_wrong_state_back() -> None:
    job = trained(3, 8)
    disagree(job, 8, [1], [], 4)
    job.resumed(0)
    job.exited(job.of(2))
    halted(job, 0, 4, 4)
    halted(job, 1, 8, 4)
    job.ready(job.of(2))
    assert [(form.step, form.rewind, form.holders) for form in orders(job)] == [(4, True, [0, 1])] * 3
    job.joined().stepped(4)
    assert job.last(IncidentClosed).steps_lost == 4
    job.exited(job.of(0))
    halted(job, 1, 6, 4)
    halted(job, 2, 6, 4)
    job.ready(job.of(0))
    assert [(form.step, form.rewind, form.holders) for form in orders(job)] == [(6, False, [1, 2])] * 3


def test_before_any_agreement_the_majority_counts() -> None:
    job = trained(3, 1)
    disagree(job, 1, [1], [], NO_STATE)
    assert [(form.step, form.rewind, form.holders) for form in orders(job)] == [(1, False, [0, 2])] * 3


def test_without_an_agreement_or_a_majority_there_is_nothing_to_go_on_with() -> None:
    job = trained(2, 1)
    disagree(job, 1, [], [0, 1], NO_STATE)
    assert job.end.code == SCRIPT_ERROR
    assert "no state on which they agreed is left" in job.end.diagnosis


def test_corruption_counts_as_a_fault() -> None:
    job = Job(3, max_faults=1).trained(7)
    job.exited(job.of(0))
    halted(job, 1, 8, 4)
    halted(job, 2, 8, 4)
    job.ready(job.of(0))
    job.joined().stepped(8)
    differs(job, 0, 12, [1], [])
    assert job.end.code == RUN_AGAIN
