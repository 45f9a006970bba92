from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.core.ids import NodeId, Rank, StepNo
from regrow.core.messages.copies import KeptCopy
from regrow.membership.recovery_point import CopyHolder, Start, SurvivorState, Uncovered, decide, needs_copies, newest

A, B = NodeId("a"), NodeId("b")


def survivor(rank: int, holding: str, at: int, *, ready: bool = False, node: NodeId = A) -> SurvivorState:
    return SurvivorState(Rank(rank), holding, StepNo(at), node, ready)


def ranks(*numbers: int) -> frozenset[Rank]:
    return frozenset(map(Rank, numbers))


def copy(rank: int, holding: str, step: int) -> KeptCopy:
    return KeptCopy(Rank(rank), holding, StepNo(step))


def fsdp(*at: int, ready: Sequence[int] = ()) -> list[SurvivorState]:
    """Every rank has a shard of its own; two ranks a node."""
    return [survivor(r, f"s{r}", n, ready=r in ready, node=A if r < 2 else B) for r, n in enumerate(at)]


def hsdp(*at: int, ready: Sequence[int] = ()) -> list[SurvivorState]:
    """Ranks 0 and 2 are replicas, and so are 1 and 3."""
    return [survivor(r, f"s{r % 2}", n, ready=r in ready) for r, n in enumerate(at)]


def test_replicas_give_a_newcomer_the_newest_state() -> None:
    assert decide([survivor(0, "all", 7), survivor(1, "all", 8), survivor(2, "all", -1)], {}) == Start(
        StepNo(8), ranks(1)
    )


def test_a_shard_is_had_from_its_replica() -> None:
    assert decide(hsdp(5, 5, -1, 5), {}) == Start(StepNo(5), ranks(0, 1, 3))


def test_who_is_ready_follows_who_has_gone_on() -> None:
    assert decide(hsdp(6, 5, -1, 5, ready=[1, 3]), {}) == Start(StepNo(6), ranks(0, 1, 3))


def test_the_step_happens_when_all_survivors_are_ready() -> None:
    assert decide(hsdp(5, 5, -1, 5, ready=[0, 1, 3]), {}) == Start(StepNo(6), ranks(0, 1, 3))


def test_the_step_is_run_again_when_one_survivor_is_not_ready() -> None:
    assert decide(hsdp(5, 5, -1, 5, ready=[0, 1]), {}) == Start(StepNo(5), ranks(0, 1, 3))


def test_a_shard_that_died_with_its_last_worker_comes_from_a_copy_of_the_same_step() -> None:
    copies = {A: [copy(0, "s0", 4), copy(1, "s1", 4)], B: [copy(2, "s2", 4), copy(3, "s3", 4)]}
    assert decide(fsdp(4, 4, 4, -1), copies) == Start(
        StepNo(4), ranks(0, 1, 2), {Rank(3): CopyHolder(B, Rank(3), StepNo(4))}
    )


def test_all_ranks_go_back_to_the_newest_step_that_has_every_shard() -> None:
    copies = {
        A: [copy(r, f"s{r}", s) for r in (0, 1) for s in (4, 8)] + [copy(2, "s2", 4), copy(3, "s3", 4)],
    }
    start = decide(fsdp(9, 9, -1, -1), copies)
    assert isinstance(start, Start)
    assert start.step == 4 and start.holders == frozenset()
    assert start.restored == {Rank(r): CopyHolder(A, Rank(r), StepNo(4)) for r in range(4)}


def test_a_ready_survivor_gives_up_the_step_where_its_peers_shard_has_no_copy_after_it() -> None:
    copies = {A: [copy(r, f"s{r}", 8) for r in range(4)]}
    start = decide(fsdp(8, 8, 8, -1, ready=[0, 1, 2]), copies)
    assert isinstance(start, Start)
    assert (start.step, start.holders, list(start.restored)) == (8, ranks(0, 1, 2), [3])


def test_a_copy_on_the_ranks_own_node_is_nearer() -> None:
    copies = {A: [copy(2, "s2", 8), copy(3, "s3", 8)], B: [copy(3, "s3", 8), copy(2, "s2", 8)]}
    start = decide(fsdp(8, 8, 8, -1), copies)
    assert isinstance(start, Start)
    assert start.restored == {Rank(3): CopyHolder(B, Rank(3), StepNo(8))}


def test_a_replicas_copy_serves_too() -> None:
    states = [survivor(0, "s0", -1), survivor(1, "s1", 3), survivor(2, "s0", -1, node=B), survivor(3, "s1", 3)]
    start = decide(states, {B: [copy(2, "s0", 3)]})
    assert isinstance(start, Start)
    assert start.restored == {Rank(0): CopyHolder(B, Rank(2), StepNo(3)), Rank(2): CopyHolder(B, Rank(2), StepNo(3))}


def test_copies_newer_than_the_survivors_are_not_gone_forward_to() -> None:
    copies = {A: [copy(r, f"s{r}", 12) for r in range(4)]}
    assert isinstance(decide(fsdp(9, 9, 9, -1), copies), Uncovered)


def test_nobody_left_but_the_copies() -> None:
    copies = {A: [copy(0, "all", 3), copy(0, "all", 6)]}
    assert decide([survivor(0, "all", -1), survivor(1, "all", -1)], copies) == Start(
        StepNo(6), frozenset(), {Rank(r): CopyHolder(A, Rank(0), StepNo(6)) for r in (0, 1)}
    )


def test_a_lost_shard_without_a_copy_is_named() -> None:
    assert decide(fsdp(4, 4, 4, -1), {}) == Uncovered(StepNo(4), (Rank(3),))


@pytest.mark.parametrize(
    ("survivors", "needed"),
    [(hsdp(5, 5, -1, 5), False), (hsdp(-1, 5, -1, 5), True), (fsdp(4, 4, 4, -1), True), (fsdp(-1, -1, -1, -1), True)],
)
def test_copies_are_asked_for_when_the_living_do_not_have_everything(
    survivors: list[SurvivorState], needed: bool
) -> None:
    assert needs_copies(survivors) is needed


def test_nobody_has_anything() -> None:
    assert newest(fsdp(-1, -1)) == (-1, frozenset())


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[SurvivorState], dict[NodeId, list[KeptCopy]]]:
    """A world of shards and replicas after any fault that the vote allows, and any copies.

    The vote: a rank has gone on to n + 1 only if all others that live are ready at n, or there too.
    """
    step = draw(st.integers(0, 6))
    shards, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    somebody_ahead = draw(st.booleans())
    survivors = []
    for rank in range(shards * replicas):
        fate = draw(st.sampled_from(["dead", "ahead", "ready"] if somebody_ahead else ["dead", "ready", "behind"]))
        at = {"dead": -1, "ahead": step + 1}.get(fate, step)
        node = A if rank < shards * replicas / 2 else B
        survivors.append(survivor(rank, f"s{rank % shards}", at, ready=fate == "ready", node=node))
    kept = st.tuples(st.integers(0, shards * replicas - 1), st.integers(0, step + 1))
    copies = {node: [copy(r, f"s{r % shards}", v) for r, v in draw(st.sets(kept))] for node in (A, B)}
    return survivors, copies


@given(worlds())
def test_every_rank_can_come_to_stand_where_the_generation_starts(
    world: tuple[list[SurvivorState], dict[NodeId, list[KeptCopy]]],
) -> None:
    survivors, copies = world
    start = decide(survivors, copies)
    if isinstance(start, Uncovered):
        return
    by_rank = {each.rank: each for each in survivors}
    living = {by_rank[rank].holding for rank in start.holders}
    for each in survivors:
        if each.rank in start.holders:
            assert each.state_at == start.step or (each.ready and each.state_at == start.step - 1)
        elif each.rank in start.restored:
            source = start.restored[each.rank]
            assert KeptCopy(source.rank, each.holding, start.step) in copies[source.node]
        else:
            assert each.holding in living
    assert not (start.holders & start.restored.keys())


@given(worlds())
def test_nothing_committed_is_lost_while_every_shard_has_a_survivor(
    world: tuple[list[SurvivorState], dict[NodeId, list[KeptCopy]]],
) -> None:
    survivors, copies = world
    alive = [each for each in survivors if each.state_at >= 0]
    if {each.holding for each in alive} != {each.holding for each in survivors}:
        return
    start = decide(survivors, copies)
    assert isinstance(start, Start)
    assert start.step >= max(each.state_at for each in alive)
    assert start.restored == {}


@given(worlds())
def test_the_newest_step_that_has_everything_is_taken(
    world: tuple[list[SurvivorState], dict[NodeId, list[KeptCopy]]],
) -> None:
    """Against a search over all steps."""
    survivors, copies = world
    start = decide(survivors, copies)
    top, reached = newest(survivors)
    limit = top if top >= 0 else 99

    def covered(step: int) -> bool:
        at_step = reached if step == top else {each.rank for each in survivors if each.state_at == step}
        living = {each.holding for each in survivors if each.rank in at_step} if step == top else set()
        kept = {each.holding for held in copies.values() for each in held if each.step == step}
        return all(each.holding in living | kept or each.rank in at_step for each in survivors)

    possible = [step for step in range(limit + 1) if covered(step)]
    if isinstance(start, Uncovered):
        assert possible == []
    else:
        assert start.step == max(possible)
