"""One suite for every store: ours on one agent and on three, torch's TCPStore and torch's HashStore."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.process.store_agents import agents
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed import DistError, DistStoreError, QueueEmptyError

SOON = timedelta(milliseconds=150)
PATIENCE = timedelta(seconds=20)
Maker = Callable[[], Any]


class SettledTCPStore(TCPStore):
    """torch's own sends a write and does not wait until it is done; a question after it does."""

    def set(self, key: str, value: Any) -> None:
        super().set(key, value)
        super().check([])

    def append(self, key: str, value: Any) -> None:
        super().append(key, value)  # type: ignore[misc]
        super().check([])

    def queue_push(self, key: str, value: Any) -> None:
        super().queue_push(key, value)
        super().check([])

    def multi_set(self, keys: list[str], values: Any) -> None:
        super().multi_set(keys, values)  # type: ignore[misc]
        super().check([])


@pytest.fixture(params=["ours-1", "ours-3", "tcp", "hash"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    """Makes one more client of the same store; ours each time of another node."""
    kind, _, count = request.param.partition("-")
    if kind == "ours":
        made: list[Any] = []
        with agents(tmp_path, int(count)) as running:

            def ours() -> Any:
                store = running.client(len(made) % int(count))
                store.set_timeout(PATIENCE)
                made.append(store)
                return store

            yield ours
            for store in made:
                store.close()
    elif kind == "tcp":
        root = TCPStore("127.0.0.1", 0, None, True, timeout=PATIENCE, wait_for_workers=False)
        made = [root]

        def tcp() -> Any:
            made.append(SettledTCPStore("127.0.0.1", root.port, None, False, timeout=PATIENCE))
            return made[-1]

        yield tcp
    else:
        store = HashStore()
        store.set_timeout(PATIENCE)
        yield lambda: store


def kind(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["client"])


def not_for(request: pytest.FixtureRequest, which: str, why: str) -> None:
    if kind(request) == which:
        pytest.skip(f"torch's own deviates: {why}")


# --- values -----------------------------------------------------------------------------------------------------


def test_what_one_writes_all_can_read(client: Maker) -> None:
    writer, *readers = [client() for _ in range(4)]
    for number in range(30):
        writer.set(f"k{number}", f"v{number}")
    for reader in readers:
        assert [reader.get(f"k{number}") for number in range(30)] == [f"v{number}".encode() for number in range(30)]


def test_any_bytes_are_kept_and_empty_ones_are_a_value(client: Maker) -> None:
    one, two = client(), client()
    for key, value in {"all": bytes(range(256)), "none": b"", "large": b"\x00\xff" * 200_000}.items():
        one.set(key, value)
        assert two.get(key) == value
    assert two.check(["none"])


def test_a_value_that_was_read_everywhere_can_be_overwritten(client: Maker) -> None:
    clients = [client() for _ in range(3)]
    for turn in range(6):
        for number in range(10):
            clients[turn % 3].set(f"k{number}", f"{turn}")
            assert [each.get(f"k{number}") for each in clients] == [f"{turn}".encode()] * 3


def test_reading_waits_for_the_writer(client: Maker) -> None:
    readers, writer = [client() for _ in range(3)], client()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(reader.get, "late") for reader in readers]
        writer.set("other", "x")
        assert not any(future.done() for future in waiting)
        writer.set("late", "here")
        assert [future.result(20) for future in waiting] == [b"here"] * 3


def test_reading_gives_up_at_the_timeout(client: Maker) -> None:
    reader = client()
    reader.set_timeout(SOON)
    assert reader.timeout == SOON
    with pytest.raises(DistStoreError, match="(?i)wait timeout"):
        reader.get("never")
    with pytest.raises(DistStoreError):
        reader.multi_get(["never"])
    reader.set_timeout(PATIENCE)  # what is there may take a busy machine longer
    reader.set("now", "x")
    assert reader.get("now") == b"x"


def test_waiting_needs_all_keys_and_has_its_own_timeout(client: Maker) -> None:
    waiter, writer = client(), client()
    writer.set("a", "1")
    with pytest.raises(DistStoreError, match="(?i)wait timeout"):
        waiter.wait(["a", "b"], SOON)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(waiter.wait, ["a", "b"])
        writer.set("b", "2")
        assert waiting.result(20) is None
    waiter.wait(["a"], PATIENCE)
    waiter.wait([])


def test_check_sees_what_is_there_and_what_is_gone(client: Maker) -> None:
    one, two = client(), client()
    assert not two.check(["a"])
    one.set("a", "1")
    assert two.check(["a"])
    assert not two.check(["a", "b"])
    assert two.get("a") == b"1"
    assert one.delete_key("a")
    assert not two.check(["a"])
    assert two.check([])


def test_a_deleted_key_is_gone_for_all(client: Maker) -> None:
    one, two = client(), client()
    one.set("a", "1")
    assert two.get("a") == b"1"
    assert two.delete_key("a")
    assert not one.delete_key("a")
    one.set_timeout(SOON)
    with pytest.raises(DistStoreError):
        one.get("a")
    one.set_timeout(PATIENCE)
    two.set("a", "2")
    assert one.get("a") == b"2"


# --- changes ----------------------------------------------------------------------------------------------------


def test_counters_count(client: Maker) -> None:
    one, two = client(), client()
    assert one.add("n", 3) == 3
    assert two.add("n", -5) == -2
    assert one.add("n", 0) == -2
    assert two.get("n") == b"-2"
    one.set("n", "40")
    assert two.add("n", 2) == 42


def test_every_addition_at_the_same_time_gets_a_number_of_its_own(client: Maker) -> None:
    clients = [client() for _ in range(6)]

    def count(each: Any) -> list[int]:
        return [each.add("n", 1) for _ in range(25)]

    with ThreadPoolExecutor(len(clients)) as pool:
        numbers = [number for mine in pool.map(count, clients) for number in mine]
    assert sorted(numbers) == list(range(1, 151))
    assert clients[0].get("n") == b"150"


def test_text_is_no_counter(client: Maker, request: pytest.FixtureRequest) -> None:
    not_for(request, "tcp", "it hangs up on the client, whose later requests all fail")
    one, two = client(), client()
    one.set("n", "text")
    with pytest.raises(ValueError):
        two.add("n", 1)
    one.set("n", "12 apples")
    assert two.add("n", 1) == 13


def test_compare_and_set(client: Maker) -> None:
    one, two = client(), client()
    assert one.compare_set("k", "x", "y") == b"x"
    assert not two.check(["k"])
    assert two.compare_set("k", "", "1") == b"1"
    assert one.get("k") == b"1"
    assert one.compare_set("k", "0", "2") == b"1"
    assert two.compare_set("k", "1", "2") == b"2"
    assert one.get("k") == b"2"


def test_one_of_many_wins_a_compare_and_set(client: Maker) -> None:
    clients = [client() for _ in range(6)]
    for turn in range(5):

        def claim(number: int, key: str = f"k{turn}") -> bytes:
            return bytes(clients[number].compare_set(key, "", str(number)))

        with ThreadPoolExecutor(len(clients)) as pool:
            assert len(set(pool.map(claim, range(6)))) == 1


def test_appending(client: Maker) -> None:
    one, two = client(), client()
    one.append("k", "a")
    assert two.get("k") == b"a"
    two.append("k", b"\x00b")
    assert one.get("k") == b"a\x00b"
    assert one.has_extended_api()


def test_several_values_at_once(client: Maker) -> None:
    one, two = client(), client()
    keys = [f"k{number}" for number in range(20)]
    one.multi_set(keys, [f"v{number}" for number in range(20)])
    assert two.multi_get(keys[::-1]) == [f"v{number}".encode() for number in range(20)][::-1]
    assert two.multi_get([]) == []
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(two.multi_get, ["k0", "late"])
        one.set("late", "x")
        assert waiting.result(20) == [b"v0", b"x"]


def test_as_many_values_as_keys(client: Maker, request: pytest.FixtureRequest) -> None:
    not_for(request, "hash", "it takes the first values and says nothing")
    with pytest.raises(DistStoreError):
        client().multi_set(["a"], ["1", "2"])


# --- queues -----------------------------------------------------------------------------------------------------


def test_a_queue_gives_in_order_what_was_put_in(client: Maker) -> None:
    one, two = client(), client()
    for value in (b"1", b"", b"3"):
        one.queue_push("q", value)
    assert two.queue_len("q") == 3
    assert [two.queue_pop("q") for _ in range(3)] == [b"1", b"", b"3"]
    assert one.queue_len("q") == 0
    with pytest.raises(QueueEmptyError):
        one.queue_pop("q", False)


def test_taking_from_an_empty_queue_waits(client: Maker) -> None:
    taker, giver = client(), client()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(taker.queue_pop, "q")
        giver.queue_push("q", "a")
        assert waiting.result(20) == b"a"
    taker.set_timeout(SOON)
    with pytest.raises(DistStoreError, match="(?i)wait timeout"):
        taker.queue_pop("q")


def test_many_who_take_from_an_empty_queue_get_one_value_each(client: Maker, request: pytest.FixtureRequest) -> None:
    not_for(request, "tcp", "one value wakes all who wait, and those who come too late are told that it is empty")
    takers, giver = [client() for _ in range(3)], client()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(taker.queue_pop, "q") for taker in takers]
        for value in "abc":
            giver.queue_push("q", value)
        assert sorted(future.result(20) for future in waiting) == [b"a", b"b", b"c"]


def test_a_queue_is_there_while_it_holds_something(client: Maker) -> None:
    one, two = client(), client()
    assert not two.check(["q"])
    with pytest.raises(DistStoreError):
        two.wait(["q"], SOON)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(two.wait, ["q"])
        one.queue_push("q", "x")
        waiting.result(20)
    assert two.check(["q"])
    assert not one.delete_key("q")
    assert two.queue_pop("q") == b"x"
    assert not two.check(["q"])


# --- the keys ---------------------------------------------------------------------------------------------------


def test_keys_are_listed_and_counted_without_queues(client: Maker) -> None:
    one, two = client(), client()
    before = two.num_keys()
    for number in range(12):
        one.set(f"k{number}", "x")
    one.queue_push("q", "x")
    assert {f"k{number}" for number in range(12)} == set(two.list_keys())
    assert two.num_keys() - before == 12
    two.delete_key("k3")
    assert one.num_keys() - before == 11


# --- as torch's C++ uses it -------------------------------------------------------------------------------------


def test_one_client_serves_many_threads(client: Maker, request: pytest.FixtureRequest) -> None:
    not_for(request, "tcp", "a thread that waits holds up the others of its client")
    inner = [client() for _ in range(3)]
    stores: list[Any] = [PrefixStore("a", PrefixStore("b", each)) for each in inner]
    barrier = threading.Barrier(9)

    def use(number: int) -> list[bytes]:
        store = stores[number % 3]
        barrier.wait(20)
        store.set(f"{number}", f"v{number}")
        store.wait([f"{other}" for other in range(9)], PATIENCE)
        store.append("all", "x")
        found: list[bytes] = [store.get(f"{other}") for other in range(9)] + store.multi_get(["0", "8"])
        return found

    with ThreadPoolExecutor(9) as pool:
        results = list(pool.map(use, range(9)))
    assert results == [[f"v{other}".encode() for other in range(9)] + [b"v0", b"v8"]] * 9
    assert stores[0].get("all") == b"x" * 9


def test_through_prefix_stores(client: Maker) -> None:
    one, two = client(), client()
    store: Any = PrefixStore("a", PrefixStore("b", one))
    store.set("k", "v")
    store.append("k", "w")
    store.multi_set(["m", "n"], ["1", "2"])
    assert two.get("b/a/k") == b"vw"
    assert store.multi_get(["n", "m"]) == [b"2", b"1"]
    assert store.add("c", 2) == 2
    assert store.compare_set("k", "vw", "x") == b"x"
    assert store.num_keys() == two.num_keys()
    assert store.delete_key("k")
    assert not two.check(["b/a/k"])
    assert store.has_extended_api()


def test_a_timeout_set_through_a_prefix_store_counts(client: Maker) -> None:
    store = client()
    PrefixStore("p", store).set_timeout(SOON)
    with pytest.raises(DistStoreError):
        PrefixStore("p", store).get("never")


def test_a_barrier_of_torchs(client: Maker) -> None:
    clients = [client() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(each.barrier, "b", 4, PATIENCE) for each in clients[:3]]
        with pytest.raises(DistError):
            clients[3].wait(["nobody writes this"], SOON)
        assert not any(future.done() for future in waiting)
        clients[3].barrier("b", 4, PATIENCE)
        assert [future.result(20) for future in waiting] == [None] * 3


def test_a_clone_is_the_same_store(client: Maker) -> None:
    one = client()
    one.clone().set("a", "1")
    assert one.get("a") == b"1"
