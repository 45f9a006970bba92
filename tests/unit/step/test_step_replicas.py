"""Replica whose state is wrong, as all ranks judge it alike."""

import math

from hypothesis import given
from hypothesis import strategies as st

from regrow.core.ids import Rank
from regrow.step.replicas import Agree, Differ, Statement, judge


def says(rank: int, digest: str, *, holding: int = 0, witness: bool = True, far: float | None = None) -> Statement:
    return Statement(Rank(rank), holding, digest.encode(), witness, far)


def test_equal_replicas_agree() -> None:
    assert judge([says(rank, "a") for rank in range(4)]) == Agree()


def test_ranks_with_other_holdings_are_not_compared() -> None:
    assert judge([says(0, "a", holding=0), says(1, "b", holding=1)]) == Agree()


def test_a_majority_names_the_odd_one() -> None:
    assert judge([says(0, "a"), says(1, "b"), says(2, "a")]) == Differ((Rank(1),), ())


def test_two_replicas_cannot_tell() -> None:
    assert judge([says(0, "a"), says(1, "b")]) == Differ((), (Rank(0), Rank(1)))


def test_two_against_two_cannot_tell() -> None:
    verdict = judge([says(0, "a"), says(1, "a"), says(2, "b"), says(3, "b")])
    assert verdict == Differ((), tuple(map(Rank, range(4))))


def test_each_holding_is_judged_by_itself() -> None:
    wide = [says(0, "a"), says(1, "a"), says(2, "b")]
    narrow = [says(3, "c", holding=1), says(4, "d", holding=1)]
    assert judge([*wide, *narrow]) == Differ((Rank(2),), (Rank(3), Rank(4)))


def test_a_newcomer_that_received_from_the_wrong_one_makes_no_majority() -> None:
    assert judge([says(0, "a"), says(1, "b"), says(2, "b", witness=False)]) == Differ((), (Rank(0), Rank(1), Rank(2)))


def test_a_newcomer_that_differs_from_all_witnesses_is_named() -> None:
    assert judge([says(0, "a"), says(1, "a"), says(2, "b", witness=False)]) == Differ((Rank(2),), ())


def test_one_witness_names_nobody() -> None:
    assert judge([says(0, "a"), says(1, "b", witness=False)]) == Differ((), (Rank(0), Rank(1)))


def test_after_the_run_again_the_one_that_was_farther_away_is_named() -> None:
    assert judge([says(0, "a", far=1e-6), says(1, "a", far=0.25), says(2, "a")]) == Agree((Rank(1),))


def test_who_had_received_wrong_state_is_not_blamed_for_it() -> None:
    received = Statement(Rank(2), 0, b"a", True, 0.25, was_witness=False)
    assert judge([says(0, "a", far=1e-6), says(1, "a", far=0.25), received]) == Agree((Rank(1),))
    assert judge([says(0, "a", far=1e-6), received]) == Agree((Rank(2),))


def test_a_state_that_was_no_number_is_the_farthest() -> None:
    assert judge([says(0, "a", far=math.nan), says(1, "a", far=0.25)]) == Agree((Rank(0),))


def test_nobody_is_named_where_only_one_can_compare() -> None:
    assert judge([says(0, "a", far=0.25), says(1, "a")]) == Agree()


_worlds = st.lists(
    st.builds(
        Statement,
        rank=st.just(Rank(0)),
        holding=st.integers(0, 2),
        digest=st.sampled_from([b"a", b"b", b"c"]),
        witness=st.booleans(),
        distance=st.none() | st.floats(min_value=0),
    ),
    min_size=1,
    max_size=9,
).map(lambda said: [Statement(Rank(at), e.holding, e.digest, e.witness, e.distance) for at, e in enumerate(said)])


@given(_worlds)
def test_all_ranks_come_to_the_same_verdict(said: list[Statement]) -> None:
    shuffled = sorted(said, key=lambda each: (each.digest, -each.rank))
    assert judge(said) == judge(shuffled)


@given(_worlds)
def test_a_difference_is_never_overlooked_nor_invented(said: list[Statement]) -> None:
    holdings = {each.holding for each in said}
    split = any(len({e.digest for e in said if e.holding == holding}) > 1 for holding in holdings)
    verdict = judge(said)
    assert isinstance(verdict, Differ) == split
    if isinstance(verdict, Differ):
        assert verdict.wrong or verdict.undecided


@given(_worlds)
def test_whoever_agrees_with_most_witnesses_is_never_named(said: list[Statement]) -> None:
    verdict = judge(said)
    if isinstance(verdict, Differ):
        for holding in {each.holding for each in said}:
            witnesses = [e for e in said if e.holding == holding and e.witness]
            for each in witnesses:
                same = sum(e.digest == each.digest for e in witnesses)
                assert 2 * same <= len(witnesses) or each.rank not in verdict.wrong
