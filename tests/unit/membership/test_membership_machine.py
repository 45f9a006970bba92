"""The coordinator's rules, one by one: starting, the rungs of recovery, symptoms and causes."""

import pytest
from tests.unit.membership.membership_job import OOM, Job, form

from regrow.core.ids import NO_STATE, Rank
from regrow.core.messages import facts, orders
from regrow.core.messages.observations import WorkerAlive
from regrow.core.messages.tables import KeepTable
from regrow.core.messages.vocabulary import FaultKind, Role, Warmth
from regrow.core.records import IncidentClosed, IncidentOpened, Noted, WorkerBuilt, WorkerForked
from regrow.membership.machine import EndJob

# --- starting -------------------------------------------------------------------------------------------------------


def test_workers_are_started_when_all_nodes_have_registered() -> None:
    job = Job(4, nodes=2)
    spawned = job.all(orders.SpawnWorker)
    assert [(s.node, s.rank, s.local_rank) for s in spawned] == [("n0", 0, 0), ("n0", 1, 1), ("n1", 2, 0), ("n1", 3, 1)]
    assert {tuple(each.table.stores) for each in job.all(KeepTable)} == {("store0", "store1")}


def test_the_first_generation_is_formed_when_the_last_worker_is_ready() -> None:
    job = Job(3)
    job.ready(job.of(0), 0)
    job.ready(job.of(2), 0)
    assert not job.all(orders.FormGeneration)
    job.ready(job.of(1), 0)
    assert [f.rank for f in job.all(orders.FormGeneration)] == [0, 1, 2]
    assert (form(job).generation, form(job).step, form(job).holders) == (1, 0, [0, 1, 2])


def test_a_worker_that_built_another_model_ends_the_job() -> None:
    job = Job(2)
    job.ready(job.of(0), 0)
    job.ready(job.of(1), 0, layout="other")
    assert job.end.code == 1
    assert "rank 1" in job.end.diagnosis and "differs" in job.end.diagnosis


def test_standbys_are_started_when_training_has_begun() -> None:
    job = Job(2, standbys=2)
    assert all(s.role is Role.RANK for s in job.all(orders.SpawnWorker))
    job.built().joined()
    assert [s.role for s in job.all(orders.SpawnWorker)][2:] == [Role.STANDBY, Role.STANDBY]


def test_a_lost_standby_is_replaced() -> None:
    job = Job(2, standbys=1).trained()
    former = job.standby()
    job.ready(former)
    job.exited(former)
    assert job.standby() != former


def test_standbys_that_never_get_built_are_given_up_after_three_and_the_job_goes_on() -> None:
    job = Job(2, standbys=1).trained()
    for _ in range(3):
        job.exited(job.standby(), code=1)
    assert not job.machine.roster.standbys()
    assert "going on without" in job.last(Noted).text
    assert not job.all(EndJob)


def test_a_standby_that_built_another_model_is_ended_and_the_job_goes_on() -> None:
    job = Job(2, standbys=1).trained()
    odd = job.standby()
    job.ready(odd, layout="other")
    assert job.last(orders.FenceWorker).worker == odd
    assert "a standby" in job.last(Noted).text and "not used" in job.last(Noted).text
    assert job.standby() != odd
    assert not job.all(EndJob)


def test_after_three_standbys_that_built_another_model_no_more_are_started() -> None:
    job = Job(2, standbys=1).trained()
    for _ in range(3):
        job.ready(job.standby(), layout="other")
    assert not job.machine.roster.standbys()
    assert "going on without" in job.last(Noted).text
    assert len([s for s in job.all(orders.SpawnWorker) if s.role is Role.STANDBY]) == 3
    job.stepped(1)
    assert not job.all(EndJob)


def test_a_standby_that_built_another_model_for_a_lost_rank_is_replaced_by_a_fork() -> None:
    job = Job(2, standbys=1).trained()
    odd = job.standby()
    job.exited(job.of(1))
    job.halted(0, 1)
    assert job.of(1) == odd
    job.ready(odd, layout="other")
    assert job.of(1) != odd
    assert job.last(orders.SpawnWorker).role is Role.JOINER
    job.ready(job.of(1))
    job.joined().stepped(1)
    assert not job.all(EndJob)


def test_the_record_tells_which_process_a_worker_is_and_when_a_standby_has_its_imports() -> None:
    job = Job(2, standbys=1, warmth=Warmth.IMPORTS).trained()
    standby = job.standby()
    for _ in range(2):
        job.tell(facts.WorkerStarted(standby, 4711))
        job.tell(facts.WorkerReady(standby, NO_STATE, "", "", 0.2))
    assert [(line.worker, line.pid) for line in job.all(WorkerForked)] == [(standby, 4711)]
    assert [line.seconds for line in job.all(WorkerBuilt) if line.worker == standby] == [0.2]


# --- the rungs ------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_body_is_tried_again_in_place() -> None:
    job = Job(3).trained(0)
    before = dict(job.machine.roster.places)
    job.faulted(1, step=1)
    assert [h.worker for h in job.all(orders.HaltGeneration)] == list(before.values())
    for rank in job.ranks:
        job.halted(rank, 1)
    assert (form(job).generation, form(job).step) == (2, 1)
    assert job.machine.roster.places == before
    job.joined().stepped(1)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.rung, closed.ranks, closed.steps_lost) == ("exception", "retry", [1], 0)


def test_the_same_error_at_the_same_step_twice_ends_the_job_with_its_traceback() -> None:
    job = Job(3).trained(0)
    job.faulted(1, step=1)
    for rank in job.ranks:
        job.halted(rank, 1)
    job.joined()
    job.faulted(1, step=1)
    assert job.end.code == 1
    assert "rank 1 failed at step 1, the same error twice" in job.end.diagnosis
    assert OOM.traceback in job.end.diagnosis


def test_one_error_told_twice_is_one_error() -> None:
    job = Job(3).trained(0)
    job.faulted(1, step=1)
    job.faulted(1, step=1)
    assert not job.all(EndJob)


def test_the_same_error_many_steps_later_is_tried_again() -> None:
    job = Job(2).trained(0)
    for step in (1, 9):
        job.stepped(step - 1)
        job.faulted(1, step)
        for rank in job.ranks:
            job.halted(rank, step)
        job.joined().stepped(step)
    assert not job.all(EndJob)
    assert len(job.all(IncidentClosed)) == 2


def test_a_killed_worker_is_replaced_by_a_fork_where_there_is_no_standby() -> None:
    job = Job(3).trained(4)
    job.exited(job.of(1))
    assert (job.last(orders.SpawnWorker).role, job.last(orders.SpawnWorker).rank) == (Role.JOINER, 1)
    job.halted(0, 5)
    job.halted(2, 5)
    assert job.machine.generation == 1, "the newcomer is not ready yet"
    job.ready(job.of(1))
    assert (form(job).generation, form(job).step, form(job).holders) == (2, 5, [0, 2])
    job.joined().stepped(5)
    assert job.last(IncidentClosed).rung == "fork"


def test_a_built_standby_is_preferred_to_a_fork() -> None:
    job = Job(3, standbys=1).trained(4)
    standby = job.standby()
    job.ready(standby)
    spawned = len(job.all(orders.SpawnWorker))
    job.exited(job.of(1))
    assert job.of(1) == standby
    assert len(job.all(orders.SpawnWorker)) == spawned
    job.tell(WorkerAlive(standby))
    job.halted(0, 5)
    job.halted(2, 5)
    assert {m.rank: m.worker for m in form(job).members}[Rank(1)] == standby
    job.joined().stepped(5)
    assert job.last(IncidentClosed).rung == "standby"
    assert job.last(orders.SpawnWorker).role is Role.STANDBY, "and it is replaced in turn"


def test_where_the_script_has_groups_of_its_own_a_standby_takes_only_the_rank_that_it_was_built_as() -> None:
    job = Job(3, standbys=1)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, sharded=rank < 2)  # a group of ranks 0 and 1
    job.joined().stepped(4)
    standby = job.standby()
    assert job.last(orders.SpawnWorker).rank == 2
    job.ready(standby)
    job.exited(job.of(0))
    assert job.of(0) != standby
    assert (job.last(orders.SpawnWorker).role, job.last(orders.SpawnWorker).rank) == (Role.JOINER, 0)


def test_an_imports_standby_is_told_to_run_the_script_for_its_rank() -> None:
    job = Job(2, standbys=1, warmth=Warmth.IMPORTS).trained()
    standby = job.standby()
    job.tell(facts.WorkerReady(standby, NO_STATE, "", ""))
    job.exited(job.of(0))
    assert (job.last(orders.StartScript).worker, job.last(orders.StartScript).rank) == (standby, 0)
    job.tell(facts.WorkerReady(standby, NO_STATE, "", ""))
    assert len(job.all(orders.StartScript)) == 1, "told once, even where its readiness is told twice"
    job.halted(1, 1)
    job.ready(standby)
    assert form(job).holders == [1]


def test_an_imports_standby_that_is_needed_before_it_is_idle_runs_the_script_at_once() -> None:
    job = Job(2, standbys=1, warmth=Warmth.IMPORTS).trained()
    job.exited(job.of(0))
    assert not job.all(orders.StartScript)
    job.tell(facts.WorkerReady(job.of(0), NO_STATE, "", ""))
    assert job.last(orders.StartScript).worker == job.of(0)


def test_who_is_a_step_behind_receives_from_who_is_ahead() -> None:
    job = Job(4).trained(4)
    job.exited(job.of(3))
    job.halted(0, 5)
    job.halted(1, 6)
    job.halted(2, 5)
    job.ready(job.of(3))
    assert (form(job).step, form(job).holders) == (6, [1])


def test_who_tore_its_state_while_receiving_holds_nothing() -> None:
    job = Job(3).trained(4)
    job.exited(job.of(2))
    job.halted(0, 5)
    job.halted(1, 6)
    job.ready(job.of(2))
    job.exited(job.of(2))
    job.halted(0, NO_STATE)
    job.halted(1, 6)
    job.ready(job.of(2))
    assert (form(job).step, form(job).holders) == (6, [1])


def test_a_kill_during_the_recovery_is_mended_within_the_same_incident() -> None:
    job = Job(3).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    job.halted(2, 5)
    job.ready(job.of(1))
    job.resumed(0)
    job.exited(job.of(2))
    job.halted(0, 5)
    job.halted(1, NO_STATE)
    job.ready(job.of(2))
    assert (form(job).generation, form(job).holders) == (3, [0])
    job.joined().stepped(5)
    closed = job.last(IncidentClosed)
    assert (len(job.all(IncidentOpened)), closed.faults, closed.ranks) == (1, 2, [1, 2])


def test_two_workers_killed_at_once_are_one_incident() -> None:
    job = Job(4).trained(4)
    job.exited(job.of(1))
    job.exited(job.of(2))
    for rank in (0, 3):
        job.halted(rank, 5)
    job.ready(job.of(1))
    job.ready(job.of(2))
    job.joined().stepped(5)
    assert (job.last(IncidentClosed).ranks, job.last(IncidentClosed).faults) == ([1, 2], 2)


def test_all_state_lost_without_a_durable_checkpoint_ends_the_job() -> None:
    job = Job(2).trained(4)
    job.exited(job.of(0))
    job.exited(job.of(1))
    job.ready(job.of(0))
    job.ready(job.of(1))
    assert job.end.code == 1
    assert "step 5" in job.end.diagnosis and "--checkpoint-dir" in job.end.diagnosis


def test_all_state_lost_with_a_durable_checkpoint_starts_all_workers_again_from_it() -> None:
    job = Job(2, durable=True).trained(4)
    job.exited(job.of(0))
    job.exited(job.of(1))
    job.ready(job.of(0))
    job.ready(job.of(1))
    assert "started again" in job.last(Noted).text
    for fence in job.all(orders.FenceWorker):
        job.exited(fence.worker)
    assert [(s.role, s.resume, s.restarts) for s in job.all(orders.SpawnWorker)[-2:]] == [(Role.RANK, True, 1)] * 2
    job.built(state=3).joined().stepped(3)
    closed = job.last(IncidentClosed)
    assert (closed.rung, closed.steps_lost, form(job).step) == ("restart", 2, 3)


def test_all_killed_before_the_first_commit_starts_again_without_a_checkpoint() -> None:
    job = Job(2).built().joined()
    job.exited(job.of(0))
    job.exited(job.of(1))
    job.ready(job.of(0))
    job.ready(job.of(1))
    assert not job.all(EndJob)
    for fence in job.all(orders.FenceWorker):
        job.exited(fence.worker)
    job.built().joined().stepped(0)
    assert job.last(IncidentClosed).rung == "restart"


# --- symptoms and causes --------------------------------------------------------------------------------------------


def test_a_failed_collective_and_the_exit_that_explains_it_are_one_fault() -> None:
    job = Job(3, max_faults=1).trained(4)
    job.faulted(0, 5, kind=FaultKind.COLLECTIVE)
    job.faulted(2, 5, kind=FaultKind.COLLECTIVE)
    job.exited(job.of(1))
    job.halted(0, 5)
    job.halted(2, 5)
    job.ready(job.of(1))
    job.joined().stepped(5)
    assert len(job.all(IncidentOpened)) == 1
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.ranks, closed.faults) == ("exit", [1], 1)
    assert "SIGKILL" in closed.cause


def test_a_failed_collective_with_nobody_lost_is_tried_again_in_place() -> None:
    job = Job(2).trained(4)
    job.faulted(0, 5, kind=FaultKind.COLLECTIVE)
    for rank in job.ranks:
        job.halted(rank, 5)
    job.joined().stepped(5)
    assert (job.last(IncidentClosed).kind, job.last(IncidentClosed).rung) == ("collective", "retry")


def test_an_exit_long_after_its_symptom_was_mended_is_a_fault_of_its_own() -> None:
    job = Job(2).trained(4)
    job.faulted(0, 5, kind=FaultKind.COLLECTIVE)
    for rank in job.ranks:
        job.halted(rank, 5)
    job.resumed(0)
    job.exited(job.of(1))
    job.halted(0, 5)
    job.ready(job.of(1))
    job.joined().stepped(5)
    assert job.last(IncidentClosed).faults == 2


def test_the_time_of_the_fault_is_when_it_struck_and_not_when_it_was_known() -> None:
    job = Job(2).trained(4)
    job.tell(facts.WorkerExited(job.of(1), -9, job.now - 0.5), after=0.0)
    job.halted(0, 5)
    job.ready(job.of(1))
    job.joined().stepped(5)
    assert job.last(IncidentClosed).detect == pytest.approx(0.5)


def test_the_stages_of_an_incident_add_up() -> None:
    job = Job(2).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    job.ready(job.of(1))
    job.joined().stepped(5)
    closed = job.last(IncidentClosed)
    stages = (closed.detect, closed.abort, closed.regroup, closed.hydrate, closed.redo)
    assert min(stages) >= 0
    assert sum(stages) == pytest.approx(closed.total, abs=0.011)
