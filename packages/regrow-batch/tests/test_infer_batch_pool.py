"""Rows go to whom they should, and workers are trusted as they deserve."""

import time
from pathlib import Path

import pytest

from regrow.core.errors import UsageError
from regrow_batch.answers import Tokens
from regrow_batch.attendance import Attendance
from regrow_batch.pool import Pool, PoolPolicy
from regrow_batch.tally import MOST_BUCKETS, MOST_REASONS, Tally


def pool_of(*urls: str, cap: int = 4, **more: float) -> Pool:
    """A pool of workers that serve."""
    pool = Pool(PoolPolicy(cap=cap, failures=3, **more))  # type: ignore[arg-type]
    for url in urls:
        pool.join(url, 0.0)
    for url in pool.due_probes(0.0):
        pool.probed(url, "", 0.0, 0.5)
    return pool


def standing(pool: Pool) -> str:
    return str(pool.workers["a"].standing)


def test_a_worker_gets_no_row_before_it_has_answered() -> None:
    pool = Pool(PoolPolicy())
    pool.join("a", 0.0)
    assert pool.assign(10) is None
    assert pool.due_probes(0.0) == ["a"]
    assert pool.due_probes(0.0) == [], "it was asked twice at once"
    pool.probed("a", "is not up", 0.0, 0.0)
    assert pool.assign(10) is None and list(pool.complaints()) == ["worker a is not up"]
    assert pool.due_probes(pool.next_at()) == ["a"]
    pool.probed("a", "", 1.0, 0.0)
    assert pool.assign(10) == "a"


def test_the_one_with_the_least_outstanding_tokens_gets_the_row() -> None:
    pool = pool_of("a", "b")
    assert pool.assign(100) == "a"
    assert [pool.assign(10) for _ in range(3)] == ["b", "b", "b"]
    pool.release("a", 100)
    assert pool.assign(10) == "a"


def test_nobody_has_more_rows_than_its_cap() -> None:
    pool = pool_of("a", cap=2)
    pool.join("a", 0.0, cap=3)
    assert [pool.assign(1) for _ in range(4)] == ["a", "a", "a", None]
    pool.release("a", 1)
    assert pool.assign(1) == "a"


def test_a_row_is_not_given_again_to_who_failed_it_unless_there_is_no_other() -> None:
    pool = pool_of("a", "b", cap=1)
    assert pool.assign(1, avoid={"a"}) == "b"
    assert pool.assign(1, avoid={"a"}) is None, "b is busy, and the better one"
    pool.drain("b", 0.0, grace=1.0)
    assert pool.assign(1, avoid={"a"}) == "a"


def test_the_same_prefix_prefers_the_same_worker_until_that_is_loaded() -> None:
    pool = pool_of("a", "b", "c", cap=100, slack_tokens=50)
    homes = {pool.assign(1, prefix=b"one") for _ in range(10)}
    assert len(homes) == 1
    assert len({pool.assign(1, prefix=b"%d" % number) for number in range(30)}) == 3
    (home,) = homes
    others = {pool.assign(20, prefix=b"one") for _ in range(20)} - homes
    assert home is not None and others, "a loaded worker was preferred without bound"


def test_failures_in_a_row_break_a_worker_and_one_row_tries_it_again() -> None:
    pool = pool_of("a", first_wait=1.0)
    for _ in range(3):
        pool.assign(1)
    for _ in range(3):
        pool.failed("a", "broke", 10.0, 1.0)
        pool.release("a", 1)
    assert standing(pool) == "broken"
    assert pool.assign(1) is None
    assert pool.next_at() == 11.0
    assert pool.due_probes(11.0) == ["a"]
    pool.probed("a", "", 11.0, 1.0)
    assert [pool.assign(1), pool.assign(1)] == ["a", None], "a worker that was broken is tried with one row"
    pool.failed("a", "broke", 12.0, 1.0)
    pool.release("a", 1)
    assert pool.next_at() == 14.0, "the wait doubles"
    pool.due_probes(14.0)
    pool.probed("a", "", 14.0, 1.0)
    assert pool.assign(1) == "a"
    pool.succeeded("a", Tokens(answer=5))
    pool.release("a", 1)
    assert standing(pool) == "serving"
    assert (pool.workers["a"].done, pool.workers["a"].spent.answer) == (1, 5)


def test_late_failures_of_a_broken_worker_do_not_lengthen_its_wait() -> None:
    pool = pool_of("a", cap=32, first_wait=1.0)
    for _ in range(30):
        pool.failed("a", "broke", 0.0, 1.0)
    assert pool.next_at() == 1.0


def test_a_success_between_failures_keeps_a_worker() -> None:
    pool = pool_of("a")
    for _ in range(10):
        pool.failed("a", "stumbled", 0.0, 1.0)
        pool.succeeded("a", Tokens())
    assert standing(pool) == "serving"


def test_who_says_that_it_is_busy_gets_fewer_rows_and_later_more_again() -> None:
    pool = pool_of("a", cap=8)
    for _ in range(8):
        pool.assign(1)
    for _ in range(4):
        pool.busy("a", "busy", 0.0, 0.5)
        pool.release("a", 1)
    assert pool.workers["a"].limit < 8
    assert standing(pool) == "serving"
    for _ in range(100):
        pool.succeeded("a", Tokens())
    assert pool.workers["a"].limit == 8


def test_who_has_to_go_gets_no_more_rows_and_leaves_when_the_last_is_done() -> None:
    pool = pool_of("a", "b")
    pool.assign(1)
    assert pool.drain("a", 0.0, grace=5.0)
    assert [pool.assign(1) for _ in range(5)] == ["b"] * 4 + [None]
    assert pool.overdue(4.9) == [] and pool.overdue(5.0) == ["a"]
    assert pool.overdue(6.0) == [] and pool.next_at() == float("inf"), "it was named twice"
    pool.succeeded("a", Tokens(answer=7))
    pool.release("a", 1)
    assert "a" not in pool.workers
    assert [(each.url, each.done) for each in pool.departed] == [("a", 1)]
    assert not pool.drain("a", 6.0, grace=1.0)


def test_who_was_to_go_and_is_wanted_again_is_asked_first() -> None:
    pool = pool_of("a")
    pool.assign(1)
    pool.drain("a", 0.0, grace=5.0)
    pool.join("a", 1.0)
    assert pool.overdue(100.0) == []
    assert pool.assign(1) is None
    assert pool.due_probes(1.0) == ["a"]
    pool.probed("a", "", 1.0, 0.5)
    assert pool.assign(1) == "a"


def test_of_who_left_and_came_back_both_times_are_remembered() -> None:
    pool = Pool(PoolPolicy())
    for _ in range(2):
        pool.join("a", 0.0)
        assert pool.due_probes(0.0) == ["a"]
        pool.probed("a", "", 0.0, 0.5)
        assert pool.assign(1) == "a"
        pool.succeeded("a", Tokens(answer=1))
        pool.release("a", 1)
        pool.drain("a", 0.0, grace=0.0)
    assert [(each.url, each.done) for each in pool.departed] == [("a", 2)]


# --- the list of workers, which is watched ----------------------------------------------------------------------


def test_a_list_is_followed_and_what_came_by_other_ways_is_left_alone(tmp_path: Path) -> None:
    pool, said = Pool(PoolPolicy()), list[str]()
    attendance = Attendance(pool, grace=5.0, changed=lambda: None, say=said.append)
    path = tmp_path / "pool.txt"
    attendance.join("http://own:1")
    path.write_text("http://a:1\nhttp://b:1 cap=3\n")
    attendance.look(path)
    assert {url: each.cap for url, each in pool.workers.items()} == {
        "http://own:1": 32,
        "http://a:1": 32,
        "http://b:1": 3,
    }
    path.write_text("http://b:1 cap=7\n")
    attendance.look(path)
    assert {url: each.cap for url, each in pool.workers.items()} == {"http://own:1": 32, "http://b:1": 7}
    assert "worker http://a:1 is no longer listed: it may finish its rows within 5 s" in said


def test_a_list_that_is_wrong_missing_or_just_being_written_changes_nothing(tmp_path: Path) -> None:
    pool = Pool(PoolPolicy())
    attendance = Attendance(pool, grace=5.0, changed=lambda: None, say=lambda sentence: None)
    path = tmp_path / "pool.txt"
    path.write_text("http://a:1\n")
    attendance.look(path)
    path.write_text("nonsense\n")
    with pytest.raises(UsageError, match="pool.txt, line 1: 'nonsense' is not the address"):
        attendance.look(path)
    path.unlink()
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        attendance.look(path)
    path.write_text("")
    attendance.look(path)
    assert list(pool.workers) == ["http://a:1"]
    attendance.look(path)
    assert list(pool.workers) == [], "an empty list that stays is meant"


# --- counts ------------------------------------------------------------------------------------------------------


def test_a_rate_is_that_of_late_and_tells_when_it_ends() -> None:
    tally = Tally(1000, before=100)
    for tenth in range(1, 301):
        tally.result(tenth / 10)
    assert tally.rate(30.0) == pytest.approx(10.0, rel=0.1)
    assert tally.left == 600
    assert tally.remaining(30.0) == pytest.approx(60.0, rel=0.1)
    assert Tally(5).remaining(1.0) is None


def test_counts_of_a_long_batch_stay_few() -> None:
    tally = Tally(10)
    for hour in range(200):
        tally.result(hour * 3600.0)
        tally.serving(hour * 3600.0, 3)
    assert len(tally.buckets) <= MOST_BUCKETS and len(tally.workers) == len(tally.buckets)
    assert sum(tally.buckets) == 200
    for number in range(1000):
        tally.retried(f"reason {number}")
    assert len(tally.retries) <= MOST_REASONS + 1 and tally.retries.total() == 1000


def test_a_worker_belongs_while_it_renews_its_lease_and_comes_back_when_it_is_heard_again() -> None:
    said: list[str] = []
    pool = Pool(PoolPolicy())
    attendance = Attendance(pool, grace=5.0, changed=lambda: None, say=said.append)
    attendance.join("listed")
    now = time.monotonic()
    assert attendance.renew("a", 3, 10.0, again=False)
    attendance.end_leases(now + 9.0)
    assert pool.workers["a"].cap == 3
    attendance.end_leases(time.monotonic() + 11.0)
    assert "a" not in pool.workers and "listed" in pool.workers
    assert attendance.renew("a", 3, 10.0, again=True) and "a" in pool.workers
    assert [sentence.partition(" has ")[2] for sentence in said] == [
        "announced itself",
        "not announced itself again: it gets no more rows",
        "announced itself",
    ]


def test_a_worker_that_was_sent_away_does_not_come_back_by_renewing_its_lease() -> None:
    pool = pool_of()
    attendance = Attendance(pool, grace=5.0, changed=lambda: None, say=lambda _: None)
    attendance.renew("a", 0, 10.0, again=False)
    pool.probed("a", "", 0.0, 0.0)
    assert pool.assign(1) == "a"
    attendance.drain("a")
    assert attendance.renew("a", 0, 10.0, again=True), "it has a row yet"
    assert standing(pool) == "leaving"
    pool.release("a", 1)
    assert not attendance.renew("a", 0, 10.0, again=True)
    assert not pool.workers and not attendance.leases
    assert attendance.renew("a", 0, 10.0, again=False), "another of that address"
    assert attendance.drain("a", 0.0, leased=True) and not attendance.leases
    assert not attendance.drain("a", 0.0, leased=True)
