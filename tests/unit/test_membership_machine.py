"""The coordinator's rules, one by one. `Job` plays agents and workers by hand, fact by fact."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from regrow.core.events import FaultInjected, GenerationFormed, IncidentClosed, IncidentOpened, Noted
from regrow.core.ids import NO_STATE, Generation, Instant, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import (
    ArmFault,
    ErrorReport,
    Fact,
    FaultFired,
    FaultKind,
    FaultRequested,
    FaultSpec,
    FenceWorker,
    FormGeneration,
    HaltGeneration,
    JobFacts,
    NodeJoined,
    NodeLost,
    NodeProgress,
    ReleaseWorker,
    Role,
    SpawnWorker,
    StartScript,
    StopRequested,
    TimeAdvanced,
    Warmth,
    WorkerCommitted,
    WorkerExited,
    WorkerFailed,
    WorkerFaulted,
    WorkerFinished,
    WorkerHalted,
    WorkerHung,
    WorkerReady,
    WorkerResumed,
    WorkerStarted,
)
from regrow.membership.machine import Command, EndJob, Membership

T = TypeVar("T")
OOM = ErrorReport("RuntimeError", "out of memory", "Traceback: train.py, line 7\nRuntimeError: out of memory", "line 7")


class Job:
    """A machine and what it said."""

    def __init__(
        self, world: int = 3, *, faults: list[FaultSpec] | None = None, nodes: int = 1, **changes: Any
    ) -> None:
        fields: dict[str, Any] = {
            "job": JobId("unit"),
            "nproc": world // nodes,
            "nodes": nodes,
            "standbys": 0,
            "warmth": Warmth.BUILT,
            "max_faults": 100,
            "window": 3600.0,
            "max_restarts": None,
            "durable": False,
        }
        self.now: Instant = 100.0
        self.machine = Membership(JobFacts(**{**fields, **changes}), faults or [])
        self.said: list[Command] = []
        for index in range(nodes):
            self.tell(NodeJoined(NodeId(f"n{index}"), "host", world // nodes, f"store{index}"))

    # --- facts

    def tell(self, fact: Fact, after: float = 0.01) -> list[Command]:
        self.now += after
        commands = self.machine.handle(fact, self.now)
        self.said += commands
        return commands

    def wait(self) -> list[Command]:
        deadline = self.machine.next_deadline()
        assert deadline is not None, "the machine waits for nothing"
        return self.tell(TimeAdvanced(), after=max(0.0, deadline - self.now))

    def of(self, rank: int) -> WorkerId:
        return self.machine.roster.places[Rank(rank)]

    def standby(self) -> WorkerId:
        return self.machine.roster.standbys()[0].worker

    def ready(self, worker: WorkerId, state: int = NO_STATE, layout: str = "same") -> list[Command]:
        return self.tell(WorkerReady(worker, StepNo(state), f"at {worker}", layout))

    def halted(self, rank: int, state: int, generation: Generation | None = None) -> list[Command]:
        return self.tell(WorkerHalted(self.of(rank), generation or self.machine.generation, StepNo(state)))

    def exited(self, worker: WorkerId, code: int = -9) -> list[Command]:
        return self.tell(WorkerExited(worker, code, self.now))

    def committed(self, rank: int, step: int) -> list[Command]:
        generation = self.machine.generation
        return self.tell(WorkerCommitted(self.of(rank), generation, StepNo(step), self.now, 0.1))

    def faulted(
        self, rank: int, step: int, error: ErrorReport = OOM, kind: FaultKind = FaultKind.BODY
    ) -> list[Command]:
        return self.tell(WorkerFaulted(self.of(rank), self.machine.generation, StepNo(step), kind, error))

    def hung(self, rank: int, step: int) -> list[Command]:
        return self.tell(WorkerHung(self.of(rank), self.machine.generation, StepNo(step), 30.0, 30.0, "a hang"))

    def finished(self, rank: int, state: int) -> list[Command]:
        return self.tell(WorkerFinished(self.of(rank), self.machine.generation, StepNo(state)))

    def resumed(self, rank: int) -> list[Command]:
        return self.tell(WorkerResumed(self.of(rank), self.machine.generation, 0.01, 0.02, 1000))

    # --- longer ways

    @property
    def ranks(self) -> range:
        return range(self.machine.facts.world)

    def built(self, state: int = 0) -> "Job":
        for rank in self.ranks:
            self.ready(self.of(rank), state)
        return self

    def joined(self) -> "Job":
        for rank in self.ranks:
            self.resumed(rank)
        return self

    def trained(self, step: int = 0) -> "Job":
        """Built, joined, and `step` committed by all."""
        self.built().joined()
        return self.stepped(step)

    def stepped(self, step: int) -> "Job":
        for rank in self.ranks:
            self.committed(rank, step)
        return self

    # --- what it said

    def all(self, kind: type[T]) -> list[T]:
        return [command for command in self.said if isinstance(command, kind)]

    def last(self, kind: type[T]) -> T:
        return self.all(kind)[-1]

    @property
    def end(self) -> EndJob:
        ends = self.all(EndJob)
        assert len(ends) == 1, f"the job has ended {len(ends)} times"
        return ends[0]


def form(job: Job) -> FormGeneration:
    return job.last(FormGeneration)


# --- starting ----------------------------------------------------------------------------------------------------


def test_workers_are_started_when_all_nodes_have_registered() -> None:
    job = Job(4, nodes=2)
    spawned = job.all(SpawnWorker)
    assert [(s.node, s.rank, s.local_rank) for s in spawned] == [("n0", 0, 0), ("n0", 1, 1), ("n1", 2, 0), ("n1", 3, 1)]
    assert {s.store for s in spawned} == {"store0"}


def test_the_first_generation_is_formed_when_the_last_worker_is_ready() -> None:
    job = Job(3)
    job.ready(job.of(0), 0)
    job.ready(job.of(2), 0)
    assert not job.all(FormGeneration)
    job.ready(job.of(1), 0)
    assert [f.rank for f in job.all(FormGeneration)] == [0, 1, 2]
    assert (form(job).generation, form(job).step, form(job).holders) == (1, 0, [0, 1, 2])


def test_a_worker_that_built_another_model_ends_the_job() -> None:
    job = Job(2)
    job.ready(job.of(0), 0)
    job.ready(job.of(1), 0, layout="other")
    assert job.end.code == 1
    assert "rank 1" in job.end.diagnosis and "differs" in job.end.diagnosis


def test_standbys_are_started_when_training_has_begun() -> None:
    job = Job(2, standbys=2)
    assert all(s.role is Role.RANK for s in job.all(SpawnWorker))
    job.built().joined()
    assert [s.role for s in job.all(SpawnWorker)][2:] == [Role.STANDBY, Role.STANDBY]


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


# --- the rungs ---------------------------------------------------------------------------------------------------


def test_an_exception_in_the_body_is_tried_again_in_place() -> None:
    job = Job(3).trained(0)
    before = dict(job.machine.roster.places)
    job.faulted(1, step=1)
    assert [h.worker for h in job.all(HaltGeneration)] == list(before.values())
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
    assert (job.last(SpawnWorker).role, job.last(SpawnWorker).rank) == (Role.JOINER, 1)
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
    spawned = len(job.all(SpawnWorker))
    job.exited(job.of(1))
    assert job.of(1) == standby
    assert len(job.all(SpawnWorker)) == spawned
    job.halted(0, 5)
    job.halted(2, 5)
    assert {m.rank: m.worker for m in form(job).members}[Rank(1)] == standby
    job.joined().stepped(5)
    assert job.last(IncidentClosed).rung == "standby"
    assert job.last(SpawnWorker).role is Role.STANDBY, "and it is replaced in turn"


def test_an_imports_standby_is_told_to_run_the_script_for_its_rank() -> None:
    job = Job(2, standbys=1, warmth=Warmth.IMPORTS).trained()
    standby = job.standby()
    job.tell(WorkerReady(standby, NO_STATE, "", ""))
    job.exited(job.of(0))
    assert (job.last(StartScript).worker, job.last(StartScript).rank) == (standby, 0)
    job.tell(WorkerReady(standby, NO_STATE, "", ""))
    assert len(job.all(StartScript)) == 1, "told once, even where its readiness is told twice"
    job.halted(1, 1)
    job.ready(standby)
    assert form(job).holders == [1]


def test_an_imports_standby_that_is_needed_before_it_is_idle_runs_the_script_at_once() -> None:
    job = Job(2, standbys=1, warmth=Warmth.IMPORTS).trained()
    job.exited(job.of(0))
    assert not job.all(StartScript)
    job.tell(WorkerReady(job.of(0), NO_STATE, "", ""))
    assert job.last(StartScript).worker == job.of(0)


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
    for fence in job.all(FenceWorker):
        job.exited(fence.worker)
    assert [(s.role, s.resume, s.restarts) for s in job.all(SpawnWorker)[-2:]] == [(Role.RANK, True, 1)] * 2
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
    for fence in job.all(FenceWorker):
        job.exited(fence.worker)
    job.built().joined().stepped(0)
    assert job.last(IncidentClosed).rung == "restart"


# --- symptoms and causes -----------------------------------------------------------------------------------------


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
    job.tell(WorkerExited(job.of(1), -9, job.now - 0.5), after=0.0)
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


# --- what is stale, late, or never comes -------------------------------------------------------------------------


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


def test_who_does_not_answer_the_halt_is_fenced_and_replaced() -> None:
    job = Job(3).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    job.ready(job.of(1))
    silent = job.of(2)
    job.wait()
    assert (job.last(FenceWorker).worker, job.last(FenceWorker).dump_stacks) == (silent, True)
    assert job.of(2) != silent
    job.ready(job.of(2))
    assert form(job).holders == [0]
    assert silent not in {m.worker for m in form(job).members}


def test_who_was_fenced_is_not_heard_any_more() -> None:
    job = Job(2).trained(4)
    hung = job.of(1)
    job.hung(1, 5)
    assert job.last(FenceWorker).worker == hung
    job.tell(WorkerHalted(hung, Generation(1), StepNo(5)))
    job.halted(0, 5)
    job.ready(job.of(1))
    assert form(job).holders == [0]
    job.exited(hung)
    assert len(job.all(IncidentOpened)) == 1


def test_a_worker_that_hangs_while_groups_form_is_found_by_the_halt_that_follows() -> None:
    job = Job(3).built()
    job.wait()
    assert not job.all(FenceWorker), "all of them are late, and only one is at fault"
    job.halted(0, 0)
    job.halted(2, 0)
    culprit = job.of(1)
    job.wait()
    assert [fence.worker for fence in job.all(FenceWorker)] == [culprit]


def test_who_alone_does_not_reach_its_new_groups_is_fenced() -> None:
    job = Job(3).built()
    job.resumed(0)
    job.resumed(2)
    late = job.of(1)
    job.wait()
    assert [fence.worker for fence in job.all(FenceWorker)] == [late]


def test_a_joiner_that_is_never_ready_is_fenced_and_another_forked() -> None:
    job = Job(2).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    joiner = job.of(1)
    job.tell(WorkerStarted(joiner, 7))
    job.wait()
    assert job.last(FenceWorker).worker == joiner
    assert job.of(1) != joiner


def test_a_rank_that_is_never_ready_while_others_are_has_all_started_again() -> None:
    job = Job(2)
    for rank in job.ranks:
        job.tell(WorkerStarted(job.of(rank), 7))
    assert job.machine.next_deadline() is None, "a script without a session may run for days"
    job.ready(job.of(0), 0)
    job.wait()
    assert {fence.worker for fence in job.all(FenceWorker)} == {job.of(0), job.of(1)}


def test_a_worker_that_was_never_started_does_not_hold_the_job_up_for_ever() -> None:
    job = Job(2)
    job.tell(WorkerStarted(job.of(0), 7))
    job.wait()
    job.wait()
    assert job.end.code == 75
    assert "could not be ended" in job.end.diagnosis


def test_a_standby_that_is_never_ready_is_replaced() -> None:
    job = Job(2, standbys=1).trained()
    slow = job.standby()
    job.wait()
    assert job.last(FenceWorker).worker == slow
    assert job.standby() != slow


def test_a_commit_says_that_a_worker_has_resumed_even_where_that_was_lost() -> None:
    job = Job(2).built()
    job.resumed(0)
    job.committed(1, 0)
    assert len(job.all(GenerationFormed)) == 1


def test_progress_of_a_node_tells_the_newest_step() -> None:
    job = Job(2).trained(0)
    commits = [WorkerCommitted(job.of(r), Generation(1), StepNo(7), job.now, 0.1) for r in job.ranks]
    job.tell(NodeProgress(NodeId("n0"), commits))
    assert (job.machine.step, job.machine.snapshot().ranks[0].state_at) == (8, 8)
    job.tell(NodeProgress(NodeId("n0"), [WorkerCommitted(job.of(0), Generation(1), StepNo(3), job.now, 0.1)]))
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


# --- budgets and ends --------------------------------------------------------------------------------------------


def mend(job: Job, rank: int, step: int) -> None:
    job.exited(job.of(rank))
    if job.all(EndJob):
        return
    for other in job.ranks:
        if other != rank:
            job.halted(other, step)
    job.ready(job.of(rank))
    job.joined().stepped(step)


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
    job.tell(StopRequested("SIGTERM"))
    assert (job.end.code, job.end.diagnosis) == (75, "stopped at step 5: SIGTERM")
    assert job.machine.handle(TimeAdvanced(), job.now) == []


def test_a_lost_node_ends_the_job_to_be_run_again() -> None:
    job = Job(2).trained(4)
    job.tell(NodeLost(NodeId("n0"), "its connection ended"))
    assert job.end.code == 75
    assert "n0" in job.end.diagnosis


def test_a_job_whose_workers_have_all_finished_is_released_and_ends_well() -> None:
    job = Job(2, standbys=1).trained(4)
    standby = job.standby()
    job.finished(0, 5)
    assert not job.all(ReleaseWorker), "the other may still need its state"
    job.finished(1, 5)
    assert [r.worker for r in job.all(ReleaseWorker)] == [job.of(0), job.of(1)]
    assert job.last(FenceWorker).worker == standby
    job.exited(job.of(0), 0)
    job.exited(job.of(1), 0)
    assert (job.end.code, job.end.diagnosis) == (0, "")


def test_the_release_is_repeated_until_the_worker_has_gone() -> None:
    job = Job(2).trained(4)
    job.finished(0, 5)
    job.finished(1, 5)
    job.exited(job.of(0), 0)
    assert [command.worker for command in job.wait() if isinstance(command, ReleaseWorker)] == [job.of(1)]


def test_a_worker_that_stays_long_after_all_others_have_gone_ends_the_job() -> None:
    job = Job(2, build_deadline=90.0).trained(4)
    job.finished(0, 5)
    job.finished(1, 5)
    job.exited(job.of(0), 0)
    for _ in range(5):
        job.wait()
    assert job.end.code == 75
    assert "rank 1" in job.end.diagnosis


def test_an_error_after_the_last_step_is_the_scripts_own() -> None:
    job = Job(2).trained(4)
    job.finished(0, 5)
    job.finished(1, 5)
    job.tell(WorkerFailed(job.of(1), OOM, StepNo(5)))
    job.exited(job.of(1), 1)
    assert job.end.code == 1
    assert OOM.traceback in job.end.diagnosis


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
    assert len(job.all(ReleaseWorker)) == 2


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
    assert {halt.worker for halt in job.all(HaltGeneration)} == {job.of(0), job.of(1)}


# --- before the first step ---------------------------------------------------------------------------------------


def test_a_script_error_before_the_first_step_is_not_tried_again() -> None:
    job = Job(2)
    job.tell(WorkerFailed(job.of(1), OOM, StepNo(-1)))
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
            assert job.last(SpawnWorker).restarts == 1
    assert job.end.code == 1


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


def test_a_joiner_that_fails_the_same_way_twice_ends_the_job() -> None:
    job = Job(2).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    for _ in range(2):
        job.tell(WorkerFailed(job.of(1), OOM, StepNo(-1)))
        job.exited(job.of(1), 1)
    assert job.end.code == 1
    assert OOM.traceback in job.end.diagnosis


# --- scripts without a session -----------------------------------------------------------------------------------


def test_a_killed_worker_of_a_script_without_a_session_has_all_started_again() -> None:
    job = Job(3)
    workers = [job.of(rank) for rank in job.ranks]
    job.exited(workers[1])
    assert {fence.worker for fence in job.all(FenceWorker)} == {workers[0], workers[2]}
    job.exited(workers[0])
    assert len(job.all(SpawnWorker)) == 3, "not beside one that may still run"
    job.exited(workers[2])
    assert [s.restarts for s in job.all(SpawnWorker)[3:]] == [1, 1, 1]
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


# --- faults on demand --------------------------------------------------------------------------------------------


def test_a_planned_fault_is_sent_again_until_it_has_fired_and_then_never() -> None:
    plan = FaultSpec("f1", Rank(1), step=StepNo(9))
    job = Job(2, faults=[plan])
    assert [s.faults for s in job.all(SpawnWorker)] == [[], [plan]]
    job.trained(4)
    mend(job, 1, 5)
    assert {f.rank: f.faults for f in job.all(FormGeneration)[-2:]} == {0: [], 1: [plan]}
    job.tell(FaultFired(job.of(1), "f1", StepNo(9), job.now))
    job.tell(FaultFired(job.of(1), "f1", StepNo(9), job.now))
    assert len(job.all(FaultInjected)) == 1
    mend(job, 1, 9)
    assert all(not f.faults for f in job.all(FormGeneration)[-2:])


def test_a_fault_that_fired_is_known_even_where_the_exit_was_known_before() -> None:
    job = Job(2, faults=[FaultSpec("f1", Rank(1))]).trained(4)
    victim = job.of(1)
    job.exited(victim)
    job.tell(FaultFired(victim, "f1", StepNo(5), job.now))
    assert job.last(FaultInjected).rank == 1
    job.halted(0, 5)
    job.ready(job.of(1))
    assert all(not f.faults for f in job.all(FormGeneration)[-2:])


def test_an_incident_starts_when_the_fault_on_demand_struck() -> None:
    job = Job(2, faults=[FaultSpec("f1", Rank(1))]).trained(4)
    job.tell(FaultFired(job.of(1), "f1", StepNo(5), job.now))
    struck = job.now - 0.01
    job.tell(WorkerExited(job.of(1), -9, job.now + 0.3), after=0.4)
    job.halted(0, 5)
    job.ready(job.of(1))
    job.joined().stepped(5)
    assert job.last(IncidentClosed).fault_at == pytest.approx(struck)


def test_a_fault_that_somebody_asks_for_is_armed_at_once() -> None:
    job = Job(2).trained(4)
    job.tell(FaultRequested(FaultSpec("now", Rank(1))))
    assert job.last(ArmFault).worker == job.of(1)


def test_a_fault_for_a_rank_that_does_not_exist_is_noted() -> None:
    job = Job(2).trained(4)
    job.tell(FaultRequested(FaultSpec("now", Rank(5))))
    assert "no rank 5" in job.last(Noted).text


# --- repetition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "again",
    [
        lambda job: job.resumed(0),
        lambda job: job.ready(job.of(0), 0),
        lambda job: job.committed(0, 4),
        lambda job: job.tell(WorkerStarted(job.of(0), 7)),
        lambda job: job.tell(NodeJoined(NodeId("n0"), "host", 2, "store0")),
        lambda job: job.tell(TimeAdvanced()),
    ],
)
def test_a_fact_told_again_changes_nothing(again: Callable[[Job], list[Command]]) -> None:
    job = Job(2).trained(4)
    before = job.machine.snapshot()
    assert again(job) == []
    assert job.machine.snapshot() == before or job.machine.snapshot().ranks[0].pid == 7


# --- size --------------------------------------------------------------------------------------------------------


def test_an_incident_of_4000_ranks_takes_no_time_that_grows_with_its_square() -> None:
    job = Job(4000, nodes=500, standbys=1).trained(0)
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
