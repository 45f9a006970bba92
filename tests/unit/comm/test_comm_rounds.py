"""Large groups, and large tensors: every algorithm over ranks in threads, whose messages go through queues."""

import threading
from collections import defaultdict
from collections.abc import Callable
from queue import Queue
from typing import Any

import pytest
import torch

from regrow.comm.algorithms import pairwise
from regrow.comm.algorithms.hypercube import ByPeer, Hypercube
from regrow.comm.algorithms.pairwise import Pairwise
from regrow.comm.algorithms.rounds import DIRECT, Rounds
from regrow.comm.headers import Call, Operation

SIZES = (17, 24, 31, 32, 33)
PAIRED_SIZES = (4, 5, 16)
CALL = Call(Operation.all_reduce, 0, torch.float32)


class World:
    """The ranks of one group; who spoke to whom."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.spoken: dict[int, set[int]] = defaultdict(set)
        self._queues: dict[tuple[int, int], Queue[tuple[bool, list[torch.Tensor]]]] = defaultdict(Queue)
        self._lock = threading.Lock()

    def run(self, work: Callable[[Hypercube, int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def rank(number: int) -> None:
            results[number] = work(Hypercube(Rounds(number, self.size), self._exchange(number), room), number)

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240.0)
        assert not any(thread.is_alive() for thread in threads)
        assert all(queue.empty() for queue in self._queues.values()), "a message that nobody has taken"
        return results

    def pairwise(self, rank: int) -> Pairwise:
        """For a large tensor."""
        return Pairwise(rank, self.size, self._exchange(rank), room)

    def _exchange(self, rank: int) -> Any:
        def exchange(out: ByPeer, into: ByPeer, call: Call | None = None) -> None:
            with self._lock:
                self.spoken[rank] |= out.keys() | into.keys()
                channels = {peer: self._queues[rank, peer] for peer in out}
                awaited = {peer: self._queues[peer, rank] for peer in into}
            for peer, parts in out.items():
                channels[peer].put((call is not None, [part.clone() for part in parts]))
            for peer, parts in into.items():
                told, arrived = awaited[peer].get(timeout=120.0)
                assert told == (call is not None), "one side says what it calls, and the other does not hear it"
                assert [part.shape for part in parts] == [part.shape for part in arrived]
                for part, values in zip(parts, arrived, strict=True):
                    part.copy_(values)

        return exchange


def room(like: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [torch.empty_like(like) for _ in range(count)]


def given(rank: int, count: int = 100) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["reduce_small", "reduce_large"])
def test_all_ranks_get_the_same_bits_of_a_sum(size: int, way: str) -> None:
    def reduce(cube: Hypercube, rank: int) -> torch.Tensor:
        flat = given(rank)
        getattr(cube, way)(flat, torch.Tensor.add_, CALL)
        return flat

    results = World(size).run(reduce)
    assert all(torch.equal(results[0], other) for other in results)
    torch.testing.assert_close(results[0], torch.stack([given(rank) for rank in range(size)]).sum(0))


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_is_the_same_whatever_arrives_first(size: int) -> None:
    def reduce(cube: Hypercube, rank: int) -> torch.Tensor:
        flat = given(rank, 40)
        cube.reduce_small(flat, torch.Tensor.add_, CALL)
        return flat

    first = World(size).run(reduce)[0]
    assert all(torch.equal(World(size).run(reduce)[0], first) for _ in range(3))


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_gets_its_part_of_a_reduction(size: int) -> None:
    def scatter(cube: Hypercube, rank: int) -> torch.Tensor:
        parts = list(given(rank, 3 * size).view(size, 3))
        cube.reduce_scatter(parts, torch.Tensor.add_, CALL)
        mine: torch.Tensor = parts[rank]
        return mine

    whole = torch.stack([given(rank, 3 * size) for rank in range(size)]).sum(0).view(size, 3)
    torch.testing.assert_close(torch.stack(World(size).run(scatter)), whole)


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_gets_every_part(size: int) -> None:
    def gather(cube: Hypercube, rank: int) -> torch.Tensor:
        parts = [given(rank, 3) if each == rank else torch.zeros(3) for each in range(size)]
        cube.all_gather(parts, CALL)
        return torch.stack(parts)

    whole = torch.stack([given(rank, 3) for rank in range(size)])
    assert all(torch.equal(found, whole) for found in World(size).run(gather))


@pytest.mark.parametrize("size", SIZES)
def test_a_broadcast_comes_to_all_from_any_root(size: int) -> None:
    for root in range(size):

        def broadcast(cube: Hypercube, rank: int, root: int = root) -> torch.Tensor:
            flat = given(root) if rank == root else torch.zeros(100)
            cube.broadcast(flat, root, CALL)
            return flat

        assert all(torch.equal(found, given(root)) for found in World(size).run(broadcast)), f"from rank {root}"


@pytest.mark.parametrize("size", [17, 33, 64])
def test_a_rank_speaks_to_few_in_all_operations_together(size: int) -> None:
    def everything(cube: Hypercube, rank: int) -> None:
        flat = given(rank, 4 * size)
        cube.reduce_small(flat, torch.Tensor.add_, CALL)
        cube.reduce_large(flat, torch.Tensor.add_, CALL)
        cube.reduce_scatter(list(flat.view(size, 4)), torch.Tensor.add_, CALL)
        cube.all_gather(list(flat.view(size, 4)), CALL)
        cube.broadcast(flat, 5, CALL)

    world = World(size)
    world.run(everything)
    assert max(len(peers) for peers in world.spoken.values()) <= (size - 1).bit_length() + 1


@pytest.mark.parametrize("size", PAIRED_SIZES)
@pytest.mark.parametrize("count", [3, 1000, 4097])
def test_a_large_sum_is_added_by_its_owner_from_the_rank_below_downwards(
    size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairwise, "STEP_BYTES", 400)
    world, values = World(size), [given(rank, count) * 10.0 ** (6 * rank % 31) for rank in range(size)]

    def reduce(_: Hypercube, rank: int) -> torch.Tensor:
        flat = values[rank].clone()
        world.pairwise(rank).all_reduce(flat, torch.Tensor.add_, CALL)
        return flat

    results = world.run(reduce)
    step = 100 * size
    expected = torch.cat([owned([each[at : at + step] for each in values]) for at in range(0, count, step)])
    assert all(torch.equal(result, expected) for result in results)


def owned(pieces: list[torch.Tensor]) -> torch.Tensor:
    """A piece of the sum: each part in its owner's order."""
    size, found = len(pieces), []
    for owner in range(size):
        part = slice(pieces[0].numel() * owner // size, pieces[0].numel() * (owner + 1) // size)
        total = pieces[owner][part].clone()
        for step in range(1, size):
            total += pieces[(owner - step) % size][part]
        found.append(total)
    return torch.cat(found)


@pytest.mark.parametrize("size", PAIRED_SIZES)
def test_large_parts_are_reduced_and_gathered_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "STEP_BYTES", 400)
    world, count = World(size), 250

    def both(_: Hypercube, rank: int) -> torch.Tensor:
        parts = list(given(rank, size * count).view(size, count))
        others = [part.clone() for part in parts]
        world.pairwise(rank).reduce_scatter(parts, torch.Tensor.add_, CALL)
        assert all(torch.equal(parts[each], others[each]) for each in range(size) if each != rank)
        gathered = [parts[rank] if each == rank else torch.zeros(count) for each in range(size)]
        world.pairwise(rank).all_gather(gathered, CALL)
        return torch.cat(gathered)

    results = world.run(both)
    assert all(torch.equal(results[0], other) for other in results)
    torch.testing.assert_close(results[0], torch.stack([given(rank, size * count) for rank in range(size)]).sum(0))


@pytest.mark.parametrize(
    ("size", "whole", "paired"),
    [(3, 1 << 30, False), (4, 8 << 20, True), (4, (8 << 20) - 1, False), (DIRECT, 8 << 20, True), (17, 1 << 30, False)],
)
def test_on_one_machine_large_tensors_of_small_groups_go_to_one_partner_after_the_other(
    size: int, whole: int, paired: bool
) -> None:
    assert Rounds(0, size, one_machine=True).paired(whole) is paired
    assert not Rounds(0, size).paired(whole), "between machines each step would wait for the network"


def test_small_groups_speak_directly() -> None:
    assert Rounds(0, DIRECT).direct and not Rounds(0, DIRECT + 1).direct
