"""Objects without a state of their own: all that they hold is remembered, sent and put back, object by object."""

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
"""Most things that may be left out of a graph's memory, or of a state that is sent."""


class ObjectGraph:
    """Gives a `state_dict` to environments, replay buffers, and other objects that keep their state in attributes.

    A thing that these objects held when the loop began has the same path on every rank, since all ranks build alike:
    it keeps its identity when a state is received, so its other holders see the change. Other things are made anew.

    Things that several objects share are shared again after a state was received.

    Args:
        roots: the objects by name; the paths of all that they hold begin with these names.

    Raises:
        NotCarried: an object holds something whose state cannot be read.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = dict(roots)
        self._live = False
        self.apart = ""
        """Reason for people why no other process can receive all of this state any more; empty if none is known."""
        self.missing: list[str] = []
        """Sentences on state that was not put back, or not received."""
        self._unfollowed: dict[int, tuple[object, str]] = {}
        self._unsent: dict[int, tuple[object, str]] = {}
        self._met: set[int] = set()
        self.settle()

    def settle(self) -> None:
        """Count all things held now as built alike by all ranks."""
        things = self.things()
        self._originals = Originals(things)
        self._exchanges = Exchanges()
        self._exchanges.look(things, live=False)
        self._classes = Classes({type(thing.value) for thing in things} | self._originals.classes())

    def begin(self) -> None:
        """Called after the rehearsal: from now on, things that cannot be sent only set `apart`, and end no training."""
        self._live = True

    def things(self) -> list[Thing]:
        """All things held now. Raises `NotCarried`."""
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
        """Call `act`; after the rehearsal, leave out the things for which it fails. Raises `NotCarried`."""
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
        """Remember the graph as it is now; None if that fails after the rehearsal. Before, it raises `NotCarried`.

        Args:
            former: an earlier memory that is not needed any more, and is used again.
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
        """Restore all that was held; every thing keeps its identity. False if that fails after the rehearsal.

        Raises `NotCarried` if it fails before.
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
        """The graph as bytes, the memory of arrays and tensors, and the states that objects in it return themselves.

        Raises `NotCarried` for things that cannot be sent; after the rehearsal they are left out instead.
        """
        return self._without(self._unsent, self._encode_graph)

    def look_closely(self) -> None:
        """Make `apart` name all that cannot be sent, without copying arrays. Raises errors of the objects' methods."""
        self._without(self._unsent, partial(self._encode_graph, try_to_encode))

    def _encode_graph(self, encoding: Callable[..., dict[str, object]] = encode_graph) -> dict[str, object]:
        left = {**self._unfollowed, **self._unsent}
        things, _ = self._look(left)
        there = {each: left[each] for each in left if each in self._met}
        return encoding(things, self._originals, self._classes, self._exchanges, there)

    def load_state_dict(self, state_dict: object) -> None:
        """Load a received graph. Raises `StateError` if it does not fit the present one."""
        if not isinstance(state_dict, dict) or not isinstance(state_dict.get("graph"), np.ndarray):
            raise StateError(f"the state of {', '.join(self._roots)} that was received is none")
        encoded = cast(dict[str, Any], state_dict)
        names = decode_graph(encoded, self._originals, self._classes, self._exchanges)
        self.missing = [f"{name} is as the script has built it, though steps had changed it" for name in names]


def living(graphs: Iterable[ObjectGraph]) -> set[int]:
    """Ids of all things that these graphs hold."""
    return {id(thing.value) for graph in graphs for thing in graph.things()}
