"""A world that shrinks, for a request or a fault, and changes that do not go as planned, fact by fact."""

import pytest
from tests.unit.membership.elastic_job import (
    candidates,
    comes,
    drain,
    elastic,
    lose,
    phase,
    planned,
    scale,
    shrunk,
    stop,
    two_nodes,
)
from tests.unit.membership.membership_job import Job, form

from regrow.core.ids import NO_STATE, Generation, NodeId, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.checkpoints import (
    CheckpointWritten,
    FinishCheckpoint,
    PartsWritten,
    SnapshotHeld,
    WriteCheckpoint,
)
from regrow.core.messages.copies import TakeSnapshot
from regrow.core.messages.observations import NodeSeen, WorkerObservation
from regrow.core.messages.vocabulary import Role
from regrow.core.phase import Phase
from regrow.core.records import IncidentClosed, IncidentOpened, Noted, WorldChanged
from regrow.membership.machine import EndJob

# --- shrinking --------------------------------------------------------------------------------------------------------


def test_the_highest_replicas_stop_with_the_others_and_leave() -> None:
    job = elastic(4)
    stays, leaves = [job.of(0), job.of(1)], {job.of(2), job.of(3)}
    scale(job, 2)
    at = planned(job)
    stop(job)
    assert {release.worker for release in job.all(orders.ReleaseWorker)} == leaves
    made = form(job)
    assert ([member.worker for member in made.members], made.step, made.holders) == (stays, at, [0, 1])
    job.joined().stepped(at)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.rung, closed.before, closed.after, closed.steps_lost) == ("shrink", "shrink", 4, 2, 0)
    for worker in leaves:
        job.exited(worker, 0)
    assert len(job.all(IncidentOpened)) == 1, "their end is no fault"


def test_whole_replicas_leave() -> None:
    job = elastic(6, unit=2, max_replicas=3)
    scale(job, 2)
    leaves = {job.of(4), job.of(5)}
    stop(job)
    assert {release.worker for release in job.all(orders.ReleaseWorker)} == leaves


def test_a_leaver_that_dies_before_it_leaves_is_just_gone() -> None:
    job = elastic(3)
    scale(job, 2)
    job.exited(job.of(1))
    spawned = len(job.all(orders.SpawnWorker))
    last = job.of(2)
    job.halted(0, 6)
    job.halted(2, 6)
    assert [member.worker for member in form(job).members] == [job.of(0), last]
    assert len(job.all(orders.SpawnWorker)) == spawned, "nobody is started in its place"
    assert job.last(WorldChanged).after == 2


def test_who_alone_has_the_newest_state_does_not_leave() -> None:
    job = elastic(3, sizes=[1, 3])
    scale(job, 1)
    ahead = job.of(2)
    job.exited(job.of(0))
    job.halted(1, 5)
    job.halted(2, 6)
    assert [member.worker for member in form(job).members] == [ahead], "though it is the highest rank"
    assert form(job).step == 6


def test_a_leaver_that_does_not_end_is_fenced() -> None:
    job = elastic(2, leave_deadline=30.0)
    leaver = job.of(1)
    shrunk(job, 1)
    job.wait()
    assert job.last(orders.FenceWorker).worker == leaver
    job.exited(leaver)
    assert len(job.all(IncidentOpened)) == 1


def sights(
    job: Job, leaver: WorkerId, until: float, *, used: float = 0.0, busy: bool = False, every: float = 5.0
) -> bool:
    """Let its agent look at it again and again, while it uses `used` of a processor a look; True if it is ended."""
    total = 7.0  # of what it did before it was released
    while job.now < until:
        job.now += every
        total += used
        sight = WorkerObservation(leaver, Generation(1), StepNo(6), 0, Phase.OUTSIDE, 1.0, busy=busy, used=total)
        job.tell(NodeSeen(NodeId("n0"), [sight]))
        job.tell(facts.TimeAdvanced())
        if any(each.worker == leaver for each in job.all(orders.FenceWorker)):
            return True
    return False


@pytest.mark.parametrize(
    ("used", "busy", "ended_after"),
    [
        (0.0, False, 30.0),  # it waits for something
        (0.01, False, 30.0),  # a thread of a library looks at something now and then
        (0.1, False, 1500.0),  # it gets a fiftieth of a processor
        (0.0, True, None),  # it waits for a processor, or a disk, all the time
        (5.0, True, 30.0),  # it never ends
    ],
)
def test_a_leaver_is_ended_for_being_idle_or_for_its_own_processors_time_and_not_by_the_clock(
    used: float, busy: bool, ended_after: float | None
) -> None:
    job = elastic(2, leave_deadline=30.0)
    leaver = job.of(1)
    shrunk(job, 1)
    since = job.now
    ended = sights(job, leaver, since + 3000.0, used=used, busy=busy)
    assert ended is (ended_after is not None)
    if ended_after is not None:
        assert ended_after <= job.now - since <= 1.1 * ended_after + 6.0
    job.exited(leaver)
    assert len(job.all(IncidentOpened)) == 1


def test_one_leaver_that_computes_does_not_keep_another_one_that_is_idle() -> None:
    job = elastic(3, leave_deadline=30.0)
    busy, idle = job.of(1), job.of(2)
    shrunk(job, 1)
    sights(job, busy, job.now + 60.0, used=0.1)
    fenced = {each.worker for each in job.all(orders.FenceWorker)}
    assert fenced == {idle}


def test_a_slot_is_free_again_when_its_leaver_has_ended() -> None:
    job = elastic(2, slots=2, max_replicas=2)
    leaver = job.of(1)
    shrunk(job, 1)
    assert scale(job, 2).accepted
    assert not candidates(job)
    job.exited(leaver, 0)
    assert len(candidates(job)) == 1


# --- faults that nobody can fill --------------------------------------------------------------------------------------


def test_a_lost_node_is_done_without_and_grown_back_when_it_comes() -> None:
    job = two_nodes()
    lose(job, "n1")
    job.halted(0, 6)
    job.halted(1, 6)
    assert [member.node for member in form(job).members] == ["n0", "n0"]
    changed = job.last(WorldChanged)
    assert (changed.kind, changed.before, changed.after) == ("fault", 4, 2)
    job.joined().stepped(6)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.rung, closed.before, closed.after) == ("node", "shrink", 4, 2)
    comes(job, "n1", 2)
    for worker in candidates(job):
        job.ready(worker, NO_STATE)
    stop(job)
    assert [member.node for member in form(job).members] == ["n0", "n0", "n1", "n1"]


def test_another_node_takes_the_place_of_a_lost_one_up_to_the_number_wanted() -> None:
    job = two_nodes(max_replicas=8)
    lose(job, "n1")
    job.halted(0, 6)
    job.halted(1, 6)
    job.joined().stepped(6)
    comes(job, "n2", 2)
    assert (job.machine.snapshot().wanted, len(candidates(job))) == (4, 2)
    comes(job, "n1", 2)
    assert (job.machine.snapshot().wanted, len(candidates(job))) == (4, 2)


def test_a_spare_node_takes_lost_ranks_at_once() -> None:
    job = two_nodes(min_replicas=4)
    comes(job, "n2", 2)
    lose(job, "n1")
    assert [(spawn.node, spawn.rank, spawn.local_rank) for spawn in job.all(orders.SpawnWorker)[-2:]] == [
        ("n2", 2, 0),
        ("n2", 3, 1),
    ]
    job.halted(0, 6)
    job.halted(1, 6)
    job.ready(job.of(2))
    job.ready(job.of(3))
    assert form(job).stores == ["store0", "store of n2"], "keys live where ranks do"
    job.joined().stepped(6)
    assert job.last(IncidentClosed).rung == "node"


def test_a_rank_whose_newcomers_keep_dying_is_done_without() -> None:
    job = elastic(3, slots=3)
    job.exited(job.of(2))
    job.halted(0, 6)
    job.halted(1, 6)
    for _ in range(3):
        assert len(form(job).members) == 3
        job.exited(job.of(2), 1)
    assert len(form(job).members) == 2
    assert job.last(WorldChanged).kind == "fault"


def test_below_the_minimum_the_survivors_wait_with_their_state_and_go_on_when_there_is_room() -> None:
    job = two_nodes(min_replicas=3)
    lose(job, "n1")
    job.halted(0, 6)
    job.halted(1, 6)
    assert phase(job) == "waiting"
    assert any("ranks 2, 3 wait for it to come back" in note.text for note in job.all(Noted))
    assert not job.all(orders.FenceWorker)
    comes(job, "n2", 2)
    assert phase(job) == "mending"
    job.ready(job.of(2))
    job.ready(job.of(3))
    assert (len(form(job).members), form(job).step) == (4, 6)


def test_a_job_that_has_waited_for_too_long_saves_its_state_and_ends_to_be_run_again() -> None:
    job = two_nodes(min_replicas=3, durable=True, checkpoint_every=1e6, node_deadline=60.0)
    lose(job, "n1")
    job.halted(0, 5)
    job.halted(1, 6)
    job.wait()
    assert job.last(TakeSnapshot) == TakeSnapshot(job.of(1), StepNo(6)), "who has the newest state"
    job.tell(SnapshotHeld(job.of(1), StepNo(6), StepNo(6)))
    write = job.last(WriteCheckpoint)
    assert (write.node, write.step, write.ranks) == ("n0", 6, [1])
    job.tell(PartsWritten(write.node, write.attempt, write.step, write.ranks, 10, 0.1))
    finish = job.last(FinishCheckpoint)
    assert not job.all(EndJob)
    job.tell(CheckpointWritten(finish.node, finish.attempt, finish.step, "folder", 10))
    assert job.end.code == 75
    assert "n1 was lost and did not come back within 60 s" in job.end.diagnosis


def test_room_that_comes_while_the_state_is_saved_is_used() -> None:
    job = two_nodes(min_replicas=3, durable=True, checkpoint_every=1e6, node_deadline=60.0)
    lose(job, "n1")
    job.halted(0, 6)
    job.halted(1, 6)
    job.wait()
    comes(job, "n1", 2)
    assert phase(job) == "mending"
    job.tell(SnapshotHeld(job.of(0), StepNo(6), StepNo(6)))
    job.ready(job.of(2))
    job.ready(job.of(3))
    job.joined().stepped(6)
    assert not job.all(EndJob)


def test_a_restart_takes_the_nodes_that_are_left() -> None:
    job = two_nodes(durable=True)
    lose(job, "n1")
    lose(job, "n0")
    comes(job, "n1", 2)
    spawned = [spawn for spawn in job.all(orders.SpawnWorker) if spawn.restarts == 1]
    assert [(spawn.node, spawn.rank, spawn.world) for spawn in spawned] == [("n1", 0, 2), ("n1", 1, 2)]
    for rank in (0, 1):
        job.ready(job.of(rank), 4)
    assert (job.last(WorldChanged).kind, job.last(WorldChanged).before, job.last(WorldChanged).after) == (
        "restart",
        4,
        2,
    )


# --- when not all goes as planned -------------------------------------------------------------------------------------


def test_who_stops_at_a_step_that_was_planned_before_makes_all_stop_at_once() -> None:
    job = elastic()
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    at = planned(job)
    job.tell(facts.HaltMissed(job.of(1), job.machine.generation, StepNo(at), StepNo(at)))
    job.halted(0, at)
    assert (job.last(orders.HaltGeneration).worker, job.last(orders.HaltGeneration).at) == (job.of(1), None)


def test_ranks_do_not_move_where_they_alone_are_a_step_ahead() -> None:
    job = two_nodes(min_replicas=4)
    comes(job, "n2", 2)
    drain(job, "n1")
    for worker in candidates(job):
        job.ready(worker, NO_STATE)
    job.wait()
    for rank, state in enumerate((5, 5, 6, 6)):
        job.halted(rank, state)
    assert (form(job).step, form(job).holders) == (6, [2, 3])
    assert {member.node for member in form(job).members} == {"n0", "n1"}, "they give their state first"


def test_the_end_of_a_leaver_is_no_failure_of_its_node() -> None:
    job = elastic(4)
    leavers = [job.of(rank) for rank in (1, 2, 3)]
    shrunk(job, 1)
    for worker in leavers:
        job.exited(worker, 0)
    assert job.machine.roster.nodes[NodeId("n0")].failed_standbys == 0


def test_of_two_dead_ranks_only_the_one_that_is_wanted_is_filled() -> None:
    job = elastic(2)
    scale(job, 1)
    job.exited(job.of(0))
    job.exited(job.of(1))
    assert len([spawn for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.JOINER]) == 1


def test_two_nodes_given_back_at_once_do_not_end_a_job_that_nobody_else_could_hold() -> None:
    job = two_nodes(min_replicas=4)
    drain(job, "n1")
    drain(job, "n0")
    stop(job)
    assert not job.all(EndJob)
    assert not job.all(orders.ReleaseWorker)
