"""Budgets, ends, scripts that fail early or know nothing of regrow, faults on demand."""

import pytest
from tests.unit.membership.membership_job import OOM, Job, form, mend

from regrow.core.ids import NodeId, Rank, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.checkpoints import CheckpointWritten, PartsWritten, SnapshotHeld, WriteCheckpoint
from regrow.core.messages.copies import KeepState, StateKept, TakeSnapshot
from regrow.core.messages.observations import NodeSeen
from regrow.core.messages.vocabulary import ErrorReport, FaultSpec, FaultStage, Role
from regrow.core.phase import Phase
from regrow.core.records import FaultInjected, IncidentClosed, Noted
from regrow.membership.machine import EndJob
from regrow.membership.orders import AnswerScale
from regrow.membership.states import Closing

# --- budgets and ends -----------------------------------------------------------------------------------------------


def test_more_faults_than_the_window_may_hold_end_the_job_to_be_run_again() -> None:
    job = Job(2, max_faults=2, window=60.0).trained(0)
    mend(job, 0, 1)
    mend(job, 1, 2)
    assert not job.all(EndJob)
    mend(job, 0, 3)
    assert job.end.code == 75
    assert "more than 2 faults within 60 s" in job.end.diagnosis


def test_faults_older_than_the_window_are_forgiven() -> None:
    job = Job(2, max_faults=2, window=60.0).trained(0)
    for step in range(1, 6):
        job.now += 31.0
        mend(job, step % 2, step)
    assert not job.all(EndJob)


def test_a_stop_request_ends_the_job_to_be_run_again() -> None:
    job = Job(2).trained(4)
    job.tell(facts.StopRequested("SIGTERM"))
    assert (job.end.code, job.end.diagnosis) == (75, "stopped at step 5: SIGTERM")
    assert job.machine.handle(facts.TimeAdvanced(), job.now) == []


def behind_the_loop(*, met: bool) -> Job:
    """All steps are done; `met`: and all ranks have come to their exits, where one is kept by a thread."""
    job = Job(2).trained(4)
    for rank in job.ranks:
        job.tell(facts.WorkerFinished(job.of(rank), job.machine.generation, StepNo(5), True))
    assert isinstance(job.machine.state, Closing)
    if met:
        job.tell(facts.ScriptReturned(job.of(0)))
        job.finished(0, 5)
        job.tell(facts.ScriptReturned(job.of(1), ["upload"]))
    return job


@pytest.mark.parametrize(("met", "code"), [(True, 0), (False, 75)])
def test_a_stop_when_every_script_has_done_its_last_line_is_the_end_of_a_training_that_is_done(
    met: bool, code: int
) -> None:
    job = behind_the_loop(met=met)
    job.tell(facts.StopRequested("interrupted by Ctrl-C", patience=30.0))
    assert not job.all(EndJob), "what the script does behind its loop has the time that there is"
    job.tell(facts.TimeAdvanced(), after=31.0)
    assert job.end.code == code


def test_a_job_that_ends_by_itself_after_it_was_asked_to_stop_behind_its_loop_has_ended_well() -> None:
    job = behind_the_loop(met=False)
    job.tell(facts.StopRequested("interrupted by Ctrl-C", patience=30.0))
    for rank in job.ranks:
        job.finished(rank, 5)
    for rank in job.ranks:
        job.exited(job.of(rank), 0)
    assert (job.end.code, job.end.diagnosis) == (0, "")


def test_who_asks_again_behind_the_loop_waits_no_longer() -> None:
    job = behind_the_loop(met=False)
    job.tell(facts.StopRequested("interrupted by Ctrl-C", patience=30.0))
    job.tell(facts.StopRequested("interrupted by Ctrl-C"))
    assert job.end.code == 75


def test_a_process_that_stays_a_minute_after_its_script_is_told_of_with_its_threads_once() -> None:
    job = behind_the_loop(met=True)
    job.tell(facts.TimeAdvanced(), after=50.0)
    assert not any("its process is still there" in each.text for each in job.all(Noted))
    for _ in range(3):
        job.tell(facts.TimeAdvanced(), after=61.0)
    told = [each.text for each in job.all(Noted) if "its process is still there" in each.text]
    assert len(told) == 1
    assert told[0].startswith("rank 1 has done") and "kept by threads that are no daemons: upload" in told[0]


def test_a_job_whose_workers_have_all_finished_is_released_and_ends_well() -> None:
    job = Job(2, standbys=1).trained(4)
    standby = job.standby()
    job.finished(0, 5)
    assert not job.all(orders.ReleaseWorker), "the other may still need its state"
    job.finished(1, 5)
    assert [r.worker for r in job.all(orders.ReleaseWorker)] == [job.of(0), job.of(1)]
    assert job.last(orders.FenceWorker).worker == standby
    job.exited(job.of(0), 0)
    job.exited(job.of(1), 0)
    assert (job.end.code, job.end.diagnosis) == (0, "")


def test_the_release_is_repeated_until_the_worker_has_gone() -> None:
    job = Job(2).trained(4)
    job.finished(0, 5)
    job.finished(1, 5)
    job.exited(job.of(0), 0)
    assert [command.worker for command in job.wait() if isinstance(command, orders.ReleaseWorker)] == [job.of(1)]


def test_a_worker_that_stays_long_after_all_others_have_gone_ends_the_job() -> None:
    job = Job(2, build_deadline=90.0).trained(4)
    job.finished(0, 5)
    job.finished(1, 5)
    job.exited(job.of(0), 0)
    for _ in range(5):
        job.wait()
    job.tell(facts.TimeAdvanced(), after=80_000.0)
    assert not job.all(EndJob), "it may export its model, as under torchrun"
    job.tell(facts.TimeAdvanced(), after=7_000.0)
    assert job.end.code == 75
    assert "rank 1" in job.end.diagnosis


def test_an_error_after_the_last_step_is_the_scripts_own() -> None:
    job = Job(2).trained(4)
    job.finished(0, 5)
    job.finished(1, 5)
    job.tell(facts.WorkerFailed(job.of(1), OOM, StepNo(5)))
    job.exited(job.of(1), 1)
    assert job.end.code == 1
    assert OOM.traceback in job.end.diagnosis


@pytest.mark.parametrize(
    ("ended", "code", "end"),
    [(True, -9, 0), (True, -6, 0), (False, -9, 1), (True, 3, 1)],
    ids=["killed", "aborted", "its script is not through", "its own exit code"],
)
def test_a_process_that_dies_behind_the_end_of_its_script_when_all_have_met_there_ends_nothing(
    ended: bool, code: int, end: int
) -> None:
    job = Job(2).trained(4)
    job.finished(0, 5)
    job.finished(1, 5)
    if ended:
        job.tell(facts.ScriptEnded(job.of(1)))
    job.exited(job.of(1), code)
    if end == 0:
        assert "rank 1 was ended by SIG" in job.last(Noted).text
        job.exited(job.of(0), 0)
    assert job.end.code == end


@pytest.mark.parametrize(
    ("step", "phase", "told"),
    [(5, Phase.COMPUTING, True), (6, Phase.UPDATING, True), (4, Phase.COMPUTING, False), (5, Phase.OUTSIDE, False)],
)
def test_a_rank_that_leaves_while_another_is_in_the_next_step_already_is_named_at_once(
    step: int, phase: Phase, told: bool
) -> None:
    job = Job(2).trained(4)
    job.finished(1, 5)
    job.tell(NodeSeen(NodeId("n0"), [job.sight(0, step, phase=phase, seconds=2.0)]))
    assert bool(job.all(EndJob)) is told
    if told:
        assert "rank 1 left the training loop after step 4 while the others went on" in job.end.diagnosis


def test_a_worker_killed_while_it_waits_for_the_others_to_finish_is_replaced() -> None:
    job = Job(2).trained(4)
    job.finished(0, 5)
    job.exited(job.of(0))
    job.halted(1, 5)
    job.ready(job.of(0))
    assert (form(job).step, form(job).holders) == (5, [1])
    job.joined()
    job.finished(0, 5)
    job.finished(1, 5)
    assert len(job.all(IncidentClosed)) == 1
    assert len(job.all(orders.ReleaseWorker)) == 2


def test_a_rank_that_leaves_the_loop_early_is_named() -> None:
    job = Job(2).trained(4)
    job.finished(1, 5)
    job.hung(0, 5)
    assert job.end.code == 1
    assert "rank 1 left the training loop after step 4" in job.end.diagnosis


def test_ranks_that_never_say_they_have_finished_are_asked_where_they_stand() -> None:
    job = Job(2).trained(4)
    job.finished(1, 5)
    job.wait()
    assert {halt.worker for halt in job.all(orders.HaltGeneration)} == {job.of(0), job.of(1)}


# --- before the first step ------------------------------------------------------------------------------------------


def test_a_script_error_before_the_first_step_is_not_tried_again() -> None:
    job = Job(2)
    job.tell(facts.WorkerFailed(job.of(1), OOM, StepNo(-1)))
    job.exited(job.of(1), 1)
    assert not job.all(EndJob), "another's death may yet turn out to be the cause"
    job.wait()
    assert job.end.code == 1
    assert "rank 1 failed before its first step" in job.end.diagnosis
    assert OOM.traceback in job.end.diagnosis


def test_a_script_error_before_the_first_step_is_tried_again_where_restarts_are_allowed() -> None:
    job = Job(2, max_restarts=1)
    for attempt in (1, 2):
        job.exited(job.of(1), 1)
        job.wait()
        if attempt == 1:
            job.exited(job.of(0))
            assert job.last(orders.SpawnWorker).restarts == 1
    assert job.end.code == 1


@pytest.mark.parametrize("signal", ["Killed", "Bus error"])
def test_an_error_before_the_first_step_of_a_loader_that_the_kernel_has_struck_is_tried_again(signal: str) -> None:
    told = "RuntimeError: DataLoader worker (pid {}) is killed by signal: {}. \n\nThe above exception was the cause"
    job = Job(2)
    for attempt in (1, 2, 3):
        error = ErrorReport("RuntimeError", "exited unexpectedly", told.format(attempt, signal), "line 9")
        job.tell(facts.WorkerFailed(job.of(1), error, StepNo(-1)))
        job.exited(job.of(1), 1)
        job.wait()
        if attempt < 3:
            assert f"rank 1: DataLoader worker (pid {attempt}) is killed by signal: {signal}" in job.last(Noted).text
            job.exited(job.of(0))
            assert job.last(orders.SpawnWorker).restarts == attempt
    assert job.end.code == 1, "a data set that is too large each time is the script's"


def test_an_error_of_the_script_behind_one_of_a_struck_loader_is_final() -> None:
    job = Job(2)
    killed = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "
    for attempt, text in enumerate((killed, "ValueError: no such column"), 1):
        job.tell(facts.WorkerFailed(job.of(1), ErrorReport("RuntimeError", "failed", text, "line 9"), StepNo(-1)))
        job.exited(job.of(1), 1)
        job.wait()
        if attempt == 1:
            job.exited(job.of(0))
            assert job.last(orders.SpawnWorker).restarts == 1
    assert job.end.code == 1
    assert job.last(orders.SpawnWorker).restarts == 1


def test_a_death_by_signal_explains_the_errors_of_its_peers() -> None:
    job = Job(2)
    job.exited(job.of(1), 1)
    job.exited(job.of(0), -9)
    assert not job.all(EndJob)
    assert "rank 0 was ended by SIGKILL" in job.last(Noted).text


def test_a_rank_that_ends_before_its_first_step_while_others_wait_for_it_is_named() -> None:
    job = Job(2)
    job.exited(job.of(1), 0)
    job.ready(job.of(0), 0)
    job.wait()
    assert job.end.code == 1
    assert "rank 1 exited with code 0 before its first step" in job.end.diagnosis


def fail(job: Job, rank: int) -> None:
    """A newcomer's script ends with an error of its own."""
    worker = job.of(rank)
    job.tell(facts.WorkerFailed(worker, OOM, StepNo(-1), own=True))
    job.exited(worker, 1)


def test_a_newcomer_whose_script_fails_is_one_failed_attempt_and_the_next_one_waits_longer_each_time() -> None:
    job = Job(2).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    pauses = []
    for _ in range(2):
        tried = len(job.all(orders.SpawnWorker))
        fail(job, 1)
        assert not job.all(EndJob) and len(job.all(orders.SpawnWorker)) == tried
        before = job.now
        job.wait()
        pauses.append(job.now - before)
        assert len(job.all(orders.SpawnWorker)) == tried + 1
    assert pauses == pytest.approx([1.0, 2.0], abs=0.05)
    job.ready(job.of(1))
    job.joined().stepped(5)
    assert job.machine.quiet and not job.all(EndJob)


def test_newcomers_that_only_fail_have_the_survivors_state_in_memory_and_on_disk_before_all_start_again() -> None:
    job = Job(2, durable=True, checkpoint_every=60.0).trained(4)
    survivor = job.of(0)
    job.exited(job.of(1))
    job.halted(0, 5)
    for _ in range(2):
        fail(job, 1)
        job.wait()
    fail(job, 1)
    assert job.last(KeepState) == KeepState(survivor, StepNo(5))
    job.tell(StateKept(survivor, StepNo(5)))
    assert not job.all(EndJob) and not job.all(orders.FenceWorker), "the healthy rank lives until its state is safe"
    assert job.last(TakeSnapshot) == TakeSnapshot(survivor, StepNo(5))
    job.tell(SnapshotHeld(survivor, StepNo(5), StepNo(5)))
    write = job.last(WriteCheckpoint)
    job.tell(PartsWritten(write.node, write.attempt, write.step, write.ranks, 1, 0.1))
    job.tell(CheckpointWritten(write.node, write.attempt, write.step, "folder", 1))
    assert not job.all(EndJob) and [order.worker for order in job.all(orders.FenceWorker)] == [survivor]
    assert OOM.message in job.all(Noted)[-1].text or "should replace rank 1" in job.all(Noted)[-1].text


def test_an_error_of_a_member_between_two_steps_ends_the_job_after_the_others_state_is_saved() -> None:
    job = Job(2, durable=True, checkpoint_every=60.0).trained(4)
    job.tell(facts.WorkerFailed(job.of(1), OOM, StepNo(5), own=True))
    job.exited(job.of(1), 1)
    assert not job.all(EndJob)
    job.halted(0, 5)
    job.tell(SnapshotHeld(job.of(0), StepNo(5), StepNo(5), error="no memory"))
    assert job.end.code == 1 and OOM.traceback in job.end.diagnosis


@pytest.mark.parametrize("kind", ["signal", "node"])
def test_a_job_that_was_asked_to_stop_is_never_started_again(kind: str) -> None:
    job = Job(2, durable=True, checkpoint_every=60.0).trained(4)
    job.tell(facts.StopRequested("SIGTERM", patience=30.0))
    if kind == "node":
        job.tell(facts.NodeLost(NodeId("n0"), "its agent has ended"))
    else:
        job.exited(job.of(0), -15)
        job.exited(job.of(1), -15)
        job.wait()
    spawned = [each for each in job.all(orders.SpawnWorker) if each.role is Role.RANK]
    assert len(spawned) == 2 and job.end.code == 75 and "SIGTERM" in job.end.diagnosis


# --- scripts without a session --------------------------------------------------------------------------------------


def test_a_killed_worker_of_a_script_without_a_session_has_all_started_again() -> None:
    job = Job(3)
    workers = [job.of(rank) for rank in job.ranks]
    job.exited(workers[1])
    assert {fence.worker for fence in job.all(orders.FenceWorker)} == {workers[0], workers[2]}
    job.exited(workers[0])
    assert len(job.all(orders.SpawnWorker)) == 3, "not beside one that may still run"
    job.exited(workers[2])
    assert [s.restarts for s in job.all(orders.SpawnWorker)[3:]] == [1, 1, 1]
    for rank in job.ranks:
        job.exited(job.of(rank), 0)
    assert job.end.code == 0


def test_restarts_of_a_script_without_a_session_are_limited_by_max_restarts() -> None:
    job = Job(1, max_restarts=1)
    job.exited(job.of(0))
    job.exited(job.of(0))
    assert job.end.code == 1
    assert "started again 1 times" in job.end.diagnosis


def test_workers_that_cannot_be_ended_end_the_job() -> None:
    job = Job(2)
    job.exited(job.of(1))
    job.wait()
    assert job.end.code == 75
    assert job.of(0) in job.end.diagnosis


# --- faults on demand -----------------------------------------------------------------------------------------------


def test_a_planned_fault_is_sent_again_until_it_has_fired_and_then_never() -> None:
    plan = FaultSpec("f1", Rank(1), step=StepNo(9))
    job = Job(2, faults=[plan])
    assert [s.faults for s in job.all(orders.SpawnWorker)] == [[], [plan]]
    job.trained(4)
    mend(job, 1, 5)
    assert {f.rank: f.faults for f in job.all(orders.FormGeneration)[-2:]} == {0: [], 1: [plan]}
    job.tell(facts.FaultFired(job.of(1), "f1", StepNo(9), job.now))
    job.tell(facts.FaultFired(job.of(1), "f1", StepNo(9), job.now))
    assert len(job.all(FaultInjected)) == 1
    mend(job, 1, 9)
    assert all(not f.faults for f in job.all(orders.FormGeneration)[-2:])


def test_a_fault_that_fired_is_known_even_where_the_exit_was_known_before() -> None:
    job = Job(2, faults=[FaultSpec("f1", Rank(1))]).trained(4)
    victim = job.of(1)
    job.exited(victim)
    job.tell(facts.FaultFired(victim, "f1", StepNo(5), job.now))
    assert job.last(FaultInjected).rank == 1
    job.halted(0, 5)
    job.ready(job.of(1))
    assert all(not f.faults for f in job.all(orders.FormGeneration)[-2:])


def test_an_incident_starts_when_the_fault_on_demand_struck() -> None:
    job = Job(2, faults=[FaultSpec("f1", Rank(1))]).trained(4)
    job.tell(facts.FaultFired(job.of(1), "f1", StepNo(5), job.now))
    struck = job.now - 0.01
    job.tell(facts.WorkerExited(job.of(1), -9, job.now + 0.3), after=0.4)
    job.halted(0, 5)
    job.ready(job.of(1))
    job.joined().stepped(5)
    assert job.last(IncidentClosed).fault_at == pytest.approx(struck)


def test_a_fault_that_somebody_asks_for_is_armed_at_once() -> None:
    job = Job(2).trained(4)
    job.tell(facts.FaultRequested(FaultSpec("now", Rank(1))))
    assert job.last(orders.ArmFault).worker == job.of(1)


def test_a_fault_for_a_rank_that_does_not_exist_is_noted() -> None:
    job = Job(2).trained(4)
    job.tell(facts.FaultRequested(FaultSpec("now", Rank(5))))
    assert "no rank 5" in job.last(Noted).text


@pytest.mark.parametrize("between", [True, False])
def test_a_fault_between_steps_is_refused_at_once_where_the_script_has_nothing_there(between: bool) -> None:
    job = Job(2)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, between=between)
    job.joined()
    said = job.tell(facts.FaultRequested(FaultSpec("f", Rank(1), stage=FaultStage.BETWEEN)))
    answers = [each for each in said if isinstance(each, AnswerScale)]
    assert [each.accepted for each in answers] == ([] if between else [False])
    assert all("@regrow.restartable" in each.reason for each in answers)
    assert bool([each for each in said if isinstance(each, orders.ArmFault)]) == between


@pytest.mark.parametrize("step", [None, StepNo(7)])
def test_a_fault_between_steps_that_does_not_strike_is_said_once(step: StepNo | None) -> None:
    job = Job(2)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, between=True)
    job.joined().stepped(5)
    job.tell(facts.FaultRequested(FaultSpec("f", Rank(1), stage=FaultStage.BETWEEN, step=step)))
    job.stepped(6).stepped(7)
    assert not job.all(Noted)
    job.now += 31.0
    job.stepped(8).stepped(9)
    assert ["has not struck" in note.text for note in job.all(Noted)] == [True]


def test_a_fault_between_steps_that_has_struck_is_not_missed() -> None:
    job = Job(2)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, between=True)
    job.joined().stepped(5)
    job.tell(facts.FaultRequested(FaultSpec("f", Rank(1), stage=FaultStage.BETWEEN)))
    job.tell(facts.FaultFired(job.of(1), "f", StepNo(6), job.now))
    job.now += 31.0
    job.stepped(6)
    assert not job.all(Noted)


# --- where a job starts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "sentence"),
    [(40, "training goes on from the checkpoint of step 40"), (0, "--resume found no complete checkpoint")],
)
def test_a_job_that_is_to_go_on_says_from_where(state: int, sentence: str) -> None:
    job = Job(2, durable=True, resume=True).built(state)
    assert [note.text for note in job.all(Noted) if note.text.startswith(sentence)]


def test_a_job_that_is_not_to_go_on_says_nothing_of_checkpoints() -> None:
    assert not Job(2, durable=True).built().all(Noted)


def test_a_rank_that_memory_does_not_suffice_for_twice_before_its_first_step_ends_the_job() -> None:
    job = Job(2)
    job.tell(facts.WorkerExited(job.of(1), -9, job.now, memory=True))
    assert [note.text for note in job.all(Noted) if "memory ran out" in note.text]
    job.exited(job.of(0))
    assert not job.all(EndJob), "the first one is tried again"
    job.tell(facts.WorkerExited(job.of(0), -9, job.now, memory=True))
    assert job.end.code == 1
    assert "rank 0 was ended by the kernel because memory ran out" in job.end.diagnosis
