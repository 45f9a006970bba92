"""The rung `all`: no newcomer is equal, or none can be built, and all workers start again with the state in memory."""

import pytest
from tests.unit.membership.membership_job import OOM, Job

from regrow.core.ids import NO_STATE, NodeId, Rank, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.checkpoints import CheckpointWritten, PartsWritten, SnapshotHeld, WriteCheckpoint
from regrow.core.messages.copies import CopiesHeld, ForgetCopies, KeepState, KeptCopy, StateKept, TakeSnapshot
from regrow.core.messages.replacements import ReplacementRefuted
from regrow.core.messages.vocabulary import Role
from regrow.core.records import IncidentClosed
from regrow.membership.machine import EndJob
from regrow.membership.states import Building, Mending, Restarting


def refuted(job: Job, *, alone: bool = False) -> Job:
    job.tell(ReplacementRefuted(job.of(0), job.machine.generation, Rank(1), StepNo(1), "a set-up that differs", alone))
    return job


def kept(job: Job, step: int, error: str = "") -> None:
    order = job.last(KeepState)
    assert order.step == step
    job.tell(StateKept(order.worker, order.step, error))


def gone(job: Job) -> None:
    """Everybody who was fenced has ended."""
    for worker in list(job.machine.roster.workers.values()):
        if worker.stage == "fenced":
            job.exited(worker.worker)


def report(job: Job, *held: tuple[str, int, int]) -> None:
    """Report the copies of the nodes: node, rank, step."""
    for node in job.machine.roster.living_nodes():
        copies = [KeptCopy(Rank(rank), "", StepNo(step)) for where, rank, step in held if where == node.node]
        job.tell(CopiesHeld(node.node, job.machine.generation, copies))


def restart(job: Job, step: int, *, node: str = "n0", rank: int = 0) -> None:
    gone(job)
    report(job, (node, rank, step))
    for each in job.ranks:
        job.ready(job.of(each), NO_STATE)


def test_a_lost_rank_of_a_refuted_job_has_all_started_again_with_the_survivors_state() -> None:
    job = refuted(Job(3).trained(4))
    job.exited(job.of(1))
    job.halted(0, 5)
    assert not job.all(KeepState)
    job.halted(2, 5)
    assert [order.worker for order in job.all(KeepState)] == [job.of(0)], "one for all with the same part on a node"
    assert not job.all(orders.FenceWorker)
    kept(job, 5)
    assert isinstance(job.machine.state, Restarting)
    gone(job)
    spawned = job.all(orders.SpawnWorker)[-3:]
    assert [(each.role, each.restored, each.resume) for each in spawned] == [(Role.RANK, True, False)] * 3
    report(job, ("n0", 0, 5))
    for rank in job.ranks:
        job.ready(job.of(rank), NO_STATE)
    forms = job.all(orders.FormGeneration)[-3:]
    assert {(each.step, each.restore.rank if each.restore else None) for each in forms} == {(5, 0)}
    job.joined().stepped(5)
    closed = job.last(IncidentClosed)
    assert (closed.rung, closed.steps_lost) == ("all", 0)
    assert [order.node for order in job.all(ForgetCopies)] == ["n0"]


def test_standbys_of_a_refuted_job_are_released_and_none_are_started() -> None:
    job = Job(2, standbys=1).trained(0)
    job.ready(job.standby())
    standby = job.standby()
    refuted(job)
    assert job.last(orders.FenceWorker).worker == standby
    before = len(job.all(orders.SpawnWorker))
    job.exited(standby)
    job.stepped(1)
    assert len(job.all(orders.SpawnWorker)) == before


def test_a_survivor_that_has_no_memory_is_replaced_by_another_and_a_death_meanwhile_too() -> None:
    job = refuted(Job(4).trained(4))
    job.exited(job.of(1))
    for rank in (0, 2, 3):
        job.halted(rank, 5)
    kept(job, 5, error="no memory")
    assert job.last(KeepState).worker == job.of(2)
    job.exited(job.of(2))
    assert job.last(KeepState).worker == job.of(3)
    kept(job, 5)
    restart(job, 5, rank=3)
    assert job.last(orders.FormGeneration).step == 5


def test_where_nobody_has_memory_the_next_rung_is_climbed() -> None:
    job = refuted(Job(2, durable=True).trained(4))
    job.exited(job.of(1))
    job.halted(0, 5)
    kept(job, 5, error="no memory")
    gone(job)
    assert job.last(orders.SpawnWorker).resume and not job.last(orders.SpawnWorker).restored
    alone = refuted(Job(2).trained(4))
    alone.exited(alone.of(1))
    alone.halted(0, 5)
    alone.wait()
    assert alone.end.code == 1


def test_all_start_again_from_the_disk_if_its_state_is_newer_than_the_copies_in_memory() -> None:
    job = refuted(Job(2, durable=True, checkpoint_every=600.0, buddy_every=4).trained(5))
    report(job, ("n0", 0, 4))
    job.exited(job.of(1))
    job.halted(0, 6)
    report(job, ("n0", 0, 4))
    kept(job, 6, error="no memory")
    order = job.last(TakeSnapshot)
    assert order.step == 6
    job.tell(SnapshotHeld(job.of(0), StepNo(6), StepNo(6)))
    write = job.last(WriteCheckpoint)
    job.tell(PartsWritten(write.node, write.attempt, write.step, write.ranks, 1, 0.1))
    job.tell(CheckpointWritten(write.node, write.attempt, write.step, "folder", 1))
    gone(job)
    assert job.last(orders.SpawnWorker).resume and not job.last(orders.SpawnWorker).restored


def test_a_copy_that_is_lost_with_its_node_while_all_build_leaves_the_other_nodes() -> None:
    job = refuted(Job(4, nodes=2).trained(4))
    job.exited(job.of(1))
    for rank in (0, 2, 3):
        job.halted(rank, 5)
    assert {order.worker for order in job.all(KeepState)} == {job.of(0), job.of(2)}
    for order in job.all(KeepState):
        job.tell(StateKept(order.worker, order.step))
    gone(job)
    assert isinstance(job.machine.state, Building)
    job.tell(facts.NodeLost(NodeId("n0"), "power"))
    gone(job)
    job.tell(facts.NodeJoined(NodeId("n0"), "host", 2, "another"))
    restart(job, 5, node="n1", rank=2)
    assert job.last(orders.FormGeneration).step == 5 and not job.end_codes


def test_refuted_while_a_newcomer_builds_it_is_not_used() -> None:
    job = Job(2).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    newcomer = job.of(1)
    refuted(job)
    assert job.last(orders.FenceWorker).worker == newcomer
    kept(job, 5)
    restart(job, 5)
    job.joined().stepped(5)
    assert job.last(IncidentClosed).rung == "all"


@pytest.mark.parametrize("committed", [False, True])
def test_a_newcomer_that_is_refuted_before_it_has_committed_is_taken_out_and_later_the_result_is_in_doubt(
    committed: bool,
) -> None:
    job = Job(2).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    newcomer = job.of(1)
    job.ready(newcomer)
    job.joined()
    if committed:
        job.stepped(5)
    job.tell(ReplacementRefuted(newcomer, job.machine.generation, Rank(1), StepNo(5), "its loss differs"))
    assert isinstance(job.machine.state, Mending) is not committed
    if committed:
        for rank in job.ranks:
            job.finished(rank, 6)
        for rank in job.ranks:
            job.exited(job.of(rank), 0)
        assert job.end.code == 76 and "its loss differs" in job.end.diagnosis


def test_newcomers_that_only_fail_have_all_started_again_and_then_it_is_the_scripts_error() -> None:
    job = Job(2, verdict_grace=0.5).trained(4)
    job.exited(job.of(1))
    job.halted(0, 5)
    for last in (False, False, True):
        worker = job.of(1)
        job.tell(facts.WorkerFailed(worker, OOM, NO_STATE, own=True))
        job.exited(worker, 1)
        if not last:
            job.wait()
    kept(job, 5)
    gone(job)
    for _ in range(3):
        assert not job.end_codes
        for rank in job.ranks:
            job.tell(facts.WorkerFailed(job.of(rank), OOM, NO_STATE, own=True))
            job.exited(job.of(rank), 1)
        job.wait()
        gone(job)
    assert job.end.code == 1 and OOM.traceback in job.end.diagnosis


@pytest.mark.parametrize("when", ["ending", "building"])
def test_a_stop_while_all_start_again_from_memory_waits_until_the_state_is_on_disk(when: str) -> None:
    job = refuted(Job(2, durable=True, checkpoint_every=600.0).trained(4))
    job.exited(job.of(1))
    job.halted(0, 5)
    kept(job, 5)
    if when == "building":
        gone(job)
    job.tell(facts.StopRequested("SIGTERM", patience=60.0))
    assert not job.all(EndJob), "the agents' memory has the only copy"
    restart(job, 5)
    job.joined()
    assert job.last(TakeSnapshot).step >= 5
    job.tell(facts.TimeAdvanced(), after=61.0)
    assert (job.end.code, "SIGTERM" in job.end.diagnosis) == (75, True)


def test_a_stop_while_all_start_again_where_nothing_is_written_ends_at_once() -> None:
    job = refuted(Job(2).trained(4))
    job.exited(job.of(1))
    job.halted(0, 5)
    kept(job, 5)
    job.tell(facts.StopRequested("SIGTERM", patience=60.0))
    assert job.end.code == 75
