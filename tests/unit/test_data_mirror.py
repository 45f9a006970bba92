"""What a mirror keeps, and what it is sent."""

from pathlib import Path

import pytest

from regrow.agent.data_mirror import Mirror, Place
from regrow.data.cache.layout import Key
from regrow.data.cache.offers import Offer, Offers

A, B = "a" * 32, "b" * 32


def store(
    mirror: Mirror, step: int, *, node: str = "n1", identity: str = A, size: int = 40, keep_from: int = 0
) -> bool:
    place = Place(node, identity, f"s{step}.entry", step)
    path = mirror.reserve(place, size, keep_from)
    if path is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    mirror.keep(place, size)
    return True


def kept(mirror: Mirror, identity: str = A) -> list[str]:
    return sorted(mirror.entries(identity))


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path, budget=100, nodes=2)


def test_entries_are_kept_until_the_budget_is_spent(mirror: Mirror, tmp_path: Path) -> None:
    assert [store(mirror, step) for step in range(3)] == [True, True, False]
    assert kept(mirror) == ["s0.entry", "s1.entry"]
    found = mirror.find(A, "s1.entry")
    assert found is not None and found.read_bytes() == b"x" * 40
    assert mirror.find(A, "s2.entry") is None
    assert mirror.find(B, "s1.entry") is None
    assert on_disk(tmp_path) == 80


def test_what_was_passed_makes_room_for_what_comes(mirror: Mirror, tmp_path: Path) -> None:
    for step in range(1, 10):
        assert store(mirror, step, keep_from=step - 1)
        assert on_disk(tmp_path) <= 100
    assert kept(mirror) == ["s8.entry", "s9.entry"]


def test_the_first_step_is_kept_for_the_rehearsal_of_newcomers(mirror: Mirror) -> None:
    assert store(mirror, 0) and store(mirror, 1)
    assert store(mirror, 9, keep_from=9)
    assert kept(mirror) == ["s0.entry", "s9.entry"]


def test_the_budget_is_each_nodes_own_and_nodes_are_counted(mirror: Mirror) -> None:
    assert [store(mirror, step, node="n1") for step in range(2)] == [True, True]
    assert [store(mirror, step + 2, node="n2") for step in range(3)] == [True, True, False]
    assert not store(mirror, 0, node="n3", size=1), "the job has no more nodes"
    assert kept(mirror) == [f"s{step}.entry" for step in range(4)]


def test_another_loader_gives_way_to_the_one_that_is_read(mirror: Mirror, tmp_path: Path) -> None:
    assert store(mirror, 0, identity=B) and store(mirror, 1, identity=B)
    assert store(mirror, 7, identity=A, keep_from=7)
    assert (kept(mirror, A), kept(mirror, B)) == (["s7.entry"], [])
    assert mirror.identities() == {A}
    assert on_disk(tmp_path) == 40


def test_what_is_larger_than_the_budget_drives_nothing_out(mirror: Mirror) -> None:
    assert store(mirror, 0)
    assert not store(mirror, 1, size=101)
    assert not store(mirror, 1, size=101, identity=B)
    assert kept(mirror) == ["s0.entry"]


def test_what_is_on_its_way_counts(mirror: Mirror) -> None:
    first, second = (Place("n1", A, f"s{step}.entry", step) for step in range(2))
    assert mirror.reserve(first, 60, 0) is not None
    assert mirror.reserve(second, 60, 0) is None
    mirror.cancel(first, 60)
    assert mirror.reserve(second, 60, 0) is not None


def test_an_entry_that_comes_again_takes_the_place_of_the_first(mirror: Mirror, tmp_path: Path) -> None:
    assert store(mirror, 0, size=80) and store(mirror, 0, size=90)
    assert on_disk(tmp_path) == 90
    assert mirror.entries(A) == {"s0.entry": 90}


# --- what it is sent ------------------------------------------------------------------------------------------------


def offer(step: int, share: int = 0, size: int = 40) -> Offer:
    return Offer(b"i" * 16, Key(step, share, 2), Path(f"/cache/{step}.{share}"), size)


def send(offers: Offers, budget: int = 100) -> list[tuple[int, int]]:
    """All that goes to the mirror now."""
    sent: list[tuple[int, int]] = []
    while (next_one := offers.next(budget)) is not None:
        offers.sent(next_one)
        sent.append((next_one.key.step, next_one.key.share))
    return sent


def offered(*steps: int) -> Offers:
    offers = Offers()
    for step in steps:
        offers.add(offer(step))
    return offers


def test_what_is_needed_soonest_is_sent_first_however_it_comes() -> None:
    offers = offered(5, 3, 9, 4)
    offers.add(offer(3, share=1))
    assert send(offers, 10_000) == [(3, 0), (3, 1), (4, 0), (5, 0), (9, 0)]
    assert send(offers, 10_000) == [], "once"


def test_no_more_is_sent_than_the_mirror_keeps_and_the_rest_when_there_is_room() -> None:
    offers = offered(*range(1, 7))
    assert send(offers) == [(1, 0), (2, 0)]
    assert offers.sent_bytes == 80
    offers.passed(b"i" * 16, 2)
    assert send(offers) == [(3, 0)]
    offers.passed(b"i" * 16, 6)
    assert (send(offers), offers.sent_bytes) == ([(6, 0)], 40)


def test_the_first_step_stays_for_the_rehearsal_of_newcomers() -> None:
    offers = offered(0, 1, 2)
    assert send(offers) == [(0, 0), (1, 0)]
    offers.passed(b"i" * 16, 2)
    assert (send(offers), offers.sent_bytes) == ([(2, 0)], 80)
    offers.start_again({})
    assert send(offers) == [(0, 0), (2, 0)]


def test_what_does_not_fit_is_not_overtaken_by_what_is_needed_later() -> None:
    offers = Offers()
    offers.add(offer(1, size=101))
    offers.add(offer(2, size=1))
    assert send(offers) == []
    offers.passed(b"i" * 16, 2)
    assert send(offers) == [(2, 0)]


def test_steps_that_were_passed_are_not_offered_again_until_readers_go_back() -> None:
    offers = offered()
    offers.passed(b"i" * 16, 10)
    offers.add(offer(9))
    assert send(offers) == []
    offers.passed(b"i" * 16, 4)
    offers.add(offer(9))
    assert send(offers) == [(9, 0)]


def test_another_mirror_has_nothing() -> None:
    offers = offered(0, 1)
    assert send(offers) == [(0, 0), (1, 0)]
    offers.start_again({})
    assert send(offers) == [(0, 0), (1, 0)]


def test_what_the_mirror_has_of_an_agent_before_this_one_is_not_sent_but_counts() -> None:
    offers = offered(0)
    offers.start_again({(b"i" * 16, Key(step, 0, 2)): size for step, size in ((0, 40), (1, 40), (2, 39))})
    offers.add(offer(1))
    offers.add(offer(2, size=10))
    assert (send(offers), offers.sent_bytes) == ([(2, 0)], 90), "what is of another size is another entry"
    offers.add(offer(1))
    assert offers.next(1000) == offer(1), "it was made again"


def test_what_is_made_again_is_sent_again_and_counts_once() -> None:
    offers = offered(0, 1)
    send(offers)
    offers.add(offer(0, size=50))
    assert send(offers) == [(0, 0)]
    assert offers.sent_bytes == 90


def test_what_is_gone_is_not_sent() -> None:
    offers = offered(0, 1)
    offers.gone(offer(0))
    assert send(offers) == [(1, 0)]
