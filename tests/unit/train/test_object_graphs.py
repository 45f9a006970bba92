"""Objects that say no state: remembered and put back thing by thing, carried without pickle, or refused by path."""

import collections
import enum
import functools
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from regrow.core.errors import NotCarried, StateError, UsageError
from regrow.core.ids import NO_STATE
from regrow.hydration.codec import decode, encode
from regrow.train.graphs.object_graph import ObjectGraph
from regrow.train.state.protected import ProtectedState

MAPS = [np.zeros(3), np.ones(3)]


class Move(NamedTuple):
    seen: np.ndarray
    action: int
    after: torch.Tensor


class Mood(enum.Enum):
    CALM = 1
    WILD = 2


class Piece:
    __slots__ = ("at", "kind")

    def __init__(self, at: int) -> None:
        self.at, self.kind = at, Mood.CALM


class Game:
    """An environment as people write them."""

    def __init__(self, seed: int) -> None:
        self.random, self.python = np.random.default_rng(seed), random.Random(seed)
        self.state = np.zeros(4, np.float32)
        self.pieces = [Piece(0)]
        self.map, self.mood = MAPS[0], Mood.CALM
        self.cells: dict[tuple[int, int], list[int]] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.act = self.step

    def step(self, action: int) -> np.ndarray:
        """Changes all there is, in place and by other objects."""
        self.state = self.state + self.random.normal(size=4).astype(np.float32) + action
        self.state[0] *= 2
        self.pieces.append(Piece(self.python.randrange(9)))
        self.pieces[0].at += 1
        self.cells.setdefault((action, len(self.pieces)), []).append(action)
        self.counts[f"a{action}"] += 1
        self.map, self.mood = MAPS[1], Mood.WILD
        if len(self.pieces) == 3:
            self.random = np.random.default_rng(self.python.randrange(1000))
        return self.state


class Games:
    """Several games, whose observations lie in one array, and the moves of them all."""

    def __init__(self, seed: int) -> None:
        self.seen = np.zeros((2, 4), np.float32)
        self.rows = [self.seen[0], self.seen[1]]
        self.games = [Game(seed), Game(seed + 1)]
        self.moves: deque[Move] = deque(maxlen=3)
        self.first = self.games[0]
        self.ring = torch.zeros(6, 2)
        self.window = self.ring[2:4]

    def play(self, action: int) -> None:
        """One step of all."""
        for row, game in zip(self.rows, self.games, strict=True):
            row[:] = game.act(action)
        self.moves.append(Move(self.games[0].state, action, torch.full((3,), float(action)).t()))
        self.ring[action % 6] += 1


def digest(games: Games) -> list[Any]:
    each = [
        [g.state.tolist(), [(p.at, p.kind) for p in g.pieces], g.mood, g.map.tolist(), list(g.cells.items()), g.counts]
        for g in games.games
    ]
    moves = [(m.seen.tolist(), m.action, m.after.tolist()) for m in games.moves]
    return [each, moves, games.seen.tolist(), games.ring.tolist(), games.window.tolist()]


def sent(graph: ObjectGraph) -> Any:
    """A state as it arrives elsewhere."""
    tensors: dict[str, torch.Tensor] = {}

    def lift(path: str, tensor: torch.Tensor) -> str:
        tensors[path] = tensor.clone()
        return path

    return decode(encode(graph.state_dict(), lift=lift), resolve=tensors.__getitem__)


def test_what_a_step_changes_is_put_back_and_every_thing_is_itself_again() -> None:
    games = Games(1)
    graph = ObjectGraph({"games": games})
    games.play(1)
    before, state, piece, moves = digest(games), games.games[0].state, games.games[0].pieces[1], games.moves
    drawn = games.games[0].random
    memory = graph.remember()
    games.play(2)
    games.play(3)
    games.moves = deque()
    assert digest(games) != before
    graph.go_back(memory)
    assert digest(games) == before
    assert (games.games[0].state is state, games.games[0].pieces[1] is piece, games.moves is moves) == (True,) * 3
    assert games.games[0].random is drawn and games.moves[0].seen is state
    assert MAPS[0].tolist() == [0, 0, 0] and MAPS[1].tolist() == [1, 1, 1]


def test_a_newcomer_goes_on_as_the_lost_one_would_have() -> None:
    one, other = Games(1), Games(99)
    mine, theirs = ObjectGraph({"games": one}), ObjectGraph({"games": other})
    kept = [other.games[1], other.seen, other.games[0].pieces, other.ring]
    for action in range(5):
        one.play(action)
    theirs.load_state_dict(sent(mine))
    assert digest(other) == digest(one)
    assert [other.games[1], other.seen, other.games[0].pieces, other.ring] == kept or all(
        a is b for a, b in zip(kept, [other.games[1], other.seen, other.games[0].pieces, other.ring], strict=True)
    )
    assert other.rows[0].base is other.seen and other.first is other.games[0]
    assert other.moves[-1].seen is other.games[0].state and type(other.moves[-1]) is Move
    assert other.games[0].act == other.games[0].step
    for action in range(5):
        one.play(action)
        other.play(action)
    assert digest(other) == digest(one)
    assert MAPS[0].tolist() == [0, 0, 0] and MAPS[1].tolist() == [1, 1, 1]


def test_replicas_with_the_same_history_have_the_same_bytes_also_where_one_has_received_it() -> None:
    one, other = Games(1), Games(2)
    mine, theirs = ObjectGraph({"games": one}), ObjectGraph({"games": other})
    one.play(1)
    theirs.load_state_dict(sent(mine))
    one.play(2)
    other.play(2)
    first, second = mine.state_dict(), theirs.state_dict()
    assert all(np.asarray(first[key]).tobytes() == np.asarray(second[key]).tobytes() for key in ("graph", "data"))


class Counting:
    def __init__(self) -> None:
        count = 0

        def more() -> int:
            nonlocal count
            count += 1
            return count

        self.more = more


class Holds:
    def __init__(self, thing: object) -> None:
        self.thing = thing


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (itertools.count(), "its attributes do not show|iterator"),
        (iter([1]), "iterator"),
        (nn.Linear(1, 1), "protected by themselves"),
        (threading.Thread(), "process or thread"),
        (Counting(), r"env.thing.more \(function\).*writes `count`"),
        (type("Own", (dict,), {})(), "its attributes do not show"),
        (torch.zeros(1, requires_grad=True), "gradient"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_its_path(thing: object, why: str) -> None:
    with pytest.raises(NotCarried, match=why) as raised:
        ObjectGraph({"env": Holds(thing)}).state_dict()
    assert str(raised.value).startswith("env.thing")


def test_an_array_and_a_tensor_that_share_memory_are_refused() -> None:
    holds = Holds(np.zeros(3))
    holds.other = torch.from_numpy(holds.thing)  # type: ignore[attr-defined]
    with pytest.raises(NotCarried, match="shares its memory with env"):
        ObjectGraph({"env": holds}).state_dict()


def test_what_a_step_puts_there_and_nobody_could_make_is_refused_by_its_path() -> None:
    class Local:
        pass

    holds = Holds(None)
    graph = ObjectGraph({"env": holds})
    holds.thing = Local()
    with pytest.raises(NotCarried, match=r"env.thing \(Local\).*a newcomer could not make one"):
        graph.state_dict()
    holds.thing = lambda: 1
    with pytest.raises(NotCarried, match=r"env.thing \(function\).*a newcomer could not make one"):
        graph.state_dict()


def test_a_received_graph_makes_things_of_known_classes_alone() -> None:
    holds = Holds(None)
    graph = ObjectGraph({"env": holds})
    told = graph.state_dict()
    nodes: Any = decode(np.asarray(told["graph"]).tobytes())
    nodes[0][3] = [["thing", (1,)], []]
    for name in ("subprocess:Popen", "os:_wrap_close", "tempfile:TemporaryDirectory", "builtins:object", "nowhere:X"):
        forged = [*nodes, ["object", name, "", [[], []]]]
        with pytest.raises(StateError, match="no class that a received object may be of"):
            graph.load_state_dict({**told, "graph": np.frombuffer(encode(forged), np.uint8)})
    with pytest.raises(StateError, match="not here"):
        forged = [*nodes, ["constant", "", "env.other", None]]
        graph.load_state_dict({**told, "graph": np.frombuffer(encode(forged), np.uint8)})


class CallHeader:
    """Says its state by the other pair of names."""

    def __init__(self) -> None:
        self.count, self.hidden = 0, itertools.count()

    def get_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_protected_things_of_every_form_come_back() -> None:
    game, told, drawn, legacy, moves = Games(1), CallHeader(), random.Random(1), np.random.RandomState(1), deque([1])
    state = ProtectedState([], {"game": game, "told": told, "drawn": drawn, "legacy": legacy, "moves": moves})
    state.begin()
    expected = digest(game), told.count, drawn.random(), legacy.normal(), list(moves)
    drawn.setstate(random.Random(1).getstate())
    legacy.set_state(np.random.RandomState(1).get_state())
    state.begin()
    kept = state.capture()
    for way in (state.rollback, lambda: state.restore(kept)):
        game.play(1)
        told.count, _ = 7, (drawn.random(), legacy.normal())
        moves.append(2)
        way()
        found = digest(game), told.count, drawn.random(), legacy.normal(), list(moves)
        assert found == expected
    with pytest.raises(UsageError, match="a ndarray, which has no state_dict"):
        ProtectedState([np.zeros(2)])


def test_objects_that_say_their_state_inside_another_are_asked_for_it() -> None:
    holds = Holds([CallHeader(), CallHeader()])
    graph = ObjectGraph({"env": holds})
    memory = graph.remember()
    things: Any = holds.thing
    things[1].count = 5
    told = sent(graph)
    graph.go_back(memory)
    assert things[1].count == 0
    graph.load_state_dict(told)
    assert things[1].count == 5


class Replay:
    """Keeps moves, and follows nothing but them."""

    def __init__(self) -> None:
        self.moves: list[np.ndarray] = []


def test_things_that_two_protected_objects_hold_are_held_by_both_again() -> None:
    def build() -> tuple[Any, ProtectedState]:
        games, replay, memory = Games(1), Replay(), SimpleNamespace(seen=None, last=MAPS[0])
        named = {"games": games, "replay": replay, "memory": memory}
        return (games, replay, memory), ProtectedState([], named, part="r")

    def play(games: Games, replay: Replay, memory: SimpleNamespace) -> None:
        games.play(1)
        replay.moves.append(games.seen)
        memory.seen, memory.last = games.games[0].state, MAPS[1]

    mine, state = build()
    state.begin()
    play(*mine)
    state.rollback()
    assert mine[2].seen is None and mine[2].last is MAPS[0] and mine[1].moves == []
    assert [each.tolist() for each in MAPS] == [[0, 0, 0], [1, 1, 1]]
    play(*mine)
    theirs, newcomer = build()
    inventory = state.inventory(NO_STATE)
    for name, tensor in newcomer.prepare(inventory).items():
        tensor.copy_(state.tensor(name))
    newcomer.finish()
    games, replay, memory = theirs
    assert memory.seen is games.games[0].state and replay.moves[0] is games.seen
    assert state.digest() == newcomer.digest()
    play(*mine)
    play(games, replay, memory)
    assert state.digest() == newcomer.digest()


class Pushing:
    """Keeps what it is given in a variable of the function around, and in an argument that it was made with."""

    def __init__(self) -> None:
        kept: list[int] = []
        self.push: Callable[[int], None] = lambda value: kept.append(value)
        self.count = functools.partial(list.append, [0])
        self.all: Callable[[], Any] = lambda: (kept, self.count.args[0])


def test_containers_that_functions_have_from_outside_are_carried() -> None:
    one, other = Pushing(), Pushing()
    mine, theirs = ObjectGraph({"env": one}), ObjectGraph({"env": other})
    memory = mine.remember()
    one.push(1)
    one.count(2)
    theirs.load_state_dict(sent(mine))
    assert other.all() == ([1], [0, 2])
    mine.go_back(memory)
    assert one.all() == ([], [0])
