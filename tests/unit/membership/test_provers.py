"""Without a standby a newcomer is made for a proof: one, late, for no longer than it takes, in nobody's way."""

from typing import Any

import pytest
from tests.unit.membership.membership_job import Job

from regrow.core.ids import NO_STATE, NodeId, Rank, StepNo
from regrow.core.messages import facts
from regrow.core.messages.orders import FenceWorker, SpawnWorker
from regrow.core.messages.replacements import (
    ProveReplacement,
    ReplacementProven,
    ReplacementRefuted,
    ReplacementUnproven,
)
from regrow.core.messages.vocabulary import ErrorReport, Role, Warmth
from regrow.membership.recovery.proofs.provers import AGAIN_S, CHANGED_S, QUIET_S
from regrow.membership.states import Mending


def orders(job: Job, kind: type[Any]) -> list[Any]:
    return [each for each in job.said if isinstance(each, kind)]


def made(job: Job) -> list[SpawnWorker]:
    return [each for each in orders(job, SpawnWorker) if each.role is Role.PROVER]


def ended(job: Job) -> list[str]:
    return [each.worker for each in orders(job, FenceWorker)]


def training(world: int = 2, quiet: float = QUIET_S + 1, **changes: Any) -> Job:
    """A job that has run steps for a while."""
    job = Job(world=world, proof=True, proof_forks=True, **changes).trained(4)
    passes(job, quiet)
    return job


def arrives(job: Job, order: SpawnWorker, **built: Any) -> None:
    """It is built; the ranks train on."""
    job.ready(order.worker, **built)
    passes(job)


def passes(job: Job, seconds: float = 1.0) -> None:
    job.now += seconds
    job.stepped(job.machine.step)


def proven(job: Job, step: int = 9, *, seconds: float = 0.5) -> None:
    asked = orders(job, ProveReplacement)[-1]
    job.tell(ReplacementProven(asked.worker, asked.generation, asked.rank, StepNo(step), 0.1, seconds))


def test_a_newcomer_is_made_as_a_replacement_would_be_proves_one_rank_and_is_ended() -> None:
    job = training(world=3)
    (order,) = made(job)
    assert (order.rank, order.local_rank, order.world, order.warmth) == (2, 2, 3, Warmth.BUILT)
    view = job.machine.snapshot()
    assert view.standbys == [] and len(view.ranks) == 3 and view.replaceable == "replaceable: not proven yet"
    arrives(job, order)
    (asked,) = orders(job, ProveReplacement)
    assert (asked.worker, asked.rank) == (order.worker, 2)
    proven(job)
    passes(job)
    assert ended(job) == [order.worker] and job.machine.snapshot().replaceable == "replaceable: last proven at step 9"
    job.exited(order.worker)
    assert job.machine.incident is None and job.machine.quiet


def test_it_is_made_again_when_what_it_has_cost_is_paid_for_and_not_within_ten_minutes() -> None:
    for seconds, pause in ((0.5, AGAIN_S), (10.0, 2000.0)):
        job = training()
        arrives(job, made(job)[0])
        proven(job, seconds=seconds)
        passes(job)
        job.now += pause - 30.0
        passes(job)
        assert len(made(job)) == 1
        job.now += 60.0
        passes(job)
        assert len(made(job)) == 2


def test_a_short_job_has_none_and_one_that_was_long_in_building_not_before_it_has_trained_as_long() -> None:
    assert made(training(quiet=QUIET_S / 2)) == []
    job = Job(world=2, proof=True, proof_forks=True)
    job.now += 100.0  # seconds of building
    job.trained()
    passes(job)
    job.now += 60.0
    passes(job)
    assert made(job) == []
    job.now += 60.0
    passes(job)
    assert len(made(job)) == 1


@pytest.mark.parametrize("changes", [{"proof": False}, {"proof_forks": False}, {"standbys": 1}])
def test_none_is_made_where_that_is_not_wanted_or_a_standby_can_do_it(changes: dict[str, Any]) -> None:
    job = Job(world=2, **{"proof": True, "proof_forks": True, **changes}).trained()
    passes(job)
    job.now += 100.0
    passes(job)
    assert made(job) == []


def test_standbys_that_wait_before_the_script_have_one_made() -> None:
    assert len(made(training(standbys=1, warmth=Warmth.IMPORTS))) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "no standby is there that could be compared (--standby 1, or --proof fork)"),
        ({"nodes": 3, "spares": 1}, "no spare node has a standby now that could be compared"),
        ({"standbys": 1, "warmth": Warmth.IMPORTS}, "standbys wait before the script, so none can be compared"),
    ],
)
def test_without_a_comparable_standby_the_reason_is_the_right_one(changes: dict[str, Any], why: str) -> None:
    job = Job(world=3, proof=True, **changes)
    job.trained(4)
    if changes.get("spares"):
        job.tell(facts.NodeLost(NodeId("n2"), "its connection ended"))
    passes(job)
    assert f"not proven, because {why}" in job.machine.snapshot().replaceable


def test_what_is_done_on_rank_0_alone_is_not_done_twice_for_a_proof() -> None:
    job = training(world=1)
    assert made(job) == [] and "rank 0 has what no other rank has" in job.machine.snapshot().replaceable


def test_nothing_is_made_where_the_ranks_know_that_nothing_can_be_compared() -> None:
    job = Job(world=2, proof=True, proof_forks=True)
    for rank in range(2):
        job.ready(job.of(rank), 0, unprovable="its kernels need not repeat themselves")
    for rank in range(2):
        job.resumed(rank)
    job.stepped(8)
    job.now += 100.0
    passes(job)
    assert made(job) == []
    assert job.machine.snapshot().replaceable.endswith("not proven, because its kernels need not repeat themselves")


def test_one_after_the_other_is_made_for_each_holding_that_another_rank_than_0_has() -> None:
    job = Job(world=4, proof=True, proof_forks=True)
    for rank in range(4):
        job.ready(job.of(rank), 0, holding="ab"[rank % 2], layout="ab"[rank % 2], sharded=True)
    for rank in range(4):
        job.resumed(rank)
    job.stepped(8)
    job.now += QUIET_S + 1
    passes(job)
    seen = []
    for number in range(2):
        order = made(job)[number]
        seen.append(int(order.rank))
        assert len(made(job)) == number + 1
        kind = "ab"[order.rank % 2]
        arrives(job, order, holding=kind, layout=kind, sharded=True)
        proven(job)
        job.now += 1.0
        passes(job)
        assert order.worker in ended(job)
        job.exited(order.worker)
        job.now += 1.0
        passes(job)
    assert sorted(seen) == [2, 3]


def test_a_fault_ends_it_and_is_mended_as_if_there_were_none() -> None:
    for ready in (False, True):
        job = training(world=3)
        order = made(job)[0]
        if ready:
            arrives(job, order)
        job.exited(job.of(1))
        assert isinstance(job.machine.state, Mending) and ended(job) == [order.worker]
        (joiner,) = [each for each in orders(job, SpawnWorker) if each.role is Role.JOINER]
        assert joiner.rank == 1
        job.exited(order.worker)
        assert job.machine.incident is not None and job.machine.incident.ranks == [1]


def test_it_is_ended_as_soon_as_a_rank_has_run_its_last_step() -> None:
    job = training()
    order = made(job)[0]
    job.finished(0, 8)
    assert ended(job) == [order.worker]


def test_a_script_that_fails_in_a_newcomer_fails_nothing_and_is_not_tried_again_for_long() -> None:
    job = training()
    order = made(job)[0]
    error = ErrorReport("OSError", "address in use", "OSError: address in use", "line 3")
    job.tell(facts.WorkerFailed(order.worker, error, NO_STATE, own=True))
    job.exited(order.worker, 1)
    told = job.machine.snapshot().replaceable
    assert "not proven, because a newcomer's script fails before its first step: OSError: address in use" in told
    assert job.machine.quiet and job.machine.roster.nodes[NodeId("n0")].failed_standbys == 0
    for after, more in ((AGAIN_S - 60.0, 0), (120.0, 1)):
        job.now += after
        passes(job)
        assert len(made(job)) == 1 + more
    job.exited(made(job)[1].worker, 1)
    job.now += AGAIN_S + 60.0
    passes(job)
    assert len(made(job)) == 2, "each failure doubles the time to the next"


def test_where_there_is_no_room_its_agent_says_so_and_that_is_what_is_told() -> None:
    job = training()
    order = made(job)[0]
    job.tell(ReplacementUnproven(order.worker, order.generation, order.rank, "there is no room on n0"))
    job.exited(order.worker, 1)
    assert "not proven, because there is no room on n0" in job.machine.snapshot().replaceable
    assert job.machine.quiet


def test_one_that_builds_another_model_is_not_used_and_one_that_never_comes_is_given_up() -> None:
    job = training()
    order = made(job)[0]
    arrives(job, order, layout="another")
    assert ended(job) == [order.worker] and not orders(job, ProveReplacement) and job.machine.quiet
    job = training(build_deadline=50.0)
    job.now += 60.0
    passes(job)
    assert ended(job) == [made(job)[0].worker]
    assert "was not built within 50 s" in job.machine.snapshot().replaceable


def test_proofs_that_come_to_nothing_do_not_keep_it_for_ever() -> None:
    job = training()
    order = made(job)[0]
    arrives(job, order)
    for _ in range(3):
        assert ended(job) == []
        job.tell(ReplacementUnproven(order.worker, order.generation, order.rank, "the rank did not come"))
        job.now += 20.0
        passes(job)
    assert ended(job) == [order.worker]


def test_a_refutation_ends_it_and_is_the_last_word() -> None:
    job = training()
    order = made(job)[0]
    arrives(job, order)
    job.tell(ReplacementRefuted(order.worker, order.generation, order.rank, StepNo(6), "a counter"))
    assert ended(job) == [order.worker]
    job.now += 1e6
    passes(job)
    assert len(made(job)) == 1
    assert job.machine.snapshot().replaceable == "not replaceable by newcomers: a counter"


def test_a_change_of_the_world_has_another_one_made_but_not_one_for_each_of_many() -> None:
    job = training(world=3)
    first = made(job)[0]
    job.exited(job.of(1))
    job.exited(first.worker)
    for rank in (0, 2):
        job.halted(rank, 8)
    job.ready(job.of(1))
    for rank in range(3):
        job.resumed(rank)
    job.stepped(8)
    assert job.machine.quiet
    job.now += QUIET_S + 1
    passes(job)
    assert len(made(job)) == 1, "the one before began less than a minute ago"
    job.now += CHANGED_S
    passes(job)
    assert len(made(job)) == 2
    assert Rank(0) not in {each.rank for each in made(job)}


def test_one_that_has_another_part_of_the_state_than_its_rank_is_not_made_again_and_again() -> None:
    job = Job(world=4, proof=True, proof_forks=True)
    for rank in range(4):
        job.ready(job.of(rank), 0, holding="ab"[rank % 2], layout="ab"[rank % 2], sharded=True)
    for rank in range(4):
        job.resumed(rank)
    job.stepped(8)
    passes(job, QUIET_S + 1)
    arrives(job, made(job)[0], holding="c", layout="ab"[made(job)[0].rank % 2], sharded=True)
    for _ in range(5):
        passes(job, 60.0)
    assert len(made(job)) == 1 and ended(job) == [made(job)[0].worker]
