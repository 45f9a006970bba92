"""The store over the sockets of several agents: torch's C++ on it, agents that end, generations that end."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.process.comm_world import DEADLINE, Seat, play
from tests.process.store_agents import TOKEN, Agents, agents
from torch.distributed.device_mesh import init_device_mesh

from regrow.agent.store.routing import home
from regrow.comm.store import AgentStore
from regrow.comm.torch_private import group_names
from regrow.core.errors import GenerationHalted
from regrow.core.ids import Generation, Seconds
from regrow.core.messages.store import StoreGet, StoreMessage, StoreReply

NODES = 3


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Agents]:
    with agents(tmp_path, NODES) as made:
        yield made


def key_of(node: int) -> str:
    """A key, as clients name it, that lives on this node."""
    return next(f"{n}" for n in range(999) if home(f"g1/{n}", NODES, 2 * NODES) == node)


def group_over(seat: Seat, addresses: list[str], lazy: bool) -> float:
    import os

    if lazy:
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    group_names.watch()
    store = AgentStore(addresses[seat.rank * NODES // seat.size], TOKEN, "g1/env/")
    dist.init_process_group(
        "gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=timedelta(seconds=DEADLINE)
    )
    mesh = init_device_mesh("cpu", (2, seat.size // 2), mesh_dim_names=("a", "b"))
    total = torch.tensor([float(seat.rank)])
    for group in (None, mesh.get_group("a"), mesh.get_group("b")):
        dist.all_reduce(total, group=group)
    dist.monitored_barrier()
    return total.item()


@pytest.mark.parametrize("lazy", [False, True])
def test_gloo_forms_its_groups_through_three_agents(running: Agents, tmp_path: Path, lazy: bool) -> None:
    addresses = [server.address for server in running.servers]
    results = play(6, tmp_path, group_over, addresses, lazy)
    assert results == [15.0 * 6] * 6
    for node, server in enumerate(running.servers):
        ranks = [int(key.rpartition("/")[2]) for key in server.node.table.keys("g1/env/0//cpu")]
        assert sorted(ranks) == [2 * node, 2 * node + 1]
        placed = [key for key in server.node.table.keys("g1/env/") if "@" in key]
        assert sorted(int(key.rpartition("@")[2]) for key in placed) == sorted(ranks * 2), "of two groups each"


def test_an_address_that_could_not_be_kept_is_told_with_the_next_request(running: Agents) -> None:
    store = running.client(0)
    running.at(lambda: setattr(running.servers[0].node.table, "_limit", 10))
    store.set("0//cpu//0/0", "here")
    with pytest.raises(dist.DistStoreError, match="full"):
        store.num_keys()
    assert store.num_keys() == 0, "once"


def test_addresses_that_came_with_another_are_not_asked_for(running: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, asked = running.client(0), []
    ask = AgentStore._ask

    def counted(store: AgentStore, request: StoreMessage, wait: Seconds = 0.0) -> StoreReply:
        asked.append(request)
        return ask(store, request, wait)

    for rank in range(2 * NODES):
        running.client(rank // 2).set(f"0//cpu//0/{rank}", f"here {rank}")
    monkeypatch.setattr(AgentStore, "_ask", counted)
    for rank in range(2 * NODES):
        reader.wait([f"0//cpu//0/{rank}"])
        assert reader.get(f"0//cpu//0/{rank}") == f"here {rank}".encode()
    assert len(asked) < 2 * NODES
    with pytest.raises(dist.DistStoreError, match="timeout"):
        reader.wait(["0//cpu//0/9"], timedelta(seconds=0.1))


def test_a_wait_for_where_a_rank_listens_brings_it_so_that_gloo_asks_once(
    running: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, asked = "env6.1/0//cpu//0/5", []
    ask = AgentStore._ask

    def counted(store: AgentStore, request: StoreMessage, wait: Seconds = 0.0) -> StoreReply:
        asked.append(type(request))
        return ask(store, request, wait)

    monkeypatch.setattr(AgentStore, "_ask", counted)
    reader, writer = running.client(0), running.client(2)
    writer.set(key, "here")
    reader.wait([key])
    assert len(running.servers[2].node.table) == 1, "with the agent of rank 5"
    assert reader.get(key) == b"here"
    assert asked == [StoreGet]
    assert reader.get(key) == b"here"
    assert asked == [StoreGet, StoreGet], "what was brought is used once"


def test_an_agent_that_ends_ends_the_waits_for_its_keys_with_an_error_that_names_it(running: Agents) -> None:
    reader, other = running.client(0), running.client(1)
    with ThreadPoolExecutor() as pool:
        waiting: Future[bytes] = pool.submit(reader.get, key_of(2))
        other.set(key_of(1), "x")
        _until(lambda: bool(running.servers[2].node.table._waiters))
        address = running.servers[2].address
        running.stop(2)
        with pytest.raises(dist.DistStoreError, match=address):
            waiting.result(10.0)
    assert reader.get(key_of(1)) == b"x"
    with pytest.raises(dist.DistStoreError, match="lost"):
        other.set(key_of(2), "x")


def test_a_worker_whose_own_agent_ends_is_told(running: Agents) -> None:
    reader = running.client(0)
    with ThreadPoolExecutor() as pool:
        waiting: Future[bytes] = pool.submit(reader.get, key_of(0))
        _until(lambda: bool(running.servers[0].node.table._waiters))
        running.stop(0)
        with pytest.raises(dist.DistNetworkError, match="agent"):
            waiting.result(10.0)


def test_a_store_that_is_closed_ends_what_is_blocked_in_it(running: Agents) -> None:
    reader = running.client(0)
    with ThreadPoolExecutor() as pool:
        waiting: Future[bytes] = pool.submit(reader.get, key_of(1))
        _until(lambda: bool(running.servers[1].node.table._waiters))
        reader.close()
        with pytest.raises(GenerationHalted):
            waiting.result(10.0)
    _until(lambda: not running.servers[1].node.table._waiters)
    with pytest.raises(GenerationHalted):
        reader.get("x")


def test_keys_outlive_their_writers_and_end_with_the_generation_after_the_next(running: Agents) -> None:
    writer = running.client(0)
    for node in range(NODES):
        writer.set(key_of(node), "x")
    writer.close()
    reader = running.client(1)
    assert [reader.get(key_of(node)) for node in range(NODES)] == [b"x"] * NODES
    running.form(Generation(2))
    assert reader.num_keys() == NODES
    running.form(Generation(3))
    with pytest.raises(dist.DistStoreError, match="is over"):
        reader.get(key_of(2))
    assert all(len(server.node.table) == 0 for server in running.servers)


def test_agents_connect_when_they_need_to_and_hang_up_on_those_that_left(running: Agents) -> None:
    assert not any(server.peers._links for server in running.servers)
    reader = running.client(0)
    for node in range(NODES):
        reader.set(key_of(node), "x")
    assert set(running.servers[0].peers._links) == {server.address for server in running.servers[1:]}
    left = [server.address for server in running.servers[:2]]
    for generation in (2, 3):
        for server in running.servers[:2]:
            running.at(lambda: server.generation_formed(Generation(generation), left, 2))  # noqa: B023  runs at once
    assert set(running.servers[0].peers._links) == {running.servers[1].address}


def test_an_agent_with_another_token_is_refused(running: Agents) -> None:
    running.at(lambda: setattr(running.servers[0].peers, "_token", "wrong"))
    with pytest.raises(dist.DistStoreError, match="lost"):
        running.client(0).set(key_of(1), "x")


def _until(true: object) -> None:
    deadline = time.monotonic() + 60.0
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)
