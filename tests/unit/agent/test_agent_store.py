import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.agent.frames import next_message
from tests.unit.agent.test_agent_environment import config

from regrow.agent.store.keys import KeyTable
from regrow.agent.store.server import StoreServer
from regrow.core import strangers
from regrow.core.ids import Generation
from regrow.core.messages.store import (
    NO_COUNTER,
    StoreAdd,
    StoreCheck,
    StoreCompareSet,
    StoreCount,
    StoreDelete,
    StoreGet,
    StoreHello,
    StoreReply,
    StoreSet,
    StoreWait,
)
from regrow.core.wire import FrameCodec


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.codec: FrameCodec[StoreReply] = FrameCodec(StoreReply)

    async def ask(self, request: msgspec.Struct) -> StoreReply | None:
        self.writer.write(self.codec.frame(request))
        return await next_message(self.codec, self.reader, 90.0)

    async def receive(self) -> StoreReply:
        reply = await next_message(self.codec, self.reader, 90.0)
        assert reply is not None
        return reply

    async def reply(self, request: msgspec.Struct) -> StoreReply:
        reply = await self.ask(request)
        assert reply is not None
        return reply


async def connect(server: StoreServer, token: str = "t") -> tuple[Client, StoreReply | None]:
    kind, _, place = server.address.partition(":")
    if kind == "unix":
        client = Client(*await asyncio.open_unix_connection(place))
    else:
        host, _, port = place.rpartition(":")
        client = Client(*await asyncio.open_connection(host, int(port)))
    return client, await client.ask(StoreHello(token))


@asynccontextmanager
async def store(folder: Path, **job: Any) -> AsyncIterator[tuple[StoreServer, Client]]:
    async with StoreServer(config(job=job, socket_dir=str(folder))) as server:
        client, greeting = await connect(server)
        assert greeting == StoreReply()
        yield server, client
        client.writer.close()


@pytest.mark.parametrize(("nodes", "kind"), [(1, "unix"), (2, "tcp")])
async def test_what_is_written_can_be_read(tmp_path: Path, nodes: int, kind: str) -> None:
    async with store(tmp_path, nodes=nodes) as (server, client):
        assert server.address.startswith(f"{kind}:")
        assert await client.ask(StoreSet("k", b"\x00v")) == StoreReply()
        assert await client.ask(StoreGet("k", 0.0)) == StoreReply(value=b"\x00v")


async def test_a_wrong_token_is_hung_up_on(tmp_path: Path) -> None:
    async with store(tmp_path) as (server, _):
        _, greeting = await connect(server, "wrong")
        assert greeting is None


async def test_a_client_that_does_not_greet_is_hung_up_on(tmp_path: Path) -> None:
    async with store(tmp_path) as (server, _):
        client = Client(*await asyncio.open_unix_connection(server.address.removeprefix("unix:")))
        assert await client.ask(StoreCount()) is None


async def test_a_frame_that_is_no_request_is_hung_up_on(tmp_path: Path) -> None:
    async with store(tmp_path) as (_, client):
        assert await client.ask(StoreReply(number=3)) is None


async def test_who_says_nothing_is_hung_up_on_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.agent.store.server.HELLO_S", 0.05)
    before = strangers.refused.counts.get("store", 0)
    async with store(tmp_path) as (server, greeted):
        reader, _ = await asyncio.open_unix_connection(server.address.removeprefix("unix:"))
        assert await asyncio.wait_for(reader.read(), 90.0) == b""
        assert strangers.refused.counts["store"] == before + 1
        assert await greeted.ask(StoreCount()) == StoreReply(), "who has greeted may be silent"


async def test_frames_are_requests_however_they_are_cut(tmp_path: Path) -> None:
    async with store(tmp_path) as (server, _):
        reader, writer = await asyncio.open_unix_connection(server.address.removeprefix("unix:"))
        client = Client(reader, writer)
        requests = [StoreHello("t"), *(StoreSet(f"k{at}", b"x" * at, ask=at) for at in range(1, 40))]
        said = b"".join(client.codec.frame(request) for request in requests)
        for at in range(0, len(said), 7):
            writer.write(said[at : at + 7])
            await asyncio.sleep(0)
        assert [(await client.receive()).ask for _ in requests] == list(range(40))
        assert len(server.node.table) == 39


async def test_a_client_that_does_not_take_its_answers_is_asked_for_no_more(tmp_path: Path) -> None:
    size, count = 1 << 20, 64
    async with store(tmp_path) as (server, writer):
        await writer.ask(StoreSet("large", b"x" * size))
        client, _ = await connect(server)
        client.writer.write(b"".join(client.codec.frame(StoreGet("large", 0.0, ask=at + 1)) for at in range(count)))
        async with asyncio.timeout(90.0):
            while not (full := [each for each in server._serving if each._full]):
                await writer.ask(StoreCount())
        assert full[0]._transport.get_write_buffer_size() < 4 * size
        assert [(await client.receive()).ask for _ in range(count)] == list(range(1, count + 1))


async def test_reading_waits_for_the_writer(tmp_path: Path) -> None:
    async with store(tmp_path) as (server, reader):
        waiting = asyncio.create_task(reader.reply(StoreGet("late", 60.0)))
        writer, _ = await connect(server)
        await writer.ask(StoreSet("other", b"x"))
        assert not waiting.done()
        await writer.ask(StoreSet("late", b"here"))
        assert (await waiting).value == b"here"


async def test_waiting_for_several_keys_needs_all_of_them(tmp_path: Path) -> None:
    async with store(tmp_path) as (server, reader):
        waiting = asyncio.create_task(reader.reply(StoreWait(["a", "b"], 60.0)))
        writer, _ = await connect(server)
        await writer.ask(StoreSet("b", b""))
        await writer.ask(StoreCount())
        assert not waiting.done()
        await writer.ask(StoreSet("a", b""))
        assert await waiting == StoreReply()


async def test_a_wait_ends_at_its_deadline(tmp_path: Path) -> None:
    async with store(tmp_path) as (_, client):
        assert (await client.reply(StoreGet("never", 0.05))).error == "timeout"
        assert (await client.reply(StoreWait(["never"], 0.05))).error == "timeout"
        assert await client.ask(StoreCount()) == StoreReply(number=0)


async def test_a_client_that_leaves_while_it_waits_is_forgotten(tmp_path: Path) -> None:
    async with store(tmp_path) as (server, client):
        leaver, _ = await connect(server)
        leaver.writer.write(leaver.codec.frame(StoreGet("never", 1000.0)))
        await client.ask(StoreCount())
        leaver.writer.close()
        async with asyncio.timeout(10.0):
            while len(server._serving) > 1:
                await client.ask(StoreCount())


async def test_counters_count(tmp_path: Path) -> None:
    async with store(tmp_path) as (_, client):
        assert (await client.reply(StoreAdd("n", 3))).number == 3
        assert (await client.reply(StoreAdd("n", -1))).number == 2
        assert (await client.reply(StoreGet("n", 0.0))).value == b"2"
        await client.ask(StoreSet("text", b"abc"))
        assert (await client.reply(StoreAdd("text", 1))).error == NO_COUNTER


async def test_check_delete_and_count(tmp_path: Path) -> None:
    async with store(tmp_path) as (_, client):
        await client.ask(StoreSet("a", b"1"))
        assert (await client.reply(StoreCheck(["a"]))).number == 1
        assert (await client.reply(StoreCheck(["a", "b"]))).number == 0
        assert (await client.reply(StoreDelete("a"))).number == 1
        assert (await client.reply(StoreDelete("a"))).number == 0
        assert (await client.reply(StoreCount())).number == 0


async def test_compare_and_set(tmp_path: Path) -> None:
    async with store(tmp_path) as (_, client):
        assert (await client.reply(StoreCompareSet("k", b"x", b"y"))).value == b"x"
        assert (await client.reply(StoreCompareSet("k", b"", b"1"))).value == b"1"
        assert (await client.reply(StoreCompareSet("k", b"0", b"2"))).value == b"1"
        assert (await client.reply(StoreCompareSet("k", b"1", b"2"))).value == b"2"


async def test_keys_end_with_the_generation_after_the_next(tmp_path: Path) -> None:
    async with store(tmp_path) as (server, client):
        for generation in (1, 2, 10):
            await client.ask(StoreSet(f"g{generation}/k", b"x"))
        await client.ask(StoreSet("plain", b"x"))
        server.generation_formed(Generation(2))
        assert (await client.reply(StoreCount())).number == 4
        server.generation_formed(Generation(3))
        assert (await client.reply(StoreCheck(["g2/k", "g10/k", "plain"]))).number == 1
        assert "is over" in (await client.reply(StoreSet("g1/k", b"late"))).error
        server.generation_formed(Generation(2))
        assert (await client.reply(StoreCheck(["g10/k"]))).number == 1


async def test_whoever_waits_for_a_key_of_an_ended_generation_is_told(tmp_path: Path) -> None:
    async with store(tmp_path) as (server, waiter):
        waiting = asyncio.create_task(waiter.reply(StoreGet("g1/k", 1000.0)))
        client, _ = await connect(server)
        async with asyncio.timeout(10.0):
            while not server.node.table._waiters:
                await client.ask(StoreCount())
        server.generation_formed(Generation(5))
        assert "is over" in (await waiting).error


async def test_a_full_store_says_so_and_takes_no_more() -> None:
    table = KeyTable(limit=100)
    table.put("a", b"x" * 90)
    with pytest.raises(Exception, match="the store is full"):
        table.put("b", b"x" * 10)
    table.put("a", b"y" * 99)
    assert table.delete("a")
    table.put("b", b"x" * 10)
    assert len(table) == 1


async def test_a_write_in_the_same_moment_as_the_wait_begins_is_not_missed() -> None:
    table = KeyTable()
    arrival = table.arrival("k")
    table.put("k", b"x")
    assert arrival.done(), "the wait began only after the write"
    assert not table._waiters


async def test_a_wait_that_is_given_up_leaves_nothing_behind() -> None:
    table = KeyTable()
    arrivals = [table.arrival("k") for _ in range(3)]
    for arrival in arrivals:
        arrival.cancel()
    await asyncio.sleep(0)  # what is called back is called in the loop's next turn
    assert not table._waiters


@pytest.mark.parametrize("seed", range(5))
async def test_every_read_ends_however_reads_and_writes_fall_together(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    keys = [f"g1/{number}" for number in range(40)]

    async def go(client: Client, requests: list[msgspec.Struct]) -> list[bytes]:
        answers = []
        for request in requests:
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            answers.append((await client.reply(request)).value)
        return answers

    async with store(tmp_path) as (server, _):
        clients = [(await connect(server))[0] for _ in range(12)]
        writes = chance.sample(keys, len(keys))
        works = [
            go(client, [StoreSet(key, key.encode()) for key in writes[at::4]]) for at, client in enumerate(clients[:4])
        ]
        reads = [chance.sample(keys, len(keys)) for _ in clients[4:]]
        works += [
            go(client, [StoreGet(key, 60.0) for key in some]) for client, some in zip(clients[4:], reads, strict=True)
        ]
        found = await asyncio.gather(*works)
        assert found[4:] == [[key.encode() for key in some] for some in reads]
        assert not server.node.table._waiters
        for client in clients:
            client.writer.close()
