"""The order of ranks along a network."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from regrow_clusters.cluster.topology import rank_order


def test_hosts_of_a_switch_come_together_and_the_first_stays_first() -> None:
    paths = {"c": ["s", "l0"], "a": ["s", "l1"], "d": ["s", "l0"], "b": ["s", "l1"], "e": ["t", "l9"]}
    assert rank_order(["c", "a", "e", "d", "b"], paths) == ["c", "d", "a", "b", "e"]


def test_where_nothing_is_known_the_order_stays() -> None:
    assert rank_order(["c", "a", "b"], {}) == ["c", "a", "b"]
    assert rank_order(["c", "a", "b"], {"c": ["l0"], "b": ["l0"]}) == ["c", "b", "a"]


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("pqr"), st.sampled_from("ab")), max_size=12))
def test_each_branch_is_one_stretch_at_every_level_and_nobody_is_lost(drawn: list[tuple[str, str, str]]) -> None:
    hosts = [f"h{number}" for number in range(len(drawn))]
    paths = {host: path for host, path in zip(hosts, drawn, strict=True) if path[2] != "b"}
    order = rank_order(hosts, paths)
    assert sorted(order) == sorted(hosts) and order[:1] == hosts[:1]
    for level in (1, 2, 3):
        branches = [
            branch for branch, _ in groupby(tuple(paths[host][:level]) if host in paths else host for host in order)
        ]
        assert len(branches) == len(set(branches))
    assert rank_order(order, paths) == order
