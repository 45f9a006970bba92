"""The holder's side of proofs: newcomers that wait for the state before the next step, and that step's results."""

import socket

from regrow.core.ids import NO_STATE, Generation, StepNo
from regrow.hydration.messages import AskState

PLAIN, CLOSELY = "plain", "closely"


class ProofRequests:
    """The proofs that newcomers request from this worker. It has no lock: the caller must hold the server's."""

    def __init__(self) -> None:
        self._waiting: dict[socket.socket, AskState] = {}
        self._served: dict[socket.socket, StepNo] = {}
        self._trace: tuple[Generation, StepNo, bytes] | None = None
        self._recording: tuple[Generation, StepNo] | None = None

    @property
    def wanted(self) -> str:
        """Level of detail that the waiting newcomers request for the next step; empty if no newcomer waits."""
        if not self._waiting:
            return ""
        return CLOSELY if any(ask.proof == CLOSELY for ask in self._waiting.values()) else PLAIN

    def wait(self, sock: socket.socket, ask: AskState) -> None:
        """Note that a newcomer waits for the next step."""
        self._waiting[sock] = ask

    def leave(self, sock: socket.socket) -> None:
        """Forget a newcomer that no longer waits, or has read everything."""
        self._waiting.pop(sock, None)
        self._served.pop(sock, None)

    def step_for(self, sock: socket.socket) -> StepNo:
        """The step of the state that the newcomer gets; `NO_STATE` while it waits."""
        return self._served.get(sock, NO_STATE)

    def offer(self, generation: Generation, step: StepNo) -> list[socket.socket]:
        """Offer the state before `step`, whose results will be recorded; returns the connections that read it."""
        readers = [sock for sock, ask in self._waiting.items() if ask.generation == generation]
        for sock in readers:
            self._served[sock] = step
            del self._waiting[sock]
        self._recording, self._trace = (generation, step), None
        return readers

    def readers(self) -> list[socket.socket]:
        """Connections that read state for a proof."""
        return list(self._served)

    def publish(self, trace: bytes | None) -> None:
        """Keep the trace of the offered step; None if the step was given up."""
        if self._recording is not None and trace is not None:
            self._trace = (*self._recording, trace)
        self._recording = None

    def answer(self, generation: Generation, step: StepNo) -> bytes | None:
        """Return the trace of that step, and forget it; None if there is none."""
        if self._trace is None or self._trace[:2] != (generation, step):
            return None
        (_, _, trace), self._trace = self._trace, None
        return trace

    def expects(self, generation: Generation, step: StepNo) -> bool:
        """True if the trace of that step is still being recorded."""
        return self._recording == (generation, step)
