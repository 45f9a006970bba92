"""A world that grows, and requests that are refused, fact by fact."""

import pytest
from tests.unit.membership.elastic_job import (
    candidates,
    comes,
    elastic,
    grown,
    lose,
    phase,
    planned,
    scale,
    shrunk,
    stop,
)
from tests.unit.membership.membership_job import Job, form

from regrow.core.ids import NO_STATE, NodeId, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.observations import NodeSeen
from regrow.core.messages.vocabulary import ErrorReport, Role
from regrow.core.records import GrowthWeighed, IncidentClosed, IncidentOpened, Noted, ScaleRefused, WorldChanged
from regrow.membership.machine import EndJob
from regrow.membership.orders import AnswerScale

# --- growing ----------------------------------------------------------------------------------------------------------


def test_newcomers_build_for_the_ranks_to_come_while_the_others_train_on() -> None:
    job = elastic()
    assert scale(job, 4) == AnswerScale(True, "from 2 to 4 replicas")
    spawned = [spawn for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.JOINER]
    assert [(spawn.rank, spawn.local_rank, spawn.world) for spawn in spawned] == [(2, 2, 4), (3, 3, 4)]
    assert not job.all(orders.HaltGeneration)
    job.ready(candidates(job)[0], NO_STATE)
    assert not job.all(orders.HaltGeneration), "not before all of them are built"
    job.stepped(5)
    job.ready(candidates(job)[1], NO_STATE)
    halts = job.all(orders.HaltGeneration)
    assert {halt.worker for halt in halts} == {job.of(0), job.of(1)}
    assert {halt.at for halt in halts} == {6 + 3}, "0.3 s ahead, at 0.1 s a step"
    assert phase(job) == "switching"


def test_the_world_is_larger_from_the_agreed_step_on_and_that_is_an_incident_of_its_own_kind() -> None:
    job = elastic()
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    at = planned(job)
    job.halted(0, at)
    began = job.now
    assert job.last(IncidentOpened).kind == "grow"
    assert job.machine.generation == 1, "not before all stand"
    job.halted(1, at)
    made = form(job)
    assert ([member.rank for member in made.members], made.step, made.holders) == ([0, 1, 2], at, [0, 1])
    changed = job.last(WorldChanged)
    assert (changed.before, changed.after, changed.step, changed.kind) == (2, 3, at, "grow")
    job.joined().stepped(at)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.rung, closed.before, closed.after, closed.faults) == ("grow", "grow", 2, 3, 0)
    assert closed.total == pytest.approx(job.now - began)
    assert closed.hydrated_bytes == 3000
    view = job.machine.snapshot()
    assert (view.replicas, view.wanted, view.min_replicas, view.max_replicas, view.phase) == (3, 3, 1, 6, "training")
    assert (view.incidents, view.changes) == (0, 1), "nothing has failed"


def test_nodes_that_hold_a_replica_together_make_the_world_grow_when_the_last_of_them_has_come() -> None:
    job = elastic(2, slots=2, unit=2, max_replicas=3)
    comes(job, "n1")
    lose(job, "n1")
    comes(job, "n2")
    assert (job.machine.snapshot().wanted, candidates(job)) == (1, []), "one that is gone again does not count"
    comes(job, "n3")
    assert (job.machine.snapshot().wanted, len(candidates(job))) == (2, 2)
    comes(job, "n4")
    assert job.machine.snapshot().wanted == 2
    comes(job, "n5")
    assert job.machine.snapshot().wanted == 3


def test_no_fault_is_counted_for_a_change() -> None:
    job = elastic(max_faults=1)
    shrunk(grown(shrunk(grown(job, 3), 2), 4), 1)
    assert not job.all(EndJob)


def test_a_built_standby_becomes_a_rank_at_once() -> None:
    job = elastic(standbys=1)
    standby = job.standby()
    job.ready(standby, NO_STATE)
    scale(job, 3)
    assert candidates(job) == [standby]
    assert phase(job) == "switching"
    stop(job)
    assert form(job).members[2].worker == standby


def test_a_worker_that_had_begun_the_step_has_it_planned_anew() -> None:
    job = elastic()
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    at = planned(job)
    for rank in (0, 1):
        job.tell(facts.HaltMissed(job.of(rank), job.machine.generation, StepNo(at), StepNo(at)))
    assert planned(job) == at + 6, "twice as far ahead, once for both"
    stop(job)
    assert form(job).step == at + 6


def test_who_missed_the_step_when_another_stands_already_is_halted_at_once() -> None:
    job = elastic()
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    at = planned(job)
    job.halted(0, at)
    job.tell(facts.HaltMissed(job.of(1), job.machine.generation, StepNo(at), StepNo(at)))
    assert (job.last(orders.HaltGeneration).worker, job.last(orders.HaltGeneration).at) == (job.of(1), None)
    job.halted(1, at)
    assert (len(form(job).members), form(job).step) == (3, at)


def test_who_does_not_stop_as_planned_is_halted_at_once_and_then_lost() -> None:
    job = elastic()
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    job.halted(0, planned(job))
    while job.last(orders.HaltGeneration).at is not None:
        job.wait()
    assert job.last(orders.HaltGeneration).worker == job.of(1)
    silent = job.of(1)
    while not job.all(orders.FenceWorker):
        job.now += 5.0
        job.tell(NodeSeen(NodeId("n0"), [job.sight(1, 5)]))
        job.wait()
    assert job.last(orders.FenceWorker).worker == silent
    assert phase(job) == "mending"


def test_a_fault_while_newcomers_build_is_mended_first_and_the_world_grows_then() -> None:
    job = elastic()
    scale(job, 3)
    newcomer = candidates(job)[0]
    job.exited(job.of(1))
    job.ready(newcomer, NO_STATE)
    job.halted(0, 6)
    job.ready(job.of(1), NO_STATE)
    assert len(form(job).members) == 2
    job.joined()
    job.committed(0, 6)
    assert job.last(orders.HaltGeneration).at is None
    job.committed(1, 6)
    assert candidates(job) == [newcomer]
    stop(job)
    assert form(job).members[2].worker == newcomer


def test_a_fault_in_the_middle_of_a_switch_takes_its_incident_over() -> None:
    job = elastic()
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    at = planned(job)
    job.halted(0, at)
    job.exited(job.of(1))
    job.ready(job.of(1), NO_STATE)
    job.joined().stepped(at)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.rung, closed.faults, closed.ranks, closed.before) == ("exit", "fork", 1, [1], 0)
    stop(job)
    assert len(form(job).members) == 3, "and then it grows"


def test_a_newcomer_that_dies_is_replaced_and_after_three_in_a_row_the_change_is_given_up() -> None:
    job = elastic()
    scale(job, 3)
    for attempt in range(3):
        assert len(candidates(job)) == 1, f"attempt {attempt}"
        error = ErrorReport("MemoryError", "no room", "MemoryError: no room")
        job.tell(facts.WorkerFailed(candidates(job)[0], error, StepNo(-1), own=True))
        job.exited(candidates(job)[0], 1)
    assert not candidates(job)
    assert not job.all(EndJob)
    refused = job.last(ScaleRefused)
    assert refused.replicas == 3
    assert "MemoryError: no room" in refused.reason
    assert scale(job, 3).accepted
    assert len(candidates(job)) == 1, "a new request is a new attempt"


def test_a_newcomer_that_is_not_built_in_time_is_fenced() -> None:
    job = elastic(build_deadline=50.0)
    scale(job, 3)
    newcomer = candidates(job)[0]
    job.wait()
    assert job.last(orders.FenceWorker).worker == newcomer
    assert candidates(job) != [newcomer]


def test_a_newcomer_that_dies_in_the_switch_does_not_hold_the_others_up() -> None:
    job = elastic()
    scale(job, 3)
    newcomer = candidates(job)[0]
    job.ready(newcomer, NO_STATE)
    job.exited(newcomer)
    stop(job)
    assert len(form(job).members) == 2
    job.joined().stepped(job.machine.step)
    assert len(candidates(job)) == 1


def test_the_training_may_end_while_newcomers_build() -> None:
    job = elastic()
    scale(job, 3)
    newcomer = candidates(job)[0]
    for rank in job.ranks:
        job.finished(rank, 6)
    assert job.last(orders.FenceWorker).worker == newcomer
    assert scale(job, 4) == AnswerScale(False, "the job has run its last step")
    job.exited(newcomer)
    for rank in job.ranks:
        job.exited(job.of(rank), 0)
    assert job.end.code == 0


def test_the_training_may_end_before_the_agreed_step() -> None:
    job = elastic()
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    for rank in job.ranks:
        job.finished(rank, planned(job) - 1)
    assert len(job.all(orders.ReleaseWorker)) == 2


def test_who_stops_at_the_last_step_where_others_have_finished_goes_on_with_them() -> None:
    job = elastic()
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    at = planned(job)
    job.halted(0, at)
    job.finished(1, at)
    job.halted(1, at)
    assert len(form(job).members) == 2, "the world stays as it is"
    for rank in job.ranks:
        job.finished(rank, at)
    assert len(job.all(orders.ReleaseWorker)) == 2


def test_a_newer_request_replaces_one_that_has_not_been_switched() -> None:
    job = elastic()
    scale(job, 4)
    first, second = candidates(job)
    scale(job, 3)
    assert candidates(job) == [first]
    assert job.last(orders.FenceWorker).worker == second
    scale(job, 1)
    assert job.all(orders.FenceWorker)[-1].worker == first
    stop(job)
    assert len(form(job).members) == 1


def test_a_request_in_the_middle_of_a_switch_is_done_after_it() -> None:
    job = elastic()
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    at = planned(job)
    scale(job, 1)
    stop(job, at=at)
    assert len(form(job).members) == 3
    job.joined().stepped(at)
    stop(job)
    assert len(form(job).members) == 1
    assert [(line.before, line.after) for line in job.all(WorldChanged)] == [(2, 3), (3, 1)]


def test_changes_that_nothing_forces_keep_their_distance() -> None:
    job = elastic(change_pause=100.0)
    grown(job, 3)
    done = job.now
    assert scale(job, 2).accepted
    assert phase(job) == "training"
    job.wait()
    assert phase(job) == "switching"
    assert job.now - done == pytest.approx(100.0, abs=1.0)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "ranks", "why"),
    [
        (0, None, "at least one replica"),
        (7, None, "more than the maximum of 6"),
        (5, None, "more than the 4 micro-batches of a step"),
        (4, None, "4 replicas need 4 slots, and the nodes of the job have 3"),
    ],
)
def test_a_size_that_cannot_be_is_refused_and_the_job_goes_on(replicas: int, ranks: int | None, why: str) -> None:
    job = Job(2, slots=3, min_replicas=1, max_replicas=6)
    for rank in job.ranks:
        job.tell(facts.WorkerReady(job.of(rank), StepNo(0), "address", "same", microbatches=4))
    job.joined().stepped(0)
    answer = scale(job, replicas, ranks=ranks)
    assert not answer.accepted
    assert why in answer.reason
    assert job.last(ScaleRefused).reason == answer.reason
    assert (phase(job), candidates(job)) == ("training", [])


def test_ranks_that_are_no_whole_replicas_are_refused() -> None:
    job = elastic(4, unit=2, max_replicas=3)
    assert "not a multiple of the unit" in scale(job, 0, ranks=5).reason
    assert scale(job, 0, ranks=6).accepted
    assert len(candidates(job)) == 2


def test_a_world_of_shards_without_replicas_has_one_size() -> None:
    job = Job(2, slots=4, min_replicas=1, max_replicas=4)
    for rank in job.ranks:
        job.tell(
            facts.WorkerReady(job.of(rank), StepNo(0), "address", f"l{rank}", holding=f"shard {rank}", sharded=True)
        )
    job.joined().stepped(0)
    answer = scale(job, 4).reason
    assert "rank 1 has another part of the state" in answer and "--replica-ranks N" in answer
    assert [note.text for note in job.all(Noted)] == [answer], "before the first step, and once"


@pytest.mark.parametrize("microbatches", [3, 4])
def test_too_few_microbatches_for_the_most_replicas_are_noted_before_the_first_step(microbatches: int) -> None:
    why = "4 replicas are more than the 3 micro-batches of a step (raise microbatches=)"
    said = [f"--replicas allows too many: {why}"] if microbatches == 3 else []
    job = Job(2, slots=4, min_replicas=1, max_replicas=4)
    for rank in job.ranks:
        job.tell(facts.WorkerReady(job.of(rank), StepNo(0), "address", "same", microbatches=microbatches))
    job.joined()
    assert [note.text for note in job.all(Noted)] == said
    job.stepped(0).stepped(1)
    assert [note.text for note in job.all(Noted)] == said, "once"
    assert scale(job, 4).reason == (why if said else "from 2 to 4 replicas")


def test_a_job_of_one_size_says_how_it_would_have_others_and_warns_of_nothing() -> None:
    job = Job(2, slots=4)
    for rank in job.ranks:
        job.tell(facts.WorkerReady(job.of(rank), StepNo(0), "address", "same", fixed="a group of ranks 0 and 2"))
    job.joined().stepped(0)
    said = "this job was started for 2 replicas only (start it with --replicas MIN:MAX)"
    assert [scale(job, size).reason for size in (1, 3)] == [said, said]
    assert scale(job, 2).accepted and not job.all(Noted)


def test_a_script_may_say_that_its_world_is_fixed() -> None:
    job = Job(2, slots=4, min_replicas=1, max_replicas=4)
    for rank in job.ranks:
        job.tell(facts.WorkerReady(job.of(rank), StepNo(0), "address", "same", fixed="a group of ranks 0 and 2"))
    job.joined().stepped(0)
    said = (
        "the number of replicas cannot change while the job trains (--replicas allows 1 to 4): a group of ranks 0 and 2"
    )
    assert scale(job, 1).reason == said
    assert [note.text for note in job.all(Noted)] == [said], "before the first step, and once"


def test_a_newcomer_that_is_no_replica_shows_that_the_world_is_fixed() -> None:
    job = elastic(1)
    scale(job, 2)
    job.tell(facts.WorkerReady(candidates(job)[0], NO_STATE, "address", "half", holding="half", sharded=True))
    assert "another part of the state" in job.last(ScaleRefused).reason
    assert not candidates(job)
    assert not scale(job, 2).accepted


def test_growing_for_a_stay_that_does_not_pay_is_refused_and_both_sides_are_written_down() -> None:
    job = grown(elastic(), 3)
    pause = job.last(IncidentClosed).total
    answer = scale(job, 6, stay=pause / 2)
    assert not answer.accepted
    weighed = job.last(GrowthWeighed)
    assert (weighed.before, weighed.after, weighed.grows) == (3, 6, False)
    assert weighed.gain == pytest.approx(pause / 2)
    assert weighed.cost == pytest.approx(pause)
    assert scale(job, 6, stay=pause * 2).accepted
    assert job.last(GrowthWeighed).grows
