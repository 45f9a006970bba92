"""Orders of durable checkpoints: when, to whom, and after failures."""

from typing import Any

import pytest
from tests.unit.membership.membership_job import Job

from regrow.core.ids import NodeId, Rank, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.checkpoints import (
    AbandonCheckpoint,
    CheckpointFailed,
    CheckpointWritten,
    FinishCheckpoint,
    PartsWritten,
    SnapshotHeld,
    WriteCheckpoint,
)
from regrow.core.messages.copies import CopiesHeld, KeptCopy, TakeSnapshot
from regrow.core.messages.orders import ReleaseWorker
from regrow.core.records import CheckpointSaved, Noted
from regrow.membership.orders import EndJob
from regrow.membership.states import Training, Waiting

EVERY = 60.0


def job(world: int = 2, *, holdings: list[str] | None = None, nodes: int = 1, **changes: Any) -> Job:
    """One that trains, its first step committed by all."""
    made = Job(world, nodes=nodes, durable=True, checkpoint_every=EVERY, **changes)
    for rank in made.ranks:
        holding = holdings[rank] if holdings else "all"
        worker = made.of(rank)
        made.tell(
            facts.WorkerReady(worker, StepNo(0), f"at {worker}", f"layout {holding}", 0.0, holding, bool(holdings))
        )
    return made.joined().stepped(0)


def later(made: Job) -> Job:
    made.tell(facts.TimeAdvanced(), after=EVERY)
    return made


def held(made: Job, rank: int, asked: int, step: int, error: str = "") -> None:
    made.tell(SnapshotHeld(made.of(rank), StepNo(asked), StepNo(step), error))


def parts(made: Job, order: WriteCheckpoint) -> None:
    made.tell(PartsWritten(order.node, order.attempt, order.step, order.ranks, 100, 0.1))


def whole(made: Job, order: FinishCheckpoint) -> None:
    made.tell(CheckpointWritten(order.node, order.attempt, order.step, "folder", 100))


def failed(made: Job, order: WriteCheckpoint | FinishCheckpoint, reason: str, *, torn: bool = False) -> None:
    made.tell(CheckpointFailed(order.node, order.attempt, order.step, reason, torn))


def notes(made: Job) -> list[str]:
    return [note.text for note in made.all(Noted)]


def test_replicas_are_written_by_the_lowest_rank_at_its_next_boundary() -> None:
    made = job()
    assert made.all(TakeSnapshot) == []
    later(made)
    assert made.all(TakeSnapshot) == [TakeSnapshot(made.of(0), StepNo(1))]
    held(made, 0, asked=1, step=4)
    write = made.last(WriteCheckpoint)
    assert (write.node, write.step, write.ranks) == ("n0", 4, [0])
    parts(made, write)
    finish = made.last(FinishCheckpoint)
    assert (finish.step, finish.ranks, finish.keep) == (4, [0], 2)
    whole(made, finish)
    saved = made.last(CheckpointSaved)
    assert (saved.step, saved.folder, saved.nbytes) == (4, "folder", 100)


def test_the_next_one_waits_for_its_time_and_for_a_new_step() -> None:
    made = later(job())
    held(made, 0, asked=1, step=1)
    parts(made, made.last(WriteCheckpoint))
    whole(made, made.last(FinishCheckpoint))
    later(made)
    assert len(made.all(TakeSnapshot)) == 1
    made.stepped(1)
    later(made)
    assert len(made.all(TakeSnapshot)) == 2
    later(made)
    assert len(made.all(TakeSnapshot)) == 2, "one at a time"


def test_different_holdings_take_theirs_at_one_step_ahead() -> None:
    made = later(job(4, holdings=["a", "a", "b", "b"], nodes=2))
    orders = made.all(TakeSnapshot)
    assert [order.worker for order in orders] == [made.of(0), made.of(2)]
    (step,) = {order.step for order in orders}
    assert step > 1
    held(made, 0, asked=step, step=step)
    assert made.all(WriteCheckpoint) == []
    held(made, 2, asked=step, step=step)
    writes = made.all(WriteCheckpoint)
    assert [(write.node, write.ranks) for write in writes] == [("n0", [0]), ("n1", [2])]
    parts(made, writes[1])
    assert made.all(FinishCheckpoint) == []
    parts(made, writes[0])
    assert made.last(FinishCheckpoint).ranks == [0, 2]


def test_who_had_passed_the_step_makes_all_try_again_further_ahead() -> None:
    made = later(job(2, holdings=["a", "b"]))
    first = made.last(TakeSnapshot).step
    held(made, 0, asked=first, step=first)
    held(made, 1, asked=first, step=first + 3)
    assert made.all(WriteCheckpoint) == []
    again = made.all(TakeSnapshot)[2:]
    assert len(again) == 2
    assert again[0].step == again[1].step > first + 3
    held(made, 0, asked=first, step=first)  # an old answer
    assert made.all(WriteCheckpoint) == []


def test_a_fault_while_snapshots_are_taken_gives_them_up_and_the_next_comes_after_it() -> None:
    made = later(job(2, holdings=["a", "b"]))
    step = made.last(TakeSnapshot).step
    made.exited(made.of(1))
    held(made, 0, asked=step, step=step)
    assert made.all(WriteCheckpoint) == []


def test_what_agents_hold_is_written_even_if_the_workers_die() -> None:
    made = later(job())
    held(made, 0, asked=1, step=1)
    made.exited(made.of(0))
    parts(made, made.last(WriteCheckpoint))
    whole(made, made.last(FinishCheckpoint))
    assert made.last(CheckpointSaved).step == 1


def test_a_failure_is_said_once_for_each_cause_and_what_there_is_removed() -> None:
    made = job()
    for number, reason in enumerate(["disk 7 full", "disk 8 full", "read-only"]):
        later(made.stepped(number + 1))
        held(made, 0, asked=number + 2, step=number + 2)
        failed(made, made.last(WriteCheckpoint), reason)
        assert made.last(AbandonCheckpoint).step == number + 2
    assert notes(made) == [
        "state@2 could not be written to disk: disk 7 full; training goes on",
        "state@4 could not be written to disk: read-only; training goes on",
    ]


def test_a_snapshot_that_was_overwritten_is_no_failure_and_is_taken_again_at_once() -> None:
    made = later(job())
    held(made, 0, asked=1, step=1)
    failed(made, made.last(WriteCheckpoint), "overwritten", torn=True)
    assert notes(made) == []
    assert len(made.all(TakeSnapshot)) == 2


def test_answers_to_an_earlier_attempt_are_dropped() -> None:
    made = later(job())
    held(made, 0, asked=1, step=1)
    old = made.last(WriteCheckpoint)
    failed(made, old, "full")
    later(made.stepped(1))
    held(made, 0, asked=2, step=2)
    parts(made, old)
    assert made.all(FinishCheckpoint) == []


def test_the_last_state_is_written_before_the_workers_are_released() -> None:
    made = job(2, holdings=["a", "b"])
    for rank in made.ranks:
        made.finished(rank, 1)
    assert made.all(ReleaseWorker) == []
    assert [order.step for order in made.all(TakeSnapshot)] == [1, 1]
    for rank in made.ranks:
        held(made, rank, asked=1, step=1)
    parts(made, made.last(WriteCheckpoint))
    assert made.all(ReleaseWorker) == []
    whole(made, made.last(FinishCheckpoint))
    assert len(made.all(ReleaseWorker)) == 2


def test_a_step_beyond_the_end_is_not_waited_for() -> None:
    made = later(job(2, holdings=["a", "b"]))
    assert made.last(TakeSnapshot).step > 1
    for rank in made.ranks:
        made.finished(rank, 1)
    assert made.last(TakeSnapshot).step == 1


@pytest.mark.parametrize("how", ["failed", "late"])
def test_a_last_state_that_cannot_be_written_does_not_keep_the_job(how: str) -> None:
    made = job()
    for rank in made.ranks:
        made.finished(rank, 1)
    held(made, 0, asked=1, step=1)
    if how == "failed":
        failed(made, made.last(WriteCheckpoint), "full")
    else:
        made.wait()
    assert len(made.all(ReleaseWorker)) == 2
    assert "the job ends without it" in notes(made)[0]


def test_a_rank_lost_at_the_end_has_its_last_state_written_after_it_is_mended() -> None:
    made = job()
    for rank in made.ranks:
        made.finished(rank, 1)
    made.exited(made.of(1))
    made.halted(0, 1)
    made.tell(facts.WorkerReady(made.of(1), StepNo(-1), "there", "layout all", 0.0, "all"))
    made.joined()
    for rank in made.ranks:
        made.finished(rank, 1)
    assert len(made.all(TakeSnapshot)) == 2
    assert made.all(ReleaseWorker) == []


def test_a_job_without_a_place_for_them_orders_none() -> None:
    made = Job(2).trained()
    made.tell(facts.TimeAdvanced(), after=1e6)
    for rank in made.ranks:
        made.finished(rank, 1)
    assert made.all(TakeSnapshot) == []
    assert len(made.all(ReleaseWorker)) == 2


def test_the_time_is_looked_at_no_more_often_than_needed() -> None:
    made = job()
    later(made)
    held(made, 0, asked=1, step=1)
    parts(made, made.last(WriteCheckpoint))
    whole(made, made.last(FinishCheckpoint))
    wakes = 0
    until = made.now + 2 * EVERY
    while made.now < until:
        made.wait()
        wakes += 1
    assert wakes <= 3


def written(made: Job, step: int) -> None:
    """The snapshot that was asked for last is taken at this step, and comes to the disk."""
    held(made, 0, asked=made.last(TakeSnapshot).step, step=step)
    parts(made, made.last(WriteCheckpoint))
    whole(made, made.last(FinishCheckpoint))


def test_who_asks_for_the_end_gets_it_when_the_state_is_saved() -> None:
    made = job()
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    assert made.all(TakeSnapshot) == [TakeSnapshot(made.of(0), StepNo(1))] and made.all(EndJob) == []
    assert "the state goes to disk first, for which there are 30 s" in notes(made)
    written(made, step=2)
    assert [end.code for end in made.all(EndJob)] == [75] and made.last(CheckpointSaved).step == 2
    assert "SIGTERM" in made.last(EndJob).diagnosis


def test_what_is_written_already_is_older_than_what_is_wanted_at_the_end() -> None:
    made = later(job())
    held(made, 0, asked=1, step=1)
    made.stepped(1).stepped(2)
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    parts(made, made.last(WriteCheckpoint))
    whole(made, made.last(FinishCheckpoint))
    assert made.last(CheckpointSaved).step == 1 and made.all(EndJob) == []
    assert len(made.all(TakeSnapshot)) == 2
    written(made, step=3)
    assert made.last(CheckpointSaved).step == 3 and [end.code for end in made.all(EndJob)] == [75]


def saved_at(made: Job, step: int) -> Job:
    """All ranks stand at this step, which is on disk; nothing else was heard of them."""
    written(later(made), step=step)
    assert made.last(CheckpointSaved).step == step and made.machine.step == step
    return made


def test_steps_that_were_made_unheard_when_the_end_was_asked_for_are_saved() -> None:
    made = saved_at(job(), 1)
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    assert made.all(EndJob) == [], "ranks may have come further"
    made.stepped(1).stepped(2)
    assert len(made.all(TakeSnapshot)) == 2 and made.all(EndJob) == []
    made.stepped(3)
    written(made, step=3)
    assert made.last(CheckpointSaved).step == 3 and [end.code for end in made.all(EndJob)] == [75]


def test_who_made_no_step_since_the_last_save_ends_soon() -> None:
    made = saved_at(job(), 1)
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    before = made.now
    made.wait()
    assert [end.code for end in made.all(EndJob)] == [75] and made.now - before < 5.0
    assert len(made.all(TakeSnapshot)) == 1
    at_once = saved_at(job(), 1)
    at_once.tell(facts.StopRequested("at once"))
    assert [end.code for end in at_once.all(EndJob)] == [75]


def test_nothing_is_looked_for_again_and_again_where_the_loop_has_ended_since() -> None:
    made = saved_at(job(), 1)
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    for rank in made.ranks:
        made.finished(rank, 1)
    assert not isinstance(made.machine.state, Training) and made.all(EndJob) == []
    made.tell(facts.TimeAdvanced(), after=5.0)
    due = made.machine.next_deadline()
    assert due is not None and due > made.now, "else the coordinator's timer never rests"


def test_what_is_on_disk_and_cannot_be_read_is_not_taken_for_saved() -> None:
    made = saved_at(job(), 1)
    made.stepped(1)
    made.machine._job.refused[StepNo(2)] = "it is damaged"
    written(later(made), step=2)
    made.machine._job.refused[StepNo(2)] = "it is damaged"
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    assert made.all(EndJob) == [] and len(made.all(TakeSnapshot)) == 3
    written(made, step=3)
    assert [end.code for end in made.all(EndJob)] == [75]


def test_the_end_does_not_wait_for_a_disk_that_is_too_slow_or_full() -> None:
    late, full = job(), job()
    for made in (late, full):
        made.tell(facts.StopRequested("SIGTERM", patience=30.0))
        held(made, 0, asked=1, step=1)
    late.tell(facts.TimeAdvanced(), after=29.0)
    assert late.all(EndJob) == []
    late.tell(facts.TimeAdvanced(), after=1.0)
    failed(full, full.last(WriteCheckpoint), "no space left on device")
    for made in (late, full):
        assert [end.code for end in made.all(EndJob)] == [75] and made.all(CheckpointSaved) == []
    assert any("no space left on device" in note for note in notes(full))


def test_the_end_is_at_once_where_there_is_nothing_to_save_and_for_who_asks_again() -> None:
    never = Job(2).joined().stepped(0)
    begins = Job(2, durable=True, checkpoint_every=EVERY).joined()
    again = job()
    for made in (never, begins, again):
        made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    assert again.all(EndJob) == []
    again.tell(facts.StopRequested("SIGTERM", patience=30.0))
    assert again.all(EndJob) == [], "a second node was told the same"
    again.tell(facts.StopRequested("at once"))
    for made in (never, begins, again):
        assert [end.code for end in made.all(EndJob)] == [75]


def test_after_a_fault_meanwhile_the_survivors_state_is_saved_and_nobody_is_brought_back_to_end() -> None:
    made = job()
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    made.exited(made.of(0))
    made.halted(1, 1)
    assert made.all(EndJob) == [] and len(made.all(TakeSnapshot)) == 2
    held(made, 1, asked=1, step=1)
    parts(made, made.last(WriteCheckpoint))
    whole(made, made.last(FinishCheckpoint))
    assert [end.code for end in made.all(EndJob)] == [75] and made.last(CheckpointSaved).step == 1


def test_where_survivors_lack_a_part_the_fault_is_mended_before_the_state_is_saved() -> None:
    made = job(holdings=["a", "b"], nodes=2, buddy_every=1)
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    made.exited(made.of(0))
    made.halted(1, 1)
    for node in ("n0", "n1"):
        copies = [KeptCopy(Rank(rank), holding, StepNo(1)) for rank, holding in enumerate("ab")]
        made.tell(CopiesHeld(NodeId(node), made.machine.generation, copies))
    made.tell(facts.WorkerReady(made.of(0), StepNo(-1), "there", "layout a", 0.0, "a", True))
    assert made.all(EndJob) == [] and made.last(orders.FormGeneration).step == 1


def test_ranks_that_are_halted_for_want_of_a_node_are_saved_too() -> None:
    made = job(nodes=2)
    made.tell(facts.NodeLost(NodeId("n1"), "gone"))
    made.halted(0, 1)
    assert isinstance(made.machine.state, Waiting)
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    assert made.all(EndJob) == []
    written(made, step=1)
    assert [end.code for end in made.all(EndJob)] == [75] and made.last(CheckpointSaved).step == 1


@pytest.mark.parametrize("gone", [facts.NodeLost(NodeId("n0"), "gone"), facts.NodeStopped(NodeId("n0"))])
def test_a_job_that_ends_by_the_loss_of_the_node_that_writes_saves_what_the_others_have(
    gone: facts.NodeLost | facts.NodeStopped,
) -> None:
    made = later(job(nodes=2, max_faults=0))
    held(made, 0, asked=1, step=4)
    assert made.last(WriteCheckpoint).node == "n0"
    said = made.tell(gone)
    assert not [each for each in said if isinstance(each, Noted) and "training goes on" in each.text]
    made.halted(1, 1)
    held(made, 1, asked=1, step=1)
    parts(made, made.last(WriteCheckpoint))
    whole(made, made.last(FinishCheckpoint))
    assert [end.code for end in made.all(EndJob)] == [75]


@pytest.mark.parametrize("told", ["snapshot", "parts", "whole"])
@pytest.mark.parametrize("ends", ["asked", "at the fault"])
def test_whoever_is_left_saves_the_last_state_where_the_node_that_was_to_is_lost(told: str, ends: str) -> None:
    made = job(nodes=2, max_faults=0 if ends == "at the fault" else 100)
    if ends == "asked":
        made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    else:
        later(made)
    if told != "snapshot":
        held(made, 0, asked=1, step=1)
    if told == "whole":
        parts(made, made.last(WriteCheckpoint))
    made.tell(facts.NodeLost(NodeId("n0"), "gone"))
    made.halted(1, 1)
    assert made.all(EndJob) == [] and made.last(TakeSnapshot) == TakeSnapshot(made.of(1), StepNo(1))
    held(made, 1, asked=1, step=1)
    assert made.last(WriteCheckpoint).node == "n1"
    parts(made, made.last(WriteCheckpoint))
    whole(made, made.last(FinishCheckpoint))
    assert [end.code for end in made.all(EndJob)] == [75] and made.last(CheckpointSaved).step == 1
    assert not [note for note in notes(made) if "training goes on" in note]


@pytest.mark.parametrize("stands", ["before", "after"])
def test_survivors_that_stand_further_on_than_was_heard_of_them_are_saved(stands: str) -> None:
    made = later(job())
    written(made, step=1)
    made.exited(made.of(0))
    if stands == "before":
        made.halted(1, 2)
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    if stands == "after":
        assert made.all(EndJob) == []
        made.halted(1, 2)
    assert made.all(EndJob) == [] and made.last(TakeSnapshot) == TakeSnapshot(made.of(1), StepNo(2))
    held(made, 1, asked=2, step=2)
    parts(made, made.last(WriteCheckpoint))
    whole(made, made.last(FinishCheckpoint))
    assert [end.code for end in made.all(EndJob)] == [75] and made.last(CheckpointSaved).step == 2


def test_survivors_that_have_nothing_new_are_not_saved_again() -> None:
    made = later(job())
    written(made, step=1)
    made.exited(made.of(0))
    made.halted(1, 1)
    made.tell(facts.StopRequested("SIGTERM", patience=30.0))
    assert [end.code for end in made.all(EndJob)] == [75] and made.last(CheckpointSaved).step == 1
