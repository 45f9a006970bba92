"""An object that says no state of its own: all that it holds is remembered, carried and put back, thing by thing."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from regrow.core.errors import NotCarried, StateError
from regrow.train.graphs.classes import Classes
from regrow.train.graphs.decode import Originals, decode_graph
from regrow.train.graphs.encode import Left, encode_graph, try_to_encode
from regrow.train.graphs.exchanges import Exchanges, Held
from regrow.train.graphs.memory import Memory, go_back, remember
from regrow.train.graphs.walk import Thing, walk

T = TypeVar("T")
_MOST_LEFT = 256
"""Most things of a graph that are left out of what is remembered, or told."""


class ObjectGraph:
    """Environments, replay buffers, and other objects that keep their state in attributes, as one with a state.

    A thing that it held when the loop began is known by its path on every rank, since all build alike: it stays itself
    where a state is received, so that whoever else holds it sees that. Other things are made anew.

    What several of them hold together, they hold together again where a state is received.

    Args:
        roots: the objects by name, with which the paths of what they hold begin.

    Raises:
        NotCarried: one holds something whose state cannot be read.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = dict(roots)
        self._live = False
        self.apart = ""
        """Why no other process can be given all of this state any more, for people; empty: nothing is known."""
        self.missing: list[str] = []
        """Sentences on state that was not put back, or not received."""
        self._unfollowed: dict[int, tuple[object, str]] = {}
        self._unsent: dict[int, tuple[object, str]] = {}
        self._met: set[int] = set()
        self.settle()

    def settle(self) -> None:
        """From now on, what is held at this moment counts as built by all ranks."""
        things = self.things()
        self._originals = Originals(things)
        self._exchanges = Exchanges()
        self._exchanges.look(things, live=False)
        self._classes = Classes({type(thing.value) for thing in things} | self._originals.classes())

    def begin(self) -> None:
        """Steps count from now on: what cannot be carried ends no training any more; `apart` says what it is."""
        self._live = True

    def things(self) -> list[Thing]:
        """All that is held now. Raises `NotCarried`."""
        return walk(self._roots)

    def _look(self, left: Left) -> tuple[list[Thing], Held]:
        self._met = set()
        things = walk(self._roots, left, self._met)
        held = self._exchanges.look(things, live=self._live)
        if code := self._exchanges.code:
            why = f"steps change {code}, which no other process could be given"
            if not self._live:
                raise NotCarried(things[0].path, things[0].value, why)
            self.apart = self.apart or why
        return things, held

    def _without(self, left: dict[int, tuple[object, str]], act: Callable[[], T]) -> T:
        """Do this, as steps count without the things with which it cannot be done. Raises `NotCarried`."""
        while True:
            try:
                done = act()
            except NotCarried as error:
                if not self._live or id(error.value) in left or len(left) >= _MOST_LEFT:
                    raise
                for each in [error, *error.more][: _MOST_LEFT - len(left)]:
                    left[id(each.value)] = each.value, each.path
                self.apart = self.apart or error.cause
            else:
                for gone in left.keys() - self._met:
                    del left[gone]
                return done

    def remember(self, former: object = None) -> Memory | None:
        """All as it is now; None where that cannot be, as steps count. Raises `NotCarried` before they do.

        Args:
            former: an earlier memory, which is not gone back to any more.
        """
        try:
            return self._without(self._unfollowed, partial(self._remember, former))
        except NotCarried:
            if not self._live:
                raise
            return None

    def _remember(self, former: object) -> Memory:
        things, held = self._look(self._unfollowed)
        return remember(things, former if isinstance(former, Memory) else None)._replace(held=held)

    def go_back(self, memory: Memory | None) -> bool:
        """Make all that was held what it was; every thing is itself again. False where that cannot be.

        Raises `NotCarried` in its place before steps count.
        """
        if memory is None:
            return False
        try:
            self._exchanges.put_back(memory.held)
            go_back(memory)
            self._look(self._unfollowed)
        except NotCarried as error:
            if not self._live:
                raise
            self.apart = self.apart or error.cause
            return False
        self.missing += [f"{path} is as a body that was cut off has left it" for _, path in self._unfollowed.values()]
        return True

    def state_dict(self) -> dict[str, object]:
        """The graph as bytes, memory of arrays and of tensors, and the states that objects in it say themselves.

        Raises `NotCarried` for what cannot be told; as steps count, that is left out.
        """
        return self._without(self._unsent, self._encode_graph)

    def look_closely(self) -> None:
        """Let `apart` say all that cannot be told; copies no array. Raises what objects that say their state raise."""
        self._without(self._unsent, partial(self._encode_graph, try_to_encode))

    def _encode_graph(self, encoding: Callable[..., dict[str, object]] = encode_graph) -> dict[str, object]:
        left = {**self._unfollowed, **self._unsent}
        things, _ = self._look(left)
        there = {each: left[each] for each in left if each in self._met}
        return encoding(things, self._originals, self._classes, self._exchanges, there)

    def load_state_dict(self, state_dict: object) -> None:
        """Take over a graph. Raises `StateError` where it does not fit what is here."""
        if not isinstance(state_dict, dict) or not isinstance(state_dict.get("graph"), np.ndarray):
            raise StateError(f"the state of {', '.join(self._roots)} that was received is none")
        encoded = cast(dict[str, Any], state_dict)
        names = decode_graph(encoded, self._originals, self._classes, self._exchanges)
        self.missing = [f"{name} is as the script has built it, though steps had changed it" for name in names]


def living(graphs: Iterable[ObjectGraph]) -> set[int]:
    """Ids of all that these hold."""
    return {id(thing.value) for graph in graphs for thing in graph.things()}
