"""Agents' reports of the copies that they hold, while a generation is repaired."""

from collections.abc import Callable, Iterable, Sequence

from regrow.core.ids import Generation, NodeId, StepNo
from regrow.core.messages.copies import CopiesHeld, KeptCopy
from regrow.membership.recovery_point import SurvivorState, needs_copies


class HeldCopies:
    """The answers of the nodes for one generation. Copies not newer than `began` are of an earlier training."""

    def __init__(self, began: Callable[[], StepNo] = lambda: StepNo(0)) -> None:
        self._began = began
        self.held: dict[NodeId, Sequence[KeptCopy]] = {}
        """Copies in the memory of the nodes that have answered and are still there."""
        self._awaited: set[NodeId] = set()
        self._asked: Generation | None = None

    def ask(self, generation: Generation, nodes: Iterable[NodeId]) -> None:
        """These are asked now; what was said of older generations is forgotten."""
        self.held, self._asked, self._awaited = {}, generation, set(nodes)

    def apply(self, answer: CopiesHeld) -> None:
        """A node has answered."""
        if answer.generation == self._asked and answer.node in self._awaited:
            self._awaited.discard(answer.node)
            began = self._began()
            self.held[answer.node] = [copy for copy in answer.copies if copy.step > began or not began]

    def forget(self, node: NodeId) -> None:
        """A node is gone, and its memory. One that does not answer is lost by its lease, so nobody waits for ever."""
        self._awaited.discard(node)
        self.held.pop(node, None)

    def missing(self, standings: Sequence[SurvivorState]) -> bool:
        """True if the decision must wait for an answer."""
        return bool(self._awaited) and needs_copies(standings)
