"""Collectives that a script calls outside its steps: refused where newcomers do not call them."""

from regrow.comm.groups import Groups
from regrow.core.board import Board
from regrow.core.errors import UsageError
from regrow.train.worker.body import Body
from regrow.train.worker.control import Control


class StrayCalls:
    """Notes the collectives of one worker.

    Args:
        board: where its agent sees that it goes on.
        groups: which of its calls were refused.
        control: whether others may stand elsewhere.
        body: whether it is in one.
    """

    def __init__(self, board: Board, groups: Groups, control: Control, body: Body) -> None:
        self._board, self._groups, self._control, self._body = board, groups, control, body
        self._last = ""

    def called(self, name: str) -> None:
        """The script calls a collective. Raises `UsageError` where others would take it for another one."""
        self._last = name
        if self._control.reformed and not self._body.begun:
            # They are at the next step already; whatever they call there would be taken for the answer to this.
            raise UsageError(
                f"{name} was called outside a step, and a fault has just brought in ranks that do not call it",
                hint="mark the function that calls it @regrow.restartable",
            )
        self._board.call()

    def advice(self) -> str:
        """Advice for people about the last call, if it was outside a step; empty: none."""
        name = self._groups.refused_call if self._groups.refused else self._last
        if self._body.begun or not name:
            return ""
        return f"{name} was called outside a step: mark the function that does @regrow.restartable"
