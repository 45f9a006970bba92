"""Choice of the entries to evict and to make: no needed entry goes, and the most urgent is made first."""

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from regrow.data.cache.keeping import Decision, Keeping
from regrow.data.cache.layout import Key


def lane(share: int, steps: range, shares: int = 2, size: int = 10) -> dict[Key, int]:
    return {Key(step, share, shares): size for step in steps}


def fill(
    keeping: Keeping, readers: list[Key], there: dict[Key, int], size: int = 10, until: int | None = None
) -> list[Key]:
    """Do what is decided until nothing is left to do; what was made, in order."""
    made: list[Key] = []
    while True:
        decision = keeping.decide(readers, there, estimate=size, until=until)
        for key in decision.evict:
            del there[key]
        if not decision.make:
            return made
        for key in decision.make:
            there[key] = size
            made.append(key)
        assert len(made) < 10_000


def test_the_lanes_are_made_side_by_side_from_where_their_readers_stand() -> None:
    made = fill(Keeping(60), [Key(4, 0, 2), Key(4, 1, 2)], {})
    assert made == [Key(step, share, 2) for step in (4, 5, 6) for share in (0, 1)]


def test_who_is_nearer_to_its_next_step_comes_first() -> None:
    made = fill(Keeping(60), [Key(9, 0, 2), Key(4, 1, 2)], {})
    assert made == [Key(9, 0, 2), Key(4, 1, 2), Key(10, 0, 2), Key(5, 1, 2), Key(11, 0, 2), Key(6, 1, 2)]


def test_nothing_is_made_past_the_end_or_for_nobody() -> None:
    assert fill(Keeping(1000), [Key(4, 0, 1)], {}, until=6) == [Key(4, 0, 1), Key(5, 0, 1)]
    assert Keeping(1000).decide([], {}, estimate=10) == Decision([], [])


def test_what_is_there_is_not_made_again() -> None:
    assert fill(Keeping(50), [Key(0, 0, 2)], lane(0, range(0, 3))) == [Key(3, 0, 2), Key(4, 0, 2)]


def test_as_many_are_named_as_are_asked_for_and_fit() -> None:
    keeping = Keeping(50)
    assert keeping.decide([Key(0, 0, 1)], {}, estimate=10, limit=3).make == [Key(step, 0, 1) for step in range(3)]
    assert keeping.decide([Key(0, 0, 1)], {}, estimate=10, limit=99).make == [Key(step, 0, 1) for step in range(5)]


def test_what_is_underway_takes_room_and_is_not_named_again() -> None:
    decision = Keeping(30).decide([Key(0, 0, 1)], {}, estimate=10, underway=[Key(0, 0, 1), Key(1, 0, 1)], limit=9)
    assert decision.make == [Key(2, 0, 1)]


def test_two_steps_behind_a_reader_stay_and_older_ones_go_oldest_first() -> None:
    there = lane(0, range(0, 10))
    made = fill(Keeping(100), [Key(8, 0, 2)], there)
    assert made == [Key(step, 0, 2) for step in range(10, 16)]
    assert sorted(key.step for key in there) == list(range(6, 16))


def test_a_budget_that_is_small_keeps_the_next_step_rather_than_those_behind() -> None:
    there = lane(0, range(6, 8))
    fill(Keeping(20), [Key(8, 0, 2)], there)
    assert sorted(key.step for key in there) == [8, 9]


def test_lanes_that_nobody_reads_any_more_go_first() -> None:
    there = lane(0, range(0, 3)) | lane(1, range(0, 6))
    decision = Keeping(100).decide([Key(2, 0, 2)], there, estimate=20)
    assert decision == Decision([Key(0, 1, 2)], [Key(3, 0, 2)])


def test_nothing_goes_before_room_is_short() -> None:
    there = lane(0, range(0, 3)) | lane(1, range(0, 6))
    assert Keeping(1000).decide([Key(2, 0, 2)], there, estimate=10).evict == []


def test_who_goes_back_finds_what_is_behind_and_what_is_far_ahead_goes() -> None:
    there = lane(0, range(98, 108))
    made = fill(Keeping(100), [Key(50, 0, 2)], there)
    assert made == [Key(step, 0, 2) for step in range(50, 60)]
    assert sorted(key.step for key in there) == list(range(50, 60))


def test_who_waits_comes_first_though_others_stand_before_it() -> None:
    readers = [Key(5, share, 8) for share in range(8)]
    there = lane(0, range(5, 6), shares=8) | lane(1, range(5, 6), shares=8)
    decision = Keeping(20).decide(readers, there, estimate=10, wants=[Key(5, 7, 8)])
    assert decision.make == [Key(5, 7, 8)]
    assert len(decision.evict) == 1


def test_an_entry_larger_than_the_budget_is_made_alone() -> None:
    there: dict[Key, int] = {}
    keeping = Keeping(5)
    assert fill(keeping, [Key(0, 0, 1)], there) == [Key(0, 0, 1)]
    assert fill(keeping, [Key(1, 0, 1)], there) == [Key(1, 0, 1)]
    assert list(there) == [Key(1, 0, 1)]


def test_an_entry_that_turned_out_too_large_is_not_made_again_and_again() -> None:
    keeping = Keeping(35)
    there = lane(0, range(0, 3))
    readers = [Key(0, 0, 2)]
    assert keeping.decide(readers, there, estimate=5).make == [Key(3, 0, 2)]
    there[Key(3, 0, 2)] = 20
    assert keeping.decide(readers, there, estimate=5) == Decision([Key(3, 0, 2)], [])
    del there[Key(3, 0, 2)]
    assert keeping.decide(readers, there, estimate=5) == Decision([], [])
    # There is room for it once the reader has moved on.
    there = lane(0, range(2, 3))
    assert keeping.decide([Key(2, 0, 2)], there, estimate=5) == Decision([], [Key(3, 0, 2)])


places = st.builds(Key, st.integers(0, 30), st.integers(0, 2), st.just(3))
sizes = st.integers(1, 30)


@given(
    readers=st.lists(places, max_size=5),
    there=st.dictionaries(places, sizes, max_size=40),
    budget=st.integers(1, 300),
    estimate=sizes,
    wants=st.lists(places, max_size=2),
    until=st.none() | st.integers(0, 32),
    limit=st.integers(1, 4),
)
@example(
    readers=[],
    there={Key(1, 0, 3): 2, Key(1, 1, 3): 1},
    budget=2,
    estimate=1,
    wants=[Key(0, 0, 3), Key(1, 0, 3)],
    until=None,
    limit=1,
)
@example(
    readers=[Key(0, 0, 3), Key(1, 1, 3)],
    there={Key(1, 0, 3): 1, Key(2, 1, 3): 1},
    budget=2,
    estimate=1,
    wants=[],
    until=2,
    limit=1,
)
def test_any_decision_fits_and_spares_what_is_needed(
    readers: list[Key],
    there: dict[Key, int],
    budget: int,
    estimate: int,
    wants: list[Key],
    until: int | None,
    limit: int,
) -> None:
    keeping = Keeping(budget)
    evict, make = keeping.decide(readers, there, estimate=estimate, until=until, wants=wants, limit=limit)
    assert set(evict) <= set(there) and not set(make) & set(there)
    assert len(set(evict)) == len(evict) and len(set(make)) == len(make) <= limit
    left = {key: size for key, size in there.items() if key not in evict}
    total = sum(left.values()) + estimate * len(make)
    assert total <= budget or len(left) + len(make) == 1
    # No more goes than must.
    if evict:
        assert total + there[evict[-1]] > budget
    # What readers need now and next is the last to go: it goes only where these alone are too much.
    near = [key for reader in readers for key in (reader, reader._replace(step=reader.step + 1))]
    urgent = {key for key in [*wants, *near] if until is None or key.step < until or key in wants}
    if urgent & set(evict):
        assert sum(there.get(key, estimate) for key in urgent) > budget
        assert set(left) <= urgent
    # There is something to make wherever a reader's own step is missing and would fit.
    missing = [key for key in urgent if key not in there]
    if missing and sum(there.get(key, estimate) for key in urgent) <= budget:
        assert make


@given(
    steps=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    true_sizes=st.lists(sizes, min_size=7, max_size=7),
    budget=st.integers(1, 400),
    estimate=sizes,
)
def test_making_and_evicting_come_to_an_end(
    steps: list[int], true_sizes: list[int], budget: int, estimate: int
) -> None:
    keeping = Keeping(budget)
    readers = [Key(step, share, 3) for share, step in enumerate(steps)]
    there: dict[Key, int] = {}
    for _ in range(2_000):
        decision = keeping.decide(readers, there, estimate=estimate)
        for key in decision.evict:
            del there[key]
        if not decision.make and not decision.evict:
            break
        for key in decision.make:
            there[key] = true_sizes[(key.step * 3 + key.share) % 7]
    else:
        pytest.fail("it goes on for ever")
    assert there
    assert sum(there.values()) <= budget or len(there) == 1


@dataclass
class _Worker:
    at: Key
    waits: bool = False
    read: list[int] = field(default_factory=list)


class Node(RuleBasedStateMachine):
    """Readers that walk, wait, go back, leave and come, over entries whose sizes nobody knows before."""

    budget = 100
    end = 40

    def __init__(self) -> None:
        super().__init__()
        self.keeping = Keeping(self.budget)
        self.there: dict[Key, int] = {}
        self.workers = {share: _Worker(Key(0, share, 3)) for share in range(3)}

    def produce(self) -> bool:
        wants = [worker.at for worker in self.workers.values() if worker.waits and worker.at not in self.there]
        readers = [worker.at for worker in self.workers.values()]
        decision = self.keeping.decide(readers, self.there, estimate=8, until=self.end, wants=wants)
        for key in decision.evict:
            del self.there[key]
        for key in decision.make:
            self.there[key] = 5 + (key.step * 7 + key.share * 3) % 11
        for worker in self.workers.values():
            if worker.waits and worker.at in self.there:
                worker.waits = False
        return bool(decision.make or decision.evict)

    @rule(times=st.integers(1, 5))
    def make(self, times: int) -> None:
        for _ in range(times):
            self.produce()

    @rule(share=st.integers(0, 2))
    def read(self, share: int) -> None:
        worker = self.workers.get(share)
        if worker is None or worker.at.step >= self.end:
            return
        if worker.at in self.there:
            worker.at = worker.at._replace(step=worker.at.step + 1)
        else:
            worker.waits = True

    @rule(share=st.integers(0, 2), back=st.integers(1, 30))
    def go_back(self, share: int, back: int) -> None:
        if share in self.workers:
            at = self.workers[share].at
            self.workers[share] = _Worker(at._replace(step=max(0, at.step - back)))

    @rule(share=st.integers(0, 2))
    def leave(self, share: int) -> None:
        self.workers.pop(share, None)

    @rule(share=st.integers(0, 2), step=st.integers(0, 39))
    def come(self, share: int, step: int) -> None:
        self.workers.setdefault(share, _Worker(Key(step, share, 3)))

    @precondition(lambda self: any(worker.waits for worker in self.workers.values()))
    @rule()
    def nobody_waits_for_ever(self) -> None:
        for _ in range(60):
            if not self.produce():
                break
        assert not any(worker.waits for worker in self.workers.values())

    @invariant()
    def after_one_decision_more_the_budget_holds(self) -> None:
        readers = [worker.at for worker in self.workers.values()]
        evict = self.keeping.decide(readers, self.there, estimate=8, until=self.end).evict
        left = sum(size for key, size in self.there.items() if key not in evict)
        assert left <= self.budget


Node.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNode = Node.TestCase
