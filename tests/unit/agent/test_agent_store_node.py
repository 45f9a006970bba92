import asyncio
import random

import pytest
from tests.unit.agent.store_net import Net

from regrow.agent.store.routing import RADIX, home
from regrow.core.ids import Generation
from regrow.core.messages.store import (
    TIMEOUT,
    StoreAdd,
    StoreCheck,
    StoreCompareSet,
    StoreCount,
    StoreDelete,
    StoreGet,
    StoreReply,
    StoreSet,
    StoreWait,
    placed,
)

PATIENCE_S = 60.0
"""For what comes at once unless the whole process is held up."""


async def at_once(net: Net, *requests: tuple[int, object]) -> list[StoreReply]:
    return await asyncio.gather(*(net.ask(node, request) for node, request in requests))  # type: ignore[arg-type]


def home_of(net: Net, key: str) -> int:
    return home(key, len(net.stores), len(net.stores))


async def test_a_key_that_everybody_reads_costs_no_agent_more_than_a_few_questions() -> None:
    for nodes in (8, 64, 300):
        net = Net(nodes)
        waiting = asyncio.create_task(at_once(net, *((node, StoreGet("g1/id", PATIENCE_S)) for node in range(nodes))))
        await asyncio.sleep(0)
        await net.ask(3, StoreSet("g1/id", b"x"))
        assert {reply.value for reply in await waiting} == {b"x"}
        digits = 1 if nodes <= RADIX else 2 if nodes <= RADIX**2 else 3
        assert max(net.asked.values()) <= (RADIX - 1) * digits + 1
        assert sum(net.asked.values()) <= nodes + 1, "every agent asks once, and the writer"


async def test_what_was_read_once_on_a_node_is_not_asked_for_again() -> None:
    net = Net(9)
    await net.ask(0, StoreSet("g1/k", b"x"))
    await at_once(net, *((node, StoreWait(["g1/k"], PATIENCE_S)) for node in range(9)))
    before = sum(net.asked.values())
    for _ in range(3):
        assert {r.value for r in await at_once(net, *((node, StoreGet("g1/k", PATIENCE_S)) for node in range(9)))} == {
            b"x"
        }
    assert sum(net.asked.values()) == before


async def test_what_neighbours_read_costs_the_same_in_any_world() -> None:
    for nodes in (4, 64, 256):
        net = Net(nodes)
        for node in range(nodes):
            await net.ask(node, StoreSet(placed("g1/mesh", node), b"here"))
        assert not net.asked, "each rank's key lives with its own agent"
        for node in range(nodes):
            await net.ask(node, StoreGet(placed("g1/mesh", (node + 1) % nodes), PATIENCE_S))
        assert set(net.asked.values()) == {1}


async def test_an_agent_that_asks_for_one_address_gets_the_others_of_that_node_with_it() -> None:
    net = Net(4, world=8)
    for group in "ab":
        for rank in (2, 3):
            await net.ask(1, StoreSet(placed(f"g1/{group}/{rank}", rank), f"{group}{rank}".encode()))
    assert (await net.ask(3, StoreGet(placed("g1/a/2", 2), PATIENCE_S))).value == b"a2"
    asked = net.asked["a1"]
    for group, rank in (("a", 3), ("b", 2), ("b", 3)):
        reply = net.keepers["a3"].at_once(StoreGet(placed(f"g1/{group}/{rank}", rank), 0.0))
        assert reply == StoreReply(value=f"{group}{rank}".encode())
    await net.ask(1, StoreSet(placed("g1/c/2", 2), b"c2"))
    assert net.keepers["a1"].at_once(StoreGet(placed("g1/c/2", 2), 0.0, has=4), "a3") == StoreReply(
        value=b"c2", keep=True, has=5
    ), "what it has is not told again"
    assert net.asked["a1"] == asked


async def test_a_worker_that_asks_for_one_address_gets_those_of_the_same_group_that_its_agent_knows() -> None:
    net = Net(4, world=8)
    mine, other, elsewhere = placed("g1/a/2", 2), placed("g1/a/3", 3), placed("g1/a/6", 6)
    for key in (mine, other, placed("g1/b/2", 2)):
        await net.ask(1, StoreSet(key, key.encode()))
    await net.ask(3, StoreSet(elsewhere, b"far"))
    keeper = net.keepers["a1"]
    assert keeper.at_once(StoreGet(mine, 0.0)) == StoreReply(value=mine.encode()), "who wants none gets none"
    reply = keeper.at_once(StoreGet(mine, 0.0, has=0))
    assert reply == StoreReply(value=mine.encode(), also={other: other.encode()}, has=2)
    assert (await net.ask(1, StoreGet(elsewhere, PATIENCE_S))).value == b"far"
    reply = keeper.at_once(StoreGet(mine, 0.0, has=2))
    assert reply == StoreReply(value=mine.encode(), also={elsewhere: b"far"}, has=3), "copies too"


async def test_no_more_goes_with_one_answer_than_its_limit_and_the_rest_with_the_next() -> None:
    net = Net(4, world=8)
    for number in range(20):
        await net.ask(1, StoreSet(placed(f"g1/a/{number}", 2), bytes(4000)))
    await net.ask(1, StoreSet(placed("g1/a/20", 2), bytes(5000)))
    reply = net.keepers["a1"].at_once(StoreGet(placed("g1/a/20", 2), 0.0, has=0))
    assert reply is not None and (len(reply.also), reply.has) == (8, 8)
    reply = net.keepers["a1"].at_once(StoreGet(placed("g1/a/0", 2), 0.0, has=16))
    assert reply is not None and (len(reply.also), reply.has) == (4, 21), "what is large is asked for by itself"


async def test_what_an_agent_knows_is_answered_at_once_and_what_it_does_not_is_not() -> None:
    net = Net(4)
    mine, other = placed("g1/k", 2), placed("g1/k", 3)
    keeper = net.keepers["a2"]
    assert keeper.at_once(StoreGet(mine, PATIENCE_S)) is None, "it has to be waited for"
    assert keeper.at_once(StoreSet(mine, b"1")) == StoreReply()
    assert keeper.at_once(StoreGet(mine, 0.0)) == StoreReply(value=b"1")
    assert keeper.at_once(StoreSet(other, b"x")) is None, "it lives elsewhere"
    assert keeper.at_once(StoreGet("g2/k", 0.0)) is None, "nothing is known of that generation"
    await net.ask(3, StoreSet(other, b"x"))
    assert (await net.ask(2, StoreGet(other, PATIENCE_S))).value == b"x"
    assert keeper.at_once(StoreWait([mine, other], 0.0)) == StoreReply(), "of the other it has a copy"


async def test_no_value_is_changed_at_once_of_which_there_are_copies() -> None:
    net = Net(4)
    key = placed("g1/k", 2)
    await net.ask(2, StoreSet(key, b"1"))
    assert (await net.ask(0, StoreGet(key, PATIENCE_S))).value == b"1"
    for change in (StoreSet(key, b"2"), StoreAdd(key, 1), StoreDelete(key), StoreCompareSet(key, b"1", b"2")):
        assert net.keepers["a2"].at_once(change) is None
    assert (await net.ask(2, StoreAdd(key, 1))).number == 2
    assert (await net.ask(0, StoreGet(key, PATIENCE_S))).value == b"2"


async def test_additions_of_all_are_added_up_on_the_way() -> None:
    net = Net(64)
    replies = await at_once(net, *((node, StoreAdd("g1/n", 1)) for node in range(64) for _ in range(8)))
    assert sorted(reply.number for reply in replies) == list(range(1, 513))
    assert max(net.asked.values()) <= 6 * RADIX


async def test_an_overwritten_value_is_seen_nowhere_once_the_writer_has_its_answer() -> None:
    net = Net(20, seed=1)
    await net.ask(0, StoreSet("g1/k", b"0"))
    for turn in range(1, 6):
        await at_once(net, *((node, StoreGet("g1/k", PATIENCE_S)) for node in range(20)))
        await net.ask(turn, StoreSet("g1/k", str(turn).encode()))
        replies = await at_once(net, *((node, StoreGet("g1/k", PATIENCE_S)) for node in range(20)))
        assert {reply.value for reply in replies} == {str(turn).encode()}
    await net.ask(7, StoreDelete("g1/k"))
    assert {r.number for r in await at_once(net, *((node, StoreCheck(["g1/k"])) for node in range(20)))} == {0}


@pytest.mark.parametrize("seed", range(30))
async def test_no_read_is_older_than_what_was_written_before_it_began(seed: int) -> None:
    """Versions of a key only grow; who reads after a write was answered, or after another read, never sees less."""
    net, chance, floor = Net(12, seed=seed), random.Random(seed), {"g1/a": 0, "g1/b": 0}

    async def write(node: int, key: str) -> None:
        for _ in range(6):
            number = (await net.ask(node, StoreAdd(key, 1))).number
            floor[key] = max(floor[key], number)
            for _ in range(chance.randrange(30)):
                await asyncio.sleep(0)

    async def read(node: int) -> None:
        for _ in range(15):
            key = chance.choice(list(floor))
            least = floor[key]
            found = int((await net.ask(node, StoreGet(key, PATIENCE_S))).value)
            assert found >= least, f"{key} was {least} and then {found}"
            floor[key] = max(floor[key], found)
            for _ in range(chance.randrange(10)):
                await asyncio.sleep(0)

    await asyncio.gather(write(0, "g1/a"), write(5, "g1/b"), write(9, "g1/a"), *(read(node) for node in range(12)))
    assert floor == {"g1/a": 12, "g1/b": 6}


@pytest.mark.parametrize("seed", range(30))
async def test_no_address_that_came_with_another_is_older_than_what_was_written_before_it_was_read(seed: int) -> None:
    """As above, for keys of one node, of which copies travel with the answers for others."""
    net, chance = Net(6, seed=seed), random.Random(seed)
    floor = {placed(f"g1/a/{number}", 2): 0 for number in range(6)}

    async def write(key: str) -> None:
        for version in range(1, 4):
            await net.ask(2, StoreSet(key, str(version).encode()))
            floor[key] = version
            for _ in range(chance.randrange(40)):
                await asyncio.sleep(0)

    async def read(node: int) -> None:
        for _ in range(30):
            key = chance.choice(list(floor))
            least = floor[key]
            found = int((await net.ask(node, StoreGet(key, PATIENCE_S))).value)
            assert found >= least, f"{key} was {least} and then {found}"
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)

    await asyncio.gather(*map(write, floor), *(read(node) for node in range(6) if node != 2))
    assert set(floor.values()) == {3}


@pytest.mark.parametrize("seed", range(10))
async def test_one_wins_a_compare_and_set_that_all_have_read(seed: int) -> None:
    net = Net(10, seed=seed)
    await net.ask(0, StoreSet("g1/k", b"free"))
    await at_once(net, *((node, StoreGet("g1/k", PATIENCE_S)) for node in range(10)))
    replies = await at_once(net, *((node, StoreCompareSet("g1/k", b"free", str(node).encode())) for node in range(10)))
    assert len({reply.value for reply in replies}) == 1


async def test_a_wait_ends_at_its_own_deadline_though_another_waits_longer() -> None:
    net = Net(9)
    node = (home_of(net, "g1/k") + 1) % 9
    longer = asyncio.create_task(net.ask(node, StoreGet("g1/k", 600.0)))
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(net.ask(node, StoreGet("g1/k", 0.05)), PATIENCE_S)).error == TIMEOUT
    assert (await asyncio.wait_for(net.ask(node, StoreCheck(["g1/k"])), PATIENCE_S)).number == 0
    await net.ask(node, StoreSet("g1/k", b"x"))
    assert (await longer).value == b"x"


async def test_a_wait_outlives_the_shorter_one_that_it_joined() -> None:
    net = Net(9)
    node = (home_of(net, "g1/k") + 1) % 9
    short = asyncio.create_task(net.ask(node, StoreGet("g1/k", 0.05)))
    await asyncio.sleep(0)
    longer = asyncio.create_task(net.ask(node, StoreGet("g1/k", 20.0)))
    assert (await short).error == TIMEOUT
    await net.ask(node, StoreSet("g1/k", b"x"))
    assert (await longer).value == b"x"


async def test_when_its_last_reader_has_gone_a_question_is_withdrawn() -> None:
    net = Net(9)
    root = home_of(net, "g1/k")
    reading = asyncio.create_task(net.ask((root + 1) % 9, StoreGet("g1/k", 600.0)))
    while not net.keepers[f"a{root}"].table._waiters:
        await asyncio.sleep(0)
    reading.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while net.keepers[f"a{root}"].table._waiters:
            await asyncio.sleep(0)


async def test_keys_without_a_generation_stay_where_they_are_written() -> None:
    net = Net(4)
    await net.ask(2, StoreSet("mine", b"x"))
    assert (await net.ask(1, StoreGet("mine", 0.0))).error == TIMEOUT
    assert (await net.ask(2, StoreGet("mine", 0.0))).value == b"x"


async def test_keys_of_all_agents_are_counted() -> None:
    net = Net(5)
    for number in range(40):
        await net.ask(number % 5, StoreSet(f"g1/{number}", b"x"))
    assert (await net.ask(3, StoreCount("g1/"))).number == 40


async def test_the_home_that_dies_ends_the_wait_with_an_error_that_says_so() -> None:
    net = Net(9)
    root = home_of(net, "g1/k")
    net.dead.add(f"a{root}")
    reply = await asyncio.wait_for(net.ask((root + 1) % 9, StoreGet("g1/k", 600.0)), PATIENCE_S)
    assert f"a{root} has ended" in reply.error
    assert "lost" in (await net.ask((root + 2) % 9, StoreSet("g1/k", b"x"))).error


async def test_an_agent_on_the_way_that_dies_is_gone_around() -> None:
    net = Net(64)
    key = next(f"g1/{number}" for number in range(99) if home_of(net, f"g1/{number}") == 0)
    await net.ask(0, StoreSet(key, b"x"))
    net.dead.add("a8")  # node 9 would ask node 8, which asks node 0
    assert (await net.ask(9, StoreGet(key, PATIENCE_S))).value == b"x"


async def test_whoever_waits_for_a_key_of_a_generation_that_ends_is_told_on_every_node() -> None:
    net = Net(9)
    waiting = [asyncio.create_task(net.ask(node, StoreGet("g1/k", 600.0))) for node in range(9)]
    for _ in range(20):
        await asyncio.sleep(0)
    for keeper in net.keepers.values():
        keeper.learn(Generation(3), net.stores, 9)
        keeper.drop_before(Generation(2))
    for reply in await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S):
        assert "is over" in reply.error


async def test_what_was_cached_ends_with_its_generation() -> None:
    net = Net(9)
    await net.ask(0, StoreSet("g1/k", b"x"))
    await at_once(net, *((node, StoreGet("g1/k", PATIENCE_S)) for node in range(9)))
    for keeper in net.keepers.values():
        keeper.drop_before(Generation(2))
        assert len(keeper.copies) == len(keeper.table) == 0
    assert "is over" in (await net.ask(1, StoreGet("g1/k", PATIENCE_S))).error


async def test_an_agent_that_has_not_heard_of_a_generation_yet_answers_when_it_has() -> None:
    net = Net(3)
    asking = asyncio.create_task(net.ask(0, StoreAdd("g2/n", 1)))
    await asyncio.sleep(0)
    assert not asking.done()
    for keeper in net.keepers.values():
        keeper.learn(Generation(2), net.stores, 3)
    assert (await asking).number == 1
