"""Receives state from all healthy holders at once; each holder sends a different part."""

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from regrow.core.errors import DeadlineExceeded, GenerationHalted, HydrationError, RegrowError
from regrow.core.ids import Generation, Instant, Seconds, StepNo
from regrow.core.messages.state_ways import StateWay, merged
from regrow.core.net import connect, hang_up
from regrow.core.wire import read_frame
from regrow.hydration.direct_kinds import SOCKETS, ReadsOfNewcomer
from regrow.hydration.flows import Flow, Round, address_of, fetch, further, reason
from regrow.hydration.inventory import StateSink
from regrow.hydration.memory import Incoming
from regrow.hydration.messages import (
    AskFlow,
    AskState,
    Direct,
    FlowOpened,
    SendSpans,
    StateOffered,
    StateRefused,
    receiver_side,
)
from regrow.hydration.plan import CHUNK_BYTES, ByteSpan, whole
from regrow.hydration.streams import STALL, allow

_GRACE: Seconds = 1.0
"""Longest wait for the answers of further holders once one has answered."""
_FURTHER: Seconds = 2.0
"""Longest wait for a further connection to open, or for an answer on it."""
_READS_OF_A_BAD_CHUNK = 3
_CANCELLED = -1


class HydrationReport(msgspec.Struct, frozen=True):
    """Number of received bytes and of holders. `lost`: holders that dropped out during the transfer, with the reason.

    `ways`: addresses over which the state came, or could not come. `unlike`: variables that differ between the holders;
    None: the state is this rank's own.
    """

    bytes: int
    seconds: Seconds
    holders: int
    lost: list[str] = []
    ways: list[StateWay] = []
    unlike: list[str] | None = None


def receive(
    sink: StateSink, *, step: StepNo, generation: Generation, token: str, endpoints: Sequence[str], deadline: Instant
) -> HydrationReport:
    """Run `Hydration(...).run()`, for callers that never cancel."""
    return Hydration(sink, step=step, generation=generation, token=token, endpoints=endpoints, deadline=deadline).run()


_Call = tuple[str, str]
"""Endpoint and ticket of a further connection."""


_Peer = tuple[Flow, StateOffered]
"""The first connection to a holder, and its offer."""


class Hydration:
    """One reception of `state@step`. Call `run` once, in one thread; `cancel` may be called in any other.

    Args:
        sink: receives the state. When `run` fails after `prepare`, its state is torn.
        step: the step at which the holders' state must be.
        generation: the generation in which this happens.
        token: the job's secret.
        endpoints: addresses of the holders. The first holder that answers also gives the Python state, and all of them
            give the script's variables on which they agree.
        deadline: on the monotonic clock; a holder that moves nothing for 5 s is given up before.
        proof: request the state before the holder's next step, whatever `step` is: `plain` or `closely`.
        hydration: the kind of reads by which bytes may come (`--hydration`, see `direct`).
        beside: called once by the thread of `run`, while the first bytes arrive; `run` raises its exception.
    """

    def __init__(
        self,
        sink: StateSink,
        *,
        step: StepNo,
        generation: Generation,
        token: str,
        endpoints: Sequence[str],
        deadline: Instant,
        proof: str = "",
        hydration: str = SOCKETS,
        beside: Callable[[], None] | None = None,
    ) -> None:
        self._sink = sink
        self._beside = beside
        self._step = step
        self._proof = proof
        self._generation = generation
        self._token = token
        self._endpoints = list(dict.fromkeys(endpoints))
        self._deadline = deadline
        self._lock = threading.Lock()
        self._cancelled = False
        self._over = False
        self._open: set[socket.socket] = set()
        self._finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lost: list[str] = []
        self._flows: list[Flow] = []
        self._unused: list[StateWay] = []
        self._reads = ReadsOfNewcomer(SOCKETS if proof else hydration)
        self._directs: dict[str, Direct] = {}

    @property
    def step(self) -> StepNo:
        """The step of the state, known once the state has arrived."""
        return self._step

    def cancel(self) -> None:
        """End `run` within milliseconds; `run` then raises `GenerationHalted`."""
        with self._lock:
            self._cancelled = True
            for sock in self._open:
                hang_up(sock)
            self._finished.put(_CANCELLED)

    def run(self) -> HydrationReport:
        """Receive the whole state.

        Raises:
            HydrationError: no holder could give the state, or none in time.
            StateError: the holders' state does not fit this worker.
            GenerationHalted: `cancel` was called.
        """
        started = time.monotonic()
        try:
            peers = self._meet()
            self._flows, offers = [flow for flow, _ in peers], [offer for _, offer in peers]
            inventory = offers[0].inventory
            self._step = inventory.step
            agreed = inventory.agreed(offer.inventory for offer in offers)
            unlike = {each for offer in offers for each in offer.inventory.variables} - agreed.variables.keys()
            incoming = Incoming(self._sink.prepare(agreed))
            self._directs = {offer.ticket: offer.direct for offer in offers}
            calls = further([flow.endpoint for flow in self._flows], offers)
            self._fill(incoming, list(self._flows), whole(inventory.entries), calls)
            self._do_beside()  # reached if there was nothing to receive
            self._say_done()
            incoming.copy_straightened()
            self._sink.finish()
            seconds = time.monotonic() - started
            ways = merged([*(flow.way() for flow in self._flows), *self._unused])
            return HydrationReport(inventory.nbytes, seconds, len(peers), self._lost, ways, sorted(unlike))
        except RegrowError as error:
            if self._cancelled:
                raise GenerationHalted("the reception of state was cancelled") from error
            raise
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            self._over = True
        self._keep(())
        self._reads.close()

    def _keep(self, peers: Sequence[_Peer]) -> None:
        """Keep the connections to these holders, and close those to all others."""
        kept = {flow.sock for flow, _ in peers}
        with self._lock:
            others = self._open - kept
            self._open &= kept
        for sock in others:
            hang_up(sock)
            sock.close()

    def _register(self, sock: socket.socket) -> socket.socket:
        """Make this socket known to `cancel` and to the cleanup at the end; returns the socket."""
        with self._lock:
            if self._over or self._cancelled:
                sock.close()
                raise GenerationHalted("the reception of state was cancelled")
            self._open.add(sock)
        return sock

    # --- finding the holders ---

    def _meet(self) -> list[_Peer]:
        """Connect to the holders; returns those that answer and have the same tensors, in the given order."""
        answers = self._in_threads([partial(self._call, endpoint) for endpoint in self._endpoints], grace=_GRACE)
        peers: list[_Peer] = []
        for endpoint, answer in zip(self._endpoints, answers, strict=True):
            if isinstance(answer, tuple):
                peers.append(answer)
            else:
                self._lost.append(f"{endpoint}: {reason(answer)}")
        self._check()
        if not peers:
            why = "; ".join(self._lost) or "there is none"
            raise HydrationError(f"none of {len(self._endpoints)} holders gave state@{self._step}: {why}")
        entries = peers[0][1].inventory.entries
        agreed = [(flow, offer) for flow, offer in peers if offer.inventory.entries == entries]
        self._lost += [f"{flow.endpoint}: holds other tensors" for flow, offer in peers if (flow, offer) not in agreed]
        self._keep(agreed)
        return agreed

    def _call(self, endpoint: str) -> _Peer:
        sock = connect(endpoint, max(0.001, min(self._deadline - time.monotonic(), STALL)), opened=self._register)
        self._check()
        patience = self._deadline - time.monotonic()
        wanted = self._reads.wanted(endpoint)
        ask = AskState(self._token, self._generation, self._step, patience, self._proof, wanted)
        sock.sendall(receiver_side.frame(ask))
        allow(sock, self._deadline, stall=patience)
        body = read_frame(sock)
        if body is None:
            raise EOFError("it hung up at once: another job's token, or it is closing")
        answer = receiver_side.decode(body)
        if not isinstance(answer, StateOffered):
            raise HydrationError(answer.reason if isinstance(answer, StateRefused) else "it offered no state")
        direct, fallback = self._reads.of(sock, answer.direct)
        return Flow(endpoint, sock, direct=direct, fallback=fallback), answer

    # --- moving the bytes ---

    def _fill(self, incoming: Incoming, flows: list[Flow], pending: list[ByteSpan], calls: list[_Call]) -> None:
        """Distribute the missing chunks over the remaining connections, in rounds, until none is missing."""
        spoiled_rounds = 0
        while pending:
            self._check()
            turn = Round(pending, flows)
            tasks: list[Callable[[], object]] = [partial(fetch, flow, turn, incoming, self._deadline) for flow in flows]
            tasks += [partial(self._add_flow, turn, incoming, *call) for call in calls]
            outcomes, calls = self._in_threads(tasks, meanwhile=self._do_beside), []
            for at, outcome in enumerate(outcomes):
                # A further connection that does not open is no error.
                if isinstance(outcome, BaseException) and not (at >= len(flows) and isinstance(outcome, OSError)):
                    raise outcome
            pending = turn.missing()
            self._flows += turn.flows[len(flows) :]
            self._lost += [
                f"{flow.endpoint}: {flow.bad} chunks did not match their checksum" for flow in turn.flows if flow.bad
            ]
            self._lost += [f"{flow.endpoint}: {flow.failure}" for flow in turn.flows if flow.failure]
            spoiled_rounds += any(flow.bad for flow in turn.flows)
            alive = [flow for flow in turn.flows if not flow.failure]
            # A holder that sent a bad chunk gets another request only if no other holder is left.
            flows = [flow for flow in alive if not flow.bad] or alive
            if pending and (not flows or spoiled_rounds >= _READS_OF_A_BAD_CHUNK):
                self._check()
                left = sum(span.length for span in pending)
                raise HydrationError(
                    f"{left} bytes of state@{self._step} could not be received: {'; '.join(self._lost)}"
                )

    def _do_beside(self) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:
            beside()

    def _add_flow(self, turn: Round, incoming: Incoming, endpoint: str, ticket: str) -> None:
        """Open one more connection and read over it, if it opens before everything has arrived."""

        def opened(sock: socket.socket) -> None:
            turn.begins(self._register(sock))

        try:
            sock = connect(endpoint, max(0.001, min(self._deadline - time.monotonic(), _FURTHER)), opened=opened)
            sock.sendall(receiver_side.frame(AskFlow(self._token, ticket)))
            body = read_frame(sock)
            answer = receiver_side.decode(body) if body is not None else StateRefused("it hung up")
            if not isinstance(answer, FlowOpened):
                raise HydrationError(answer.reason if isinstance(answer, StateRefused) else "it opened no flow")
            direct, fallback = self._reads.of(sock, self._directs[ticket])
            turn.join(flow := Flow(endpoint, sock, True, direct, fallback))
        except (OSError, EOFError, RegrowError) as error:
            if not turn.over:
                self._unused.append(StateWay(address_of(endpoint), failure=reason(error)))
            return
        fetch(flow, turn, incoming, self._deadline)

    def _say_done(self) -> None:
        """Ask the holders to close connections over dead addresses, which this end can no longer close for them."""
        for flow in self._flows:
            if len(self._flows) > 1 and not flow.failure:
                with contextlib.suppress(OSError):
                    flow.sock.sendall(receiver_side.frame(SendSpans([], CHUNK_BYTES)))

    # --- threads ---

    def _check(self) -> None:
        if self._cancelled:
            raise GenerationHalted("the reception of state was cancelled")
        if time.monotonic() >= self._deadline:
            raise HydrationError(
                f"state@{self._step} did not arrive in time: {'; '.join(self._lost) or 'no holder was done'}"
            )

    def _in_threads(
        self,
        tasks: Sequence[Callable[[], object]],
        *,
        grace: Seconds | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[object]:
        """Run each task in a thread; returns the result or error of each, in order.

        `meanwhile` is called while they run; its exception ends them at once, and is raised when they have ended.
        With `grace`, tasks that still run `grace` seconds after the first success are abandoned, and all of them when
        cancelled; without it every task is awaited, because it writes into tensors.
        """
        results: list[object] = [DeadlineExceeded("no answer in time")] * len(tasks)
        # A queue of this call's own: tasks that an earlier call abandoned must not report here.
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        with self._lock:
            self._finished = finished
            if self._cancelled:
                finished.put(_CANCELLED)

        def work(at: int) -> None:
            try:
                results[at] = tasks[at]()
            except Exception as error:  # noqa: BLE001 - handed to the caller of run()
                results[at] = error
            finished.put(at)

        for at in range(len(tasks)):
            try:
                threading.Thread(target=work, args=(at,), name="regrow-hydrate-from", daemon=True).start()
            except RuntimeError as error:
                results[at] = OSError(errno.EAGAIN, str(error))
                finished.put(at)
        failure: BaseException | None = None
        try:
            meanwhile()
        except BaseException as error:  # noqa: BLE001 - raised below, when no task writes into tensors any more
            failure = error
            with self._lock:
                self._over = True
                for sock in self._open:
                    hang_up(sock)
        # The tasks keep the deadline themselves; the extra second lets them report.
        until = self._deadline + 1.0
        running = set(range(len(tasks)))
        while running:
            try:
                at = finished.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if at == _CANCELLED and grace is not None:
                break
            running.discard(at)
            if grace is not None and at >= 0 and not isinstance(results[at], BaseException):
                until = min(until, time.monotonic() + grace)
        if failure is not None:
            raise failure
        return list(results)
