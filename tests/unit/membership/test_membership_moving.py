"""Ranks that move to another node because somebody asks for it, fact by fact."""

import re
from typing import Any

import pytest
from tests.unit.membership.elastic_job import candidates, drain, lose, planned, scale, stop
from tests.unit.membership.membership_job import Job, form

from regrow.core.early_reads import PlaceInWorld
from regrow.core.ids import NO_STATE, Instant, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.health import NodeExamined
from regrow.core.messages.replacements import ReplacementProven
from regrow.core.messages.replicas import OwnValues
from regrow.core.records import IncidentClosed, IncidentOpened, Noted
from regrow.core.verdicts import Action, HealthVerdict, Severity
from regrow.launch.listing import status_lines
from regrow.membership.elastic.resize import Resizing
from regrow.membership.orders import AnswerScale
from regrow.observe.story import mended


def spared(nodes: int = 3, **changes: Any) -> Job:
    """Ranks 0 and 1 on n0, 2 and 3 on n1, and n2 a spare."""
    job = Job(4, nodes=nodes, slots=2, nproc=2, spares=nodes - 2, **changes)
    job.trained(4)
    for standby in list(job.machine.roster.standbys()):
        job.ready(standby.worker, NO_STATE)
    return job


def cold(nodes: int = 3) -> Job:
    """The same without standbys, whose newcomers build when they are needed."""
    job = Job(4, nodes=nodes, slots=2, nproc=2, spares=nodes - 2, standbys=0).trained(4)
    while standbys := job.machine.roster.standbys():
        job.exited(standbys[0].worker)
    return job


def move(job: Job, node: str = "", rank: int | None = None, to: str | None = None) -> AnswerScale:
    target = None if to is None else NodeId(to)
    asked = facts.MoveRequested(NodeId(node), None if rank is None else Rank(rank), target, "an operator asks for it")
    said = job.tell(asked)
    return next(command for command in said if isinstance(command, AnswerScale))


def homes(job: Job) -> list[str]:
    roster = job.machine.roster
    return [roster.workers[roster.places[rank]].node for rank in roster.places]


def moved(job: Job) -> Job:
    """All stop as agreed, and train again."""
    at = planned(job)
    stop(job)
    return job.joined().stepped(at)


def test_ranks_of_a_node_go_to_the_spare_at_an_agreed_step_and_no_step_runs_again() -> None:
    job = spared()
    before = [job.of(rank) for rank in range(4)]
    answer = move(job, "n1")
    assert answer.accepted and "ranks 2, 3 will leave n1" in answer.reason
    at = planned(job)
    assert not job.all(orders.ReleaseWorker), "all train until the agreed step"
    stop(job)
    assert {release.worker for release in job.all(orders.ReleaseWorker)} == set(before[2:])
    assert [(member.rank, member.node) for member in form(job).members] == [(0, "n0"), (1, "n0"), (2, "n2"), (3, "n2")]
    job.joined().stepped(at)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.rung, closed.faults, closed.steps_lost) == ("move", "node", 0, 0)
    view = job.machine.snapshot()
    assert (view.incidents, view.changes) == (0, 1), "nothing has failed"
    assert closed.cause == "ranks 2, 3 from n1 to n2: an operator asks for it"
    assert mended(closed).startswith("moved at step 8 (ranks 2, 3 from n1 to n2: an operator asks for it); pause ")
    assert (closed.before, closed.after) == (4, 4) or closed.before == closed.after
    assert move(job, "n0").accepted, "who leaves n1 will be gone"
    assert not candidates(job)
    for worker in before[2:]:
        job.exited(worker, 0)
    assert not job.all(orders.StopNode), "its agent stays: the node is the spare now"
    assert len(job.all(IncidentOpened)) == 1
    for worker in candidates(job):
        job.ready(worker, NO_STATE)
    assert homes(moved(job)) == ["n1", "n1", "n2", "n2"]


def test_a_rank_alone_moves_to_the_node_that_was_named() -> None:
    job = spared(4)
    assert move(job, rank=3, to="n3").accepted
    assert homes(moved(job)) == ["n0", "n0", "n1", "n3"]


def test_while_no_standby_is_there_newcomers_are_built_and_all_train() -> None:
    job = Job(4, nodes=3, slots=2, nproc=2, spares=1, standbys=0).trained(4)
    for standby in list(job.machine.roster.standbys()):
        job.exited(standby.worker)
    assert move(job, "n0").accepted
    first, second = candidates(job)
    assert [job.machine.roster.workers[each].node for each in (first, second)] == ["n2", "n2"]
    assert not job.all(orders.HaltGeneration)
    job.ready(first, NO_STATE)
    assert [line for line in status_lines(job.machine.snapshot()) if " moves from " in line] == [
        f"rank 0 moves from n0 to n2: its new worker {first} is ready",
        f"rank 1 moves from n0 to n2: its new worker {second} is ordered",
    ]
    assert not job.all(orders.HaltGeneration)
    job.ready(candidates(job)[1], NO_STATE)
    assert homes(moved(job)) == ["n2", "n2", "n1", "n1"]


def test_moves_that_cannot_be_are_refused_with_the_reason() -> None:
    job = spared()
    for answer, why in (
        (move(job, "n7"), "no node n7"),
        (move(job, rank=9), "there is no rank 9"),
        (move(job, "n2"), "n2 has no ranks"),
        (move(job, "n0", to="n1"), "n1 has room for 0"),
        (move(job, "n0", to="n0"), "cannot move to n0: they are there already"),
    ):
        assert not answer.accepted and why in answer.reason, answer
    assert not job.all(orders.HaltGeneration)
    full = Job(4, nodes=2).trained(4)
    answer = move(full, "n0")
    assert not answer.accepted and "other nodes have room for 0" in answer.reason and "--spares" in answer.reason
    drain(job, "n1")
    assert "given back already" in move(job, "n1").reason


def test_before_the_first_step_a_move_is_refused_as_it_would_wait_for_ever_where_a_script_has_none() -> None:
    job = Job(4, nodes=3, slots=2, nproc=2, spares=1)
    assert "ask again when they train" in move(job, "n1").reason
    job.trained(4)
    assert move(job, "n1").accepted


def test_a_refusal_names_the_nodes_that_get_no_ranks_and_why() -> None:
    job = spared()
    proven(job)
    unfit(job, "n2")
    for answer in (move(job, "n1"), move(job, "n1", to="n2")):
        assert not answer.accepted and "room for 0, n2 is in quarantine (" in answer.reason, answer
    drain(job, "n2")
    assert "n2 is being given back" in move(job, "n1").reason


def test_a_node_whose_newcomers_have_all_failed_is_tried_again_when_it_is_named() -> None:
    job = cold()
    assert move(job, "n1").accepted
    for _ in range(3):
        job.exited(candidates(job)[0], 1)
    given_up = "n2 had newcomers that failed one after the other; --to n2 tries it again"
    assert "the ranks of n1 are not moved" in job.last(Noted).text and given_up in job.last(Noted).text
    assert not candidates(job) and not job.all(orders.HaltGeneration)
    assert given_up in move(job, "n1").reason
    assert move(job, "n1", to="n2").accepted
    for worker in list(job.machine.roster.nodes[NodeId("n2")].others):  # those that came to nothing make room
        if job.machine.roster.workers[worker].stage == "fenced":
            job.exited(worker)
    for worker in candidates(job):
        job.ready(worker, NO_STATE)
    assert homes(moved(job)) == ["n0", "n0", "n2", "n2"]


def test_a_move_that_has_not_happened_by_the_last_step_is_said_to_have_come_to_nothing() -> None:
    job = cold()
    assert move(job, "n0").accepted and candidates(job)
    for rank in range(4):
        job.finished(rank, 5)
    assert "the ranks of n0 are not moved: the job has run its last step" in [note.text for note in job.all(Noted)]
    assert not move(job, "n0").accepted


def test_values_of_a_ranks_own_go_with_it_as_they_are_at_the_agreed_step() -> None:
    job = spared()
    assert move(job, "n1").accepted
    at = planned(job)
    for rank in range(4):
        own = [OwnValues(StepNo(at), f"of rank {rank}".encode()), OwnValues(StepNo(at - 1), b"older", sure=False)]
        job.tell(facts.WorkerHalted(job.of(rank), job.machine.generation, StepNo(at), left=own))
    sent = {each.rank: each.own for each in job.all(orders.FormGeneration)[-4:]}
    assert (sent[Rank(0)], sent[Rank(1)]) == (None, None), "who stays has its own"
    assert sent[Rank(2)] == OwnValues(StepNo(at), b"of rank 2") and sent[Rank(3)] == OwnValues(StepNo(at), b"of rank 3")


def test_ranks_whose_part_of_the_state_nobody_else_has_are_not_moved() -> None:
    job = Job(4, nodes=3, slots=2, nproc=2, spares=1)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, holding=f"part {rank}", sharded=True)
    job.joined().stepped(4)
    answer = move(job, "n1")
    assert not answer.accepted and "same part of the state" in answer.reason


def test_a_second_move_waits_for_the_first_and_the_same_is_accepted_again() -> None:
    job = spared()
    assert move(job, "n1").accepted
    again, other = move(job, "n1"), move(job, "n0")
    assert again.accepted and "already" in again.reason
    assert not other.accepted and "n1" in other.reason
    elsewhere, part = move(job, "n1", to="n0"), move(job, rank=2)
    assert not elsewhere.accepted and not part.accepted, "they are not on their way there"


def test_a_rank_that_is_lost_meanwhile_is_mended_first_and_the_move_goes_on() -> None:
    job = spared()
    assert move(job, "n1").accepted
    at = planned(job)
    job.exited(job.of(0))
    for rank in (1, 2, 3):
        job.halted(rank, at)
    job.ready(job.of(0), NO_STATE)
    job.joined().stepped(at)
    for worker in candidates(job):
        job.ready(worker, NO_STATE)
    assert homes(moved(job))[2:] == ["n2", "n2"]


def test_a_move_to_a_node_that_is_lost_comes_to_nothing_and_training_goes_on() -> None:
    job = spared()
    assert move(job, "n1").accepted
    at = planned(job)
    lose(job, "n2")
    stop(job, at=at)
    job.joined().stepped(at)
    assert homes(job) == ["n0", "n0", "n1", "n1"]
    assert "the ranks of n1 are not moved" in job.last(Noted).text
    assert not move(job, "n1").accepted
    assert mended(job.last(IncidentClosed)).startswith("stood, and nothing has changed, at step 8 (ranks 2, 3 from n1")


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(("moves", "lost"), [("n1", "n1"), ("n0", "n1")])
def test_a_node_that_is_lost_gets_the_spare_though_newcomers_for_a_move_have_its_slots(
    moves: str, lost: str, *, warm: bool
) -> None:
    job = spared() if warm else cold()
    assert move(job, moves).accepted
    at = planned(job) if warm else 5
    lose(job, lost)
    for rank in (0, 1):
        job.halted(rank, at)
    for rank in (2, 3):
        if job.machine.roster.workers[job.of(rank)].stage != "ready":
            job.ready(job.of(rank), NO_STATE)
    job.joined().stepped(at)
    assert homes(job) == ["n0", "n0", "n2", "n2"]
    assert not [note.text for note in job.all(Noted) if "wait for room" in note.text]
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.rung, closed.faults) == ("node", "node", 1)
    not_moved = any("the ranks of n0 are not moved" in note.text for note in job.all(Noted))
    assert not_moved == (moves == "n0") and not candidates(job)


def test_a_newcomer_that_asked_for_another_rank_before_it_got_a_lost_one_is_not_used() -> None:
    job = cold()
    assert move(job, "n0").accepted
    built = candidates(job)
    lose(job, "n1")
    for rank in (0, 1):
        job.halted(rank, 5)
    assert [job.of(2), job.of(3)] == built, "those that build for ranks 0 and 1"
    for worker in built:
        job.ready(worker, NO_STATE, early={str(PlaceInWorld.RANK): "train.py, line 3"})
    assert {fence.worker for fence in job.all(orders.FenceWorker)} >= set(built)
    for worker in built:
        job.exited(worker)
    for rank in (2, 3):
        job.ready(job.of(rank), NO_STATE, early={str(PlaceInWorld.RANK): "train.py, line 3"})
    job.joined().stepped(5)
    assert homes(job) == ["n0", "n0", "n2", "n2"]


def test_a_change_of_size_follows_after_the_move() -> None:
    job = spared(4, min_replicas=1, max_replicas=4)
    assert move(job, "n1").accepted
    assert scale(job, 2).accepted
    moved(job)
    assert job.machine.world == 4
    assert len(homes(moved(job))) == 2


def test_a_move_of_one_rank_that_ends_with_a_change_of_size_is_said_to_have_come_to_nothing() -> None:
    job = Job(4, nodes=3, slots=2, nproc=2, spares=1, standbys=0, min_replicas=1, max_replicas=4).trained(4)
    assert move(job, rank=3).accepted
    lose(job, "n0")
    lose(job, "n2")
    for rank in (2, 3):
        job.halted(rank, 5)
    job.joined().stepped(5)
    assert job.machine.world == 2 and not candidates(job)
    assert "the ranks of n1 are not moved: the world has another size now" in " ".join(n.text for n in job.all(Noted))


def leaving_in_the_way() -> tuple[Job, list[WorkerId]]:
    """The ranks of n1 have moved to n2, and those that had them are not gone yet."""
    job = spared()
    before = [job.of(rank) for rank in (2, 3)]
    move(job, "n1")
    moved(job)
    assert homes(job) == ["n0", "n0", "n2", "n2"]
    return job, before


def test_a_drain_behind_a_move_waits_for_those_who_leave_while_all_train() -> None:
    job, before = leaving_in_the_way()
    drain(job, "n2", grace=60.0)
    assert len(job.all(orders.HaltGeneration)) == 4 and not candidates(job), "nobody stops for it yet"
    for worker in before:
        job.exited(worker, 0)
    assert len(candidates(job)) == 2
    for worker in candidates(job):
        job.ready(worker, NO_STATE)
    assert homes(moved(job)) == ["n0", "n0", "n1", "n1"]
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.rung, closed.faults, closed.steps_lost) == ("preempt", "node", 0, 0)
    assert not [note.text for note in job.all(Noted) if "lost" in note.text or "wait" in note.text]


def test_those_who_do_not_leave_in_time_are_not_waited_for_and_no_node_is_said_to_be_lost() -> None:
    job, before = leaving_in_the_way()
    drain(job, "n2", grace=60.0)
    left = {job.of(2), job.of(3)}
    asked = job.now
    while len(job.all(orders.HaltGeneration)) == 4:
        job.wait()
    assert 30.0 < job.now - asked < 58.0
    stop(job)
    assert left <= {release.worker for release in job.all(orders.ReleaseWorker)}
    job.tell(facts.NodeStopped(NodeId("n2")))
    assert "n2 is given back; ranks 2, 3 wait for room on other nodes, for 600 s at most" in [
        note.text for note in job.all(Noted)
    ]
    for worker in before:
        job.exited(worker, 0)
    for rank in (2, 3):
        job.ready(job.of(rank), NO_STATE)
    at = job.machine.step
    job.joined().stepped(at)
    assert homes(job) == ["n0", "n0", "n1", "n1"]
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.faults, closed.ranks, closed.steps_lost) == ("preempt", 0, [], 0)
    assert not [note.text for note in job.all(Noted) if "lost" in note.text]


def unfit(job: Job, node: str) -> None:
    """Two examinations have found a fault of a node."""
    found = HealthVerdict(NodeId(node), "gpu0", Severity.LEAVE, Action.RESET, "nvml", "a row could not be remapped")
    for _ in range(2):
        job.tell(NodeExamined(NodeId(node), "joined", [found], 0.5))


def proven(job: Job) -> None:
    job.tell(ReplacementProven(job.of(0), job.machine.generation, Rank(0), StepNo(3)))


def test_ranks_leave_a_node_in_quarantine_for_the_spare_where_a_newcomer_was_proven() -> None:
    job = spared()
    proven(job)
    unfit(job, "n1")
    assert homes(moved(job)) == ["n0", "n0", "n2", "n2"]
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.faults, closed.steps_lost) == ("move", 0, 0)
    assert closed.cause.startswith("ranks 2, 3 from n1 to n2: n1 is in quarantine: ")
    assert "a row could not be remapped" in closed.cause
    unfit(job, "n1")
    assert not job.machine.roster.candidates, "nobody goes back there"


def test_ranks_stay_on_a_node_in_quarantine_until_a_newcomer_is_proven() -> None:
    job = spared()
    unfit(job, "n1")
    assert not job.all(orders.HaltGeneration) and not job.machine.roster.candidates
    proven(job)
    assert homes(moved(job)) == ["n0", "n0", "n2", "n2"]


def test_ranks_stay_on_a_node_in_quarantine_where_no_other_has_room() -> None:
    job = Job(4, nodes=2, slots=2).trained(4)
    proven(job)
    unfit(job, "n1")
    assert not job.all(orders.HaltGeneration) and not job.machine.roster.candidates
    assert "is in quarantine" not in " ".join(note.text for note in job.all(Noted))


def test_a_proof_is_looked_at_once_while_a_drain_keeps_the_ranks_of_a_node_in_quarantine_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, _ = leaving_in_the_way()
    unfit(job, "n0")
    drain(job, "n2", grace=60.0)
    plans: list[Instant] = []
    plan = Resizing._plan

    def counted(self: Resizing, now: Instant) -> Any:
        plans.append(now)
        return plan(self, now)

    monkeypatch.setattr(Resizing, "_plan", counted)
    proven(job)
    for step in range(20, 25):
        job.stepped(step)
    assert len(plans) == 1


def test_a_move_waits_for_a_killed_newcomer_to_end_and_is_given_up_where_the_kernel_does_not_end_it() -> None:
    job = cold()
    assert move(job, "n1").accepted
    for worker in candidates(job):
        job.ready(worker, NO_STATE, layout="another model")
    assert move(job, "n1").accepted, "they are about to end"
    assert not candidates(job) and "not moved" not in job.last(Noted).text
    asked = job.now
    while "not moved" not in job.last(Noted).text and job.now < asked + 600.0:
        job.wait()
    assert 59.0 <= job.now - asked < 61.0, "a minute after the kill"
    for said in (job.last(Noted).text, move(job, "n1").reason):
        assert re.search(r"room for [01], n2 has worker n2\.w", said) and "which was killed and does not end" in said
    assert not job.all(orders.HaltGeneration) and homes(job) == ["n0", "n0", "n1", "n1"]


@pytest.mark.parametrize("warm", [True, False])
def test_lost_ranks_leave_the_place_of_a_move_to_it_while_another_node_has_room(*, warm: bool) -> None:
    job = spared(4) if warm else cold(4)
    assert move(job, "n0", to="n2").accepted
    building, at = candidates(job), planned(job) if warm else 5
    lose(job, "n1")
    for rank in (0, 1):
        job.halted(rank, at)
    for rank in (2, 3):
        if job.machine.roster.workers[job.of(rank)].stage != "ready":
            job.ready(job.of(rank), NO_STATE)
    job.joined().stepped(at)
    assert homes(job) == ["n0", "n0", "n3", "n3"] and candidates(job) == building
    for worker in building if not warm else []:
        job.ready(worker, NO_STATE)
    assert homes(moved(job)) == ["n2", "n2", "n3", "n3"]


def test_ranks_move_away_from_the_nodes_of_their_replicas() -> None:
    job = Job(4, nodes=3, slots=2, nproc=2, spares=1, standbys=0, unit=2)
    parts: dict[int, dict[str, Any]] = {rank: {"holding": f"part {rank % 2}", "sharded": True} for rank in job.ranks}
    for rank in job.ranks:
        job.ready(job.of(rank), 0, **parts[rank])
    job.joined().stepped(4)

    def built() -> list[str]:
        for rank, worker in sorted(job.machine.roster.candidates.items()):
            job.ready(worker.worker, NO_STATE, **parts[rank])
        return homes(moved(job))

    leaves = job.of(3)
    assert move(job, rank=3, to="n2").accepted and built() == ["n0", "n0", "n1", "n2"]
    job.exited(leaves, 0)
    assert move(job, "n0").accepted and built() == ["n2", "n1", "n1", "n2"]
