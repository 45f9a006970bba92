"""Access to the notes of set-ups, which this node's agent keeps."""

import threading
import time
from typing import Protocol

from regrow.comm.store import Connections
from regrow.core.errors import DeadlineExceeded, ProtocolError
from regrow.core.ids import Instant, Seconds
from regrow.core.messages.store import TIMEOUT, AnswersAsked, AnswersNoted

_SEND_S: Seconds = 60.0
_ANSWER_S: Seconds = 120.0
_SLICE_S: Seconds = 30.0


class SetUpNotes(Protocol):
    """A store of the notes."""

    def note(self, answers: dict[str, bytes]) -> None:
        """Store these notes, from any thread; existing ones are not replaced. Raises `OSError` or `ProtocolError`."""
        ...

    def have(self, names: list[str]) -> set[str]:
        """The names among these whose notes are on this node."""
        ...

    def ask(self, names: list[str], until: Instant, rank: int) -> dict[str, bytes]:
        """Wait for any of these; returns all that exist. Raises `DeadlineExceeded`, `OSError` or `ProtocolError`."""
        ...


class AgentNotes:
    """The store of notes in this node's agent.

    Args:
        address: address of the store that the agent serves.
        token: the job's token.
        build: number of the start of all workers to which the notes belong.
        rank: rank of the worker whose notes they are.
    """

    def __init__(self, address: str, token: str, *, build: int, rank: int) -> None:
        self._connections = Connections(address, token)
        self._build, self._rank = build, rank
        self._lock = threading.Lock()

    def note(self, answers: dict[str, bytes]) -> None:
        """Store these notes; see `SetUpNotes.note`."""
        message = AnswersNoted(self._build, self._rank, answers, quiet=True) if answers else None
        if message is None:
            return
        with self._lock, self._connections.lent() as connection:  # pieces in the order of the calls
            connection.send(message, _SEND_S)

    def have(self, names: list[str]) -> set[str]:
        """The names among these whose notes are on this node; see `SetUpNotes.have`."""
        return set(self._ask(AnswersAsked(self._build, self._rank, names, 0.0, here=True)))

    def ask(self, names: list[str], until: Instant, rank: int) -> dict[str, bytes]:
        """Wait for any of these notes; see `SetUpNotes.ask`."""
        while True:
            left = max(0.0, until - time.monotonic())
            found = self._ask(AnswersAsked(self._build, rank, names, min(left, _SLICE_S)))
            if found:
                return found
            if time.monotonic() >= until:
                raise DeadlineExceeded("the answers of the set-up did not arrive in time")

    def _ask(self, request: AnswersAsked) -> dict[str, bytes]:
        with self._connections.lent() as connection:
            reply = connection.ask(request, request.timeout + _ANSWER_S)
        if reply.error and reply.error != TIMEOUT:
            raise ProtocolError(reply.error)
        return reply.also

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()
