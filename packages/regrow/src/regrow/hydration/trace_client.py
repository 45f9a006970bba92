"""Requests, from the holder of a state, the results of the step that followed it."""

import socket
import threading
import time

from regrow.core.errors import DeadlineExceeded, GenerationHalted, HydrationError
from regrow.core.ids import Generation, Instant, StepNo
from regrow.core.net import connect, hang_up
from regrow.core.wire import read_frame
from regrow.hydration.messages import AskTrace, StateRefused, TraceGiven, receiver_side
from regrow.hydration.streams import STALL


class TraceRequest:
    """One request for a step's results. Call `run` once, in one thread; `cancel` may be called in any other.

    Args:
        endpoint: endpoint of the holder of the state.
        token: the job's secret.
        generation: generation in which the state was offered.
        step: the step whose results are requested.
    """

    def __init__(self, endpoint: str, token: str, generation: Generation, step: StepNo) -> None:
        self._endpoint, self._ask = endpoint, (token, generation, step)
        self._lock = threading.Lock()
        self._cancelled = False
        self._sock: socket.socket | None = None

    def cancel(self) -> None:
        """End `run` at once; `run` then raises `GenerationHalted`."""
        with self._lock:
            self._cancelled = True
            if self._sock is not None:
                hang_up(self._sock)

    def run(self, deadline: Instant) -> bytes:
        """The trace of the step, as the holder has encoded it. `deadline`: on the monotonic clock.

        Raises `HydrationError` if the holder does not send it, `GenerationHalted` if `cancel` was called.
        """
        try:
            sock = connect(self._endpoint, STALL, opened=self._register)
            try:
                return self._asked(sock, deadline)
            finally:
                with self._lock:
                    self._sock = None
                sock.close()
        except (OSError, EOFError, DeadlineExceeded) as error:
            if self._cancelled:
                raise GenerationHalted("the request was cancelled") from error
            raise HydrationError(f"{self._endpoint} did not send a trace of its step: {error}") from error

    def _asked(self, sock: socket.socket, deadline: Instant) -> bytes:
        patience = max(0.1, deadline - time.monotonic())
        sock.settimeout(patience + STALL)
        sock.sendall(receiver_side.frame(AskTrace(*self._ask, patience)))
        body = read_frame(sock)
        if body is None:
            raise EOFError("it hung up")
        answer = receiver_side.decode(body)
        if not isinstance(answer, TraceGiven):
            raise HydrationError(answer.reason if isinstance(answer, StateRefused) else "it gave no trace")
        return answer.trace

    def _register(self, sock: socket.socket) -> socket.socket:
        with self._lock:
            if self._cancelled:
                sock.close()
                raise GenerationHalted("the request was cancelled")
            self._sock = sock
        return sock
