"""Facts that are stale, late, repeated, or never come."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.membership.membership_job import Job, form

from regrow.core.ids import Generation, NodeId, Seconds, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.observations import NodeSeen, ProveAlive, WorkerAlive
from regrow.core.messages.vocabulary import ErrorReport
from regrow.core.phase import Phase
from regrow.core.records import GenerationFormed, IncidentClosed, IncidentOpened, Noted
from regrow.membership.machine import Command
from regrow.membership.states import Mending

# --- what is stale, late, or never comes ----------------------------------------------------------------------------


def test_what_is_said_of_an_older_generation_is_not_heard() -> None:
    job = Job(2).trained(4)
    job.faulted(0, 5)
    job.halted(0, 5)
    job.halted(1, 5)
    job.joined()
    job.faulted(1, 5, ErrorReport("KeyError", "x", "KeyError: x"))
    assert (job.machine.generation, type(job.machine.state).__name__) == (2, "Mending")
    job.halted(0, 5, Generation(1))
    job.halted(1, 5, Generation(1))
    assert (job.machine.generation, type(job.machine.state).__name__) == (2, "Mending")


def halt_over(job: Job, silent: int, **what: Any) -> None:
    """Time passes, and agents look at a rank that does not answer the halt."""
    for _ in range(8):
        job.now += 20.0
        job.tell(NodeSeen(NodeId("n0"), [job.sight(silent, 5, **what)]))
        if job.all(orders.FenceWorker) or not isinstance(job.machine.state, Mending):
            return
        job.wait()


def test_who_hangs_and_does_not_answer_the_halt_is_fenced_and_replaced() -> None:
    job = Job(3).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    job.ready(job.of(1))
    silent = job.of(2)
    halt_over(job, 2)
    assert (job.last(orders.FenceWorker).worker, job.last(orders.FenceWorker).dump_stacks) == (silent, True)
    assert job.of(2) != silent
    job.ready(job.of(2))
    assert form(job).holders == [0]
    assert silent not in {m.worker for m in form(job).members}


def test_a_small_world_is_judged_at_each_look_and_a_large_one_five_times_a_second() -> None:
    assert Job(4).trained(4).hung(1, 5, every=0.05), "found at the second look"
    large = Job(100).trained(4)
    assert not large.hung(1, 5, every=0.05)
    large.tell(NodeSeen(NodeId("n0"), [large.sight(1, 5)]), after=0.2)
    assert large.last(orders.FenceWorker).worker


@pytest.mark.parametrize(
    "what",
    [{"busy": True}, {"phase": Phase.OUTSIDE}, {"phase": Phase.REGION}, {"seconds": 60.0}, {"phase": Phase.DATA}],
    ids=["it computes", "between two steps", "in a restartable function", "it has only begun", "it reads its batch"],
)
def test_who_is_only_slow_to_answer_the_halt_is_waited_for(what: dict[str, Any]) -> None:
    job = Job(3).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    job.ready(job.of(1))
    halt_over(job, 2, **{"seconds": 170.0, **what})
    assert not job.all(orders.FenceWorker)
    job.halted(2, 5)
    assert form(job).generation == 2, "and then all go on"
    assert len(job.all(IncidentOpened)) == 1


def test_of_whom_nothing_is_seen_is_waited_for_for_half_an_hour() -> None:
    job = Job(2).trained(4)
    job.exited(job.of(1))
    job.ready(job.of(1))
    begun = job.now
    while not job.all(orders.FenceWorker):
        job.wait()
    assert 1790.0 < job.now - begun < 1900.0


def test_the_last_that_has_the_state_is_not_ended_on_suspicion() -> None:
    job = Job(2).trained(4)
    job.exited(job.of(1))
    job.ready(job.of(1))
    halt_over(job, 0, seconds=900.0)
    assert not job.all(orders.FenceWorker)
    job.halted(0, 5)
    assert form(job).holders == [0]


def test_no_generation_is_formed_before_every_script_has_come_to_where_it_waits() -> None:
    job = Job(3).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    job.ready(job.of(1))
    away = facts.WorkerHalted(job.of(2), Generation(1), StepNo(5), stands=False)
    job.tell(away)
    assert form(job).generation == 1
    for _ in range(20):
        job.tell(NodeSeen(NodeId("n0"), [job.sight(2, 5, phase=Phase.OUTSIDE, seconds=200.0)]))
        job.wait()
    assert form(job).generation == 1 and not job.all(orders.FenceWorker)
    assert [note.text for note in job.all(Noted) if "waits" in note.text], "which is said"
    job.tell(msgspec.structs.replace(away, stands=True))
    assert form(job).generation == 2
    job.joined().stepped(5)
    assert job.last(IncidentClosed).faults == 1


def test_who_was_fenced_is_not_heard_any_more() -> None:
    job = Job(2).trained(4)
    hung = job.of(1)
    job.hung(1, 5)
    assert job.last(orders.FenceWorker).worker == hung
    job.tell(facts.WorkerHalted(hung, Generation(1), StepNo(5)))
    job.halted(0, 5)
    job.ready(job.of(1))
    assert form(job).holders == [0]
    job.exited(hung)
    assert len(job.all(IncidentOpened)) == 1


def test_a_worker_that_hangs_while_groups_form_is_found_by_the_halt_that_follows() -> None:
    job = Job(3).built()
    job.wait()
    assert not job.all(orders.FenceWorker), "all of them are late, and only one is at fault"
    job.halted(0, 0)
    job.halted(2, 0)
    culprit = job.of(1)
    halt_over(job, 1)
    assert [fence.worker for fence in job.all(orders.FenceWorker)] == [culprit]


def test_who_alone_does_not_reach_its_new_groups_is_fenced() -> None:
    job = Job(3).built()
    job.resumed(0)
    job.resumed(2)
    late = job.of(1)
    job.wait()
    assert [fence.worker for fence in job.all(orders.FenceWorker)] == [late]


def test_who_hangs_while_another_thread_answers_the_halt_is_fenced() -> None:
    job = Job(3).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    job.tell(facts.WorkerHalted(job.of(2), Generation(1), StepNo(5), stands=False))
    job.ready(job.of(1))
    stuck = job.of(2)
    halt_over(job, 2)
    assert [fence.worker for fence in job.all(orders.FenceWorker)] == [stuck]


def test_a_standby_that_does_not_answer_is_replaced_before_anybody_waits_for_it() -> None:
    job = Job(3, standbys=1).trained(4)
    job.ready(job.standby())
    dead = job.standby()
    job.exited(job.of(1))
    assert job.last(ProveAlive).worker == dead == job.of(1)
    job.halted(0, 5)
    job.halted(2, 5)
    begun = job.now
    assert form(job).generation == 1
    job.wait()
    assert [fence.worker for fence in job.all(orders.FenceWorker)] == [dead]
    assert job.of(1) != dead and job.now - begun < 3.0
    job.ready(job.of(1))
    assert form(job).generation == 2
    job.joined().stepped(5)
    assert job.last(IncidentClosed).faults == 1


def test_a_standby_that_answers_is_seated_at_once() -> None:
    job = Job(2, standbys=1).trained(4)
    job.ready(job.standby())
    job.exited(job.of(1))
    job.tell(WorkerAlive(job.of(1)))
    job.halted(0, 5)
    assert form(job).generation == 2


def test_a_joiner_that_is_never_ready_is_fenced_and_another_forked() -> None:
    job = Job(2).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    joiner = job.of(1)
    job.tell(facts.WorkerStarted(joiner, 7))
    job.wait()
    assert job.last(orders.FenceWorker).worker == joiner
    assert job.of(1) != joiner


def test_a_rank_that_is_never_ready_while_others_are_has_all_started_again() -> None:
    job = Job(2)
    for rank in job.ranks:
        job.tell(facts.WorkerStarted(job.of(rank), 7))
    assert job.machine.next_deadline() is None, "a script without a session may run for days"
    job.ready(job.of(0), 0)
    job.wait()
    assert {fence.worker for fence in job.all(orders.FenceWorker)} == {job.of(0), job.of(1)}


def test_a_worker_that_was_never_started_does_not_hold_the_job_up_for_ever() -> None:
    job = Job(2)
    job.tell(facts.WorkerStarted(job.of(0), 7))
    job.wait()
    job.wait()
    assert job.end.code == 75
    assert "could not be ended" in job.end.diagnosis


def test_a_standby_that_is_never_ready_is_replaced() -> None:
    job = Job(2, standbys=1).trained()
    slow = job.standby()
    job.wait()
    assert job.last(orders.FenceWorker).worker == slow
    assert job.standby() != slow


def test_a_commit_says_that_a_worker_has_resumed_even_where_that_was_lost() -> None:
    job = Job(2).built()
    job.resumed(0)
    job.committed(1, 0)
    assert len(job.all(GenerationFormed)) == 1


def test_progress_of_a_node_tells_the_newest_step() -> None:
    job = Job(2).trained(0)
    commits = [facts.WorkerCommitted(job.of(r), Generation(1), StepNo(7), job.now, 0.1) for r in job.ranks]
    job.tell(facts.NodeProgress(NodeId("n0"), commits))
    assert (job.machine.step, job.machine.snapshot().ranks[0].state_at) == (8, 8)
    job.tell(
        facts.NodeProgress(NodeId("n0"), [facts.WorkerCommitted(job.of(0), Generation(1), StepNo(3), job.now, 0.1)])
    )
    assert (job.machine.step, job.machine.snapshot().ranks[0].state_at) == (8, 8), "never back"


def test_a_step_that_died_with_those_who_committed_it_counts_as_lost() -> None:
    job = Job(3).trained(4)
    job.committed(1, 5)
    job.exited(job.of(1))
    job.halted(0, 5)
    job.halted(2, 5)
    job.ready(job.of(1))
    job.joined().stepped(5)
    assert job.last(IncidentClosed).steps_lost == 1


# --- repetition -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "again",
    [
        lambda job: job.resumed(0),
        lambda job: job.ready(job.of(0), 0),
        lambda job: job.committed(0, 4),
        lambda job: job.tell(facts.WorkerStarted(job.of(0), 7)),
        lambda job: job.tell(facts.NodeJoined(NodeId("n0"), "host", 2, "store0")),
        lambda job: job.tell(facts.TimeAdvanced()),
    ],
)
def test_a_fact_told_again_changes_nothing(again: Callable[[Job], list[Command]]) -> None:
    job = Job(2).trained(4)
    before = job.machine.snapshot()
    assert again(job) == []
    assert job.machine.snapshot() == before or job.machine.snapshot().ranks[0].pid == 7


# --- size -----------------------------------------------------------------------------------------------------------


def test_an_incident_of_4000_ranks_takes_no_time_that_grows_with_its_square() -> None:
    job = Job(4000, nodes=500, standbys=1, agents=False).trained(0)
    begun = time.process_time()
    job.exited(job.of(17))
    for rank in job.ranks:
        if rank != 17:
            job.halted(rank, 1)
            job.machine.next_deadline()
    job.ready(job.of(17))
    job.joined().stepped(1)
    assert len(job.all(IncidentClosed)) == 1
    assert time.process_time() - begun < 3.0


def restarted(took: Seconds = 0.0) -> Job:
    """All workers are started again, from a checkpoint, and build. `took`: what they needed at first."""
    job = Job(2, durable=True)
    job.now += took
    job.trained(4)
    for rank in (0, 1):
        job.exited(job.of(rank))
    for rank in (0, 1):
        job.ready(job.of(rank))
    for fence in job.all(orders.FenceWorker):
        job.exited(fence.worker)
    for rank in (0, 1):
        job.tell(facts.WorkerStarted(job.of(rank), 100 + rank))
    return job


def test_workers_that_are_started_again_and_never_come_to_a_step_are_started_anew() -> None:
    job = restarted()
    began = job.now
    hanging = {job.of(0), job.of(1)}
    job.wait()
    assert job.now - began >= 2 * job.machine.spec.build_deadline - 1.0, "they read a checkpoint, too"
    assert {fence.worker for fence in job.all(orders.FenceWorker)} >= hanging
    assert "not ready for its first step in time" in job.last(Noted).text


def test_a_script_that_took_long_at_first_may_take_longer_again() -> None:
    job = restarted(took=3 * 3600.0)
    began = job.now
    job.wait()
    assert job.now - began >= 6 * 3600.0 - 1.0


def test_how_long_a_script_may_build_that_has_never_come_to_a_step_nobody_knows() -> None:
    job = Job(2)
    for rank in (0, 1):
        job.tell(facts.WorkerStarted(job.of(rank), 100 + rank))
    assert job.machine.next_deadline() is None
