"""Meshes, FSDP2 and DTensors go on in a world of another size, with the objects that they are."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.process.comm_elastic import UNIT, obey
from tests.process.comm_world import Seat, World, store, world

Curve = list[tuple[float, float]]


class Job:
    """Processes that form worlds of several replicas; who is needed joins, who is not leaves."""

    def __init__(self, folder: Path, stack: ExitStack, way: str, *, invariant: bool) -> None:
        self.folder, self.stack, self.way, self.invariant = folder, stack, way, invariant
        self.address = stack.enter_context(store(folder))
        self.generation = 0
        self.members: list[World] = []
        """Of one process each, by rank."""
        self.said: set[str] = set()

    def start(self, replicas: int) -> None:
        self.generation += 1
        self.members = [self._worker(rank, replicas * UNIT, alone=False) for rank in range(replicas * UNIT)]
        self._hear(self.members)

    def _worker(self, rank: int, size: int, *, alone: bool) -> World:
        seat = Seat(rank, size, str(self.folder), tcp=False)
        return self.stack.enter_context(
            world([seat], obey, self.address, self.way, self.invariant, alone, self.generation)
        )

    def _hear(self, members: list[World]) -> None:
        self.said |= {said for member in members for said in member.results()}

    def ask(self, *order: Any) -> list[Any]:
        for member in self.members:
            member.tell(order)
        return [member.results()[0] for member in self.members]

    def become(self, replicas: int, *, leaves: int | None = None) -> None:
        """Grow, with newcomers that were built alone, or shrink: by the last replicas, or by number `leaves`."""
        size = replicas * UNIT
        state = self.ask("state")
        newcomers = [self._worker(rank, size, alone=True) for rank in range(len(self.members), size)]
        self._hear(newcomers)
        for place, newcomer in enumerate(newcomers):
            newcomer.tell(("load", state[place % UNIT]))
            newcomer.results()
        if leaves is not None:
            del self.members[leaves * UNIT : (leaves + 1) * UNIT]
        self.members = [*self.members, *newcomers][:size]
        self.generation += 1
        for rank, member in enumerate(self.members):
            member.tell(("form", rank, size, self.generation))
        for member in self.members:
            member.results()

    def train(self, first: int, stop: int) -> Curve:
        curves: list[Curve] = self.ask("train", first, stop)
        assert all(curve == curves[0] for curve in curves)
        return curves[0]

    def state(self) -> list[list[bytes]]:
        """State of each rank."""
        return [[item.tobytes() for item in held] for held in self.ask("state")]


@contextmanager
def job(folder: Path, way: str, *, invariant: bool) -> Iterator[Job]:
    folder.mkdir()
    with ExitStack() as stack:
        yield Job(folder, stack, way, invariant=invariant)


def fixed(folder: Path, way: str, replicas: int, steps: int, *, invariant: bool) -> tuple[Curve, list[list[bytes]]]:
    with job(folder, way, invariant=invariant) as made:
        made.start(replicas)
        return made.train(0, steps), made.state()


def elastic(folder: Path, way: str, *, invariant: bool) -> tuple[Curve, list[list[bytes]]]:
    """One replica, two, one (that which came), two."""
    with job(folder, way, invariant=invariant) as made:
        made.start(1)
        curve = made.train(0, 2)
        made.become(2)
        curve += made.train(2, 4)
        made.become(1, leaves=0)
        curve += made.train(4, 6)
        made.become(2)
        curve += made.train(6, 8)
        assert made.said == {""}
        state = made.state()
        assert state[:UNIT] == state[UNIT:]
        return curve, state[:UNIT]


def test_every_loss_norm_and_bit_of_state_is_that_of_a_fixed_world_in_invariant_mode(tmp_path: Path) -> None:
    curve, state = elastic(tmp_path / "elastic", "hsdp", invariant=True)
    assert (curve, state) == fixed(tmp_path / "one", "hsdp", 1, 8, invariant=True)
    two = fixed(tmp_path / "two", "hsdp", 2, 8, invariant=True)
    assert (curve, state) == (two[0], two[1][:UNIT])


def test_tensor_parallel_replicas_go_on_as_in_a_fixed_world(tmp_path: Path) -> None:
    """Nearly: which sum comes first depends on the number of replicas."""
    curve, _ = elastic(tmp_path / "elastic", "tp", invariant=False)
    alone, _ = fixed(tmp_path / "one", "tp", 1, 8, invariant=False)
    for mine, theirs in zip(curve, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_meshes_slices_and_shares_follow(tmp_path: Path) -> None:
    with job(tmp_path / "job", "hsdp", invariant=False) as made:
        made.start(1)
        made.become(2)
        made.become(3)
        made.become(2, leaves=0)
        for rank, said in enumerate(made.ask("places")):
            replica, place = divmod(rank, UNIT)
            assert said == {
                "shape": (2, UNIT),
                "mesh": [[0, 1], [2, 3]],
                "coordinate": (replica, place),
                "data": [0, 1, 2, 3],
                "share": (rank, 4),
                "slices": [[place, place + UNIT], [replica * UNIT, replica * UNIT + 1]],
                "total": 6.0,
                "world": 4,
            }
