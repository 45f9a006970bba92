"""An object that says no state of its own: all that it holds is remembered, carried and put back, thing by thing."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from regrow.core.errors import StateError
from regrow.train.graphs.classes import Classes, Outside
from regrow.train.graphs.memory import Memory, go_back, remember
from regrow.train.graphs.read import Originals, hear
from regrow.train.graphs.tell import tell
from regrow.train.graphs.walk import Thing, walk


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
        self.settle()

    def settle(self) -> None:
        """From now on, what is held at this moment counts as built by all ranks."""
        things = self.things()
        self._originals = Originals(things)
        self._outside = Outside()
        self._outside.look(things)
        self._classes = Classes({type(thing.value) for thing in things} | self._originals.classes())

    def things(self) -> list[Thing]:
        """All that is held now. Raises `NotCarried`."""
        return walk(self._roots)

    def remember(self, former: object = None) -> Memory:
        """All as it is now. Raises `NotCarried`.

        Args:
            former: an earlier memory, which is not gone back to any more.
        """
        things = self.things()
        self._outside.look(things)
        return remember(things, former if isinstance(former, Memory) else None)

    def go_back(self, memory: Memory) -> None:
        """Make all that was held what it was; every thing is itself again.

        Raises `NotCarried` where the step has put something into a class, a function or an array that stays there.
        """
        go_back(memory)
        self._outside.look(self.things())

    def state_dict(self) -> dict[str, object]:
        """The graph as bytes, memory of arrays and of tensors, and the states that objects in it say themselves."""
        things = self.things()
        self._outside.look(things)
        return tell(things, self._originals, self._classes)

    def load_state_dict(self, state_dict: object) -> None:
        """Take over a graph. Raises `StateError` where it does not fit what is here."""
        if not isinstance(state_dict, dict) or not isinstance(state_dict.get("graph"), np.ndarray):
            raise StateError(f"the state of {', '.join(self._roots)} that was received is none")
        hear(cast(dict[str, Any], state_dict), self._originals, self._classes)


def living(graphs: Iterable[ObjectGraph]) -> set[int]:
    """Ids of all that these hold."""
    return {id(thing.value) for graph in graphs for thing in graph.things()}
