from collections import Counter

import pytest

from regrow.agent.store.routing import RADIX, home, is_direct, next_hop, parent
from regrow.core.messages.store import placed

SIZES = (1, 2, 3, 7, 8, 9, 63, 64, 65, 100, 512)


def digits(nodes: int) -> int:
    count, size = 0, 1
    while size < nodes:
        count, size = count + 1, size * RADIX
    return count


@pytest.mark.parametrize("nodes", SIZES)
def test_every_way_ends_at_the_home_after_at_most_one_hop_a_digit(nodes: int) -> None:
    for root in {0, nodes // 2, nodes - 1}:
        for start in range(nodes):
            node, hops = start, 0
            while node != root:
                node, hops = parent(node, root, nodes), hops + 1
                assert 0 <= node < nodes
            assert hops <= digits(nodes)


@pytest.mark.parametrize("nodes", SIZES)
def test_nobody_is_asked_by_more_than_a_few_for_each_digit(nodes: int) -> None:
    for root in range(nodes):
        asked = Counter(parent(node, root, nodes) for node in range(nodes) if node != root)
        assert max(asked.values(), default=0) <= (RADIX - 1) * digits(nodes)


@pytest.mark.parametrize("nodes", (65, 512))
def test_a_node_talks_to_the_same_few_whatever_the_key(nodes: int) -> None:
    for node in range(0, nodes, 7):
        assert len({parent(node, root, nodes) for root in range(nodes)} - {node}) <= (RADIX - 1) * digits(nodes)


def test_homes_are_spread() -> None:
    kept = Counter(home(f"g3/key/{number}", 64, 512) for number in range(6400))
    assert len(kept) == 64
    assert max(kept.values()) < 160


def test_a_placed_key_lives_with_the_node_of_its_rank_and_is_read_straight_there() -> None:
    for rank in range(32):
        key = placed("g1/mesh/0.0", rank)
        assert home(key, 4, 32) == rank // 8
        assert [next_hop(key, node, 4, 32) for node in range(4)] == [rank // 8] * 4


def test_where_a_rank_listens_in_the_default_group_is_kept_by_its_own_agent() -> None:
    for rank in range(32):
        assert home(f"g1/env32.1/0//cpu//0/{rank}", 4, 32) == rank // 8
    others = {home(f"g1/env32.1/0//7//cpu//0/{rank}", 4, 32) == rank // 8 for rank in range(32)}
    assert others == {True, False}, "in another group the number is not the rank of the world"


def test_gloos_addresses_are_read_straight_from_their_home_and_nccls_ids_through_the_tree() -> None:
    assert is_direct("g1/env1/default_pg/0//cpu//0/17")
    assert not is_direct("g1/env1/default_pg/0//cuda//0")
    assert not is_direct("g1/env1/default_pg/0/cuda//17")


def test_a_node_outside_the_table_asks_somebody_in_it() -> None:
    assert {next_hop(f"g1/{number}", None, 5, 5) for number in range(100)} == set(range(5))


def test_a_rank_that_does_not_exist_places_nothing() -> None:
    assert 0 <= home("mail@999", 3, 12) < 3
