"""Agents' reports of the copies that they hold, while a generation is repaired."""

from collections.abc import Callable, Iterable, Sequence

from regrow.core.ids import Generation, NodeId, StepNo
from regrow.core.messages.copies import CopiesHeld, KeptCopy
from regrow.membership.recovery_point import SurvivorState, needs_copies


class HeldCopies:
    """The nodes' answers for one generation. Copies no newer than `began` belong to an earlier training."""

    def __init__(self, began: Callable[[], StepNo] = lambda: StepNo(0)) -> None:
        self._began = began
        self.held: dict[NodeId, Sequence[KeptCopy]] = {}
        """Copies in the memory of connected nodes that have answered."""
        self._awaited: set[NodeId] = set()
        self._asked: Generation | None = None

    def ask(self, generation: Generation, nodes: Iterable[NodeId]) -> None:
        """Begin to wait for the answers of these nodes; forget answers for older generations."""
        self.held, self._asked, self._awaited = {}, generation, set(nodes)

    def apply(self, answer: CopiesHeld) -> None:
        """Note the copies that a node reports."""
        if answer.generation == self._asked and answer.node in self._awaited:
            self._awaited.discard(answer.node)
            began = self._began()
            self.held[answer.node] = [copy for copy in answer.copies if copy.step > began or not began]

    def forget(self, node: NodeId) -> None:
        """Drop a lost node, whose memory is gone. A silent node is lost when its lease ends, so every wait ends."""
        self._awaited.discard(node)
        self.held.pop(node, None)

    def missing(self, survivors: Sequence[SurvivorState]) -> bool:
        """True if the choice of a start needs the nodes' copies and some node has not answered."""
        return bool(self._awaited) and needs_copies(survivors)
