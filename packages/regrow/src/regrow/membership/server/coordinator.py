"""The coordinator's I/O: agents over WebSockets, people over HTTP, time by a timer. It makes no decisions."""

import asyncio
import errno
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence
from types import TracebackType

from aiohttp import WSMsgType, web

from regrow.core import http
from regrow.core.clock import Clock, MonotonicClock
from regrow.core.errors import RegrowError, UsageError
from regrow.core.exit_codes import INTERNAL_ERROR
from regrow.core.ids import Instant, NodeId, Seconds, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.succession import NodeReport
from regrow.core.messages.unions import AgentFact, AgentOrder, Fact, NodeOrder
from regrow.core.process.tasks import TaskScope, supervised
from regrow.core.records import JobEnded, Record
from regrow.core.wire import MAX_FRAME_BYTES, FrameCodec
from regrow.membership.admission import Admission, JoinOffer, JoinRequest
from regrow.membership.orders import AnswerScale, Command, EndJob
from regrow.membership.server.agent_link import AgentLink
from regrow.membership.server.hosted import Machine
from regrow.membership.server.http_api import HttpApi
from regrow.membership.server.http_replies import refusal, unknown, words_of

HELLO_DEADLINE = 10.0
"""Silence, in seconds, after which an agent or a launcher counts as lost."""
_CLOSE_DEADLINE = 1.0
_BACKLOG = 4096
"""Number of connections from launchers and agents that the kernel accepts while this process is paused."""
_SHORTEST_WAIT = 0.001
_PAUSE = 1.0
"""A timer that fires this much late, in seconds, shows that this process was paused."""
_CATCH_UP = 5.0
"""After a pause, read queued messages for at most this long, in seconds, before judging deadlines."""

Watcher = Callable[[Record | facts.NodeProgress], None]
"""Called with every record and with the newest commits of each node, as they arrive."""


class Coordinator:
    """Hosts a membership machine: `async with Coordinator(machine, token=...) as coordinator`.

    Args:
        machine: takes the decisions.
        token: the job's secret; every request carries it as `Authorization: Bearer`.
        record: writes one record.
        host, port: address to listen on; port 0 means any free port.
        nodes: the nodes that the job starts on; they are reported to the machine in this order, whichever connects
            first. Others may join later, as far as the job's limits allow. None: all nodes, as they connect.
        known: nodes of the job under earlier coordinators; other nodes do not get their names.
        lease: seconds after which an agent that answers nothing counts as lost.
        near: nodes whose agents are children of this process, which sees their end; their pauses are no loss.
        clock: gives the machine its time.
        routes: further routes to serve.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        token: str,
        record: Callable[[Record], None],
        host: str = "127.0.0.1",
        port: int = 0,
        nodes: Sequence[NodeId] | None = None,
        known: Collection[NodeId] = (),
        lease: Seconds = 10.0,
        near: Collection[NodeId] = (),
        clock: Clock | None = None,
        routes: Sequence[web.RouteDef] = (),
    ) -> None:
        self.watchers: list[Watcher] = []
        self.on_node_lost: list[Callable[[NodeId], None]] = []
        """Called with every lost node."""
        self.crash = ""
        """Traceback of a defect of regrow that ended the job, for the record and not for the screen."""
        self.offer: JoinOffer | None = None
        """Offer to nodes that join later, without their names; None: no further nodes may join."""
        self._machine = machine
        self._secret = f"Bearer {token}".encode()
        self._record = record
        self._host, self._port = host, port
        self._admission = Admission(machine.spec, nodes, known)
        self._lease, self._near = lease, frozenset(near)
        self._clock = clock or MonotonicClock()
        self._routes = routes
        self._codec: FrameCodec[AgentFact] = FrameCodec(AgentFact)
        self._links: dict[NodeId, AgentLink] = {}
        self._homes: dict[WorkerId, NodeId] = {}
        self._end: EndJob | None = None
        self._ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_soon: asyncio.Handle | None = None
        self._runner: web.AppRunner | None = None

    # --- opening and closing -----------------------------------------------------------------------------------

    async def __aenter__(self) -> "Coordinator":
        """Begin to listen. Raises `UsageError` if the address is taken or is not one of this machine."""
        app = web.Application(middlewares=[self._guard])
        api = HttpApi(self, self._machine.spec, lambda: self._machine.world, self._machine.snapshot)
        app.add_routes([web.get("/agent", self._serve_agent), *api.routes(), *self._routes])
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            self._port = await http.listen(
                self._runner, self._host, self._port, reuse=True, backlog=_BACKLOG, endpoint="coordinator", strict=True
            )
        except OSError as error:
            await self._runner.cleanup()
            raise UsageError(
                f"cannot listen on {self._host}:{self._port}: {words_of(error)}",
                hint="another job may hold that port; choose another in --rdzv-endpoint, or leave it out"
                if error.errno == errno.EADDRINUSE
                else "is it an address of this machine? See --bind and --rdzv-endpoint",
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        if self._end is None:
            self.end(EndJob(INTERNAL_ERROR, "the coordinator was closed before the job had ended"))
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self._links.values()):
            await link.socket.close(message=b"the job has ended")
        await http.close(self._runner)

    async def let_nobody_in(self) -> None:
        """Refuse new connections, as if the coordinator had ended; existing connections stay."""
        await http.stop_listening(self._runner)

    @property
    def port(self) -> int:
        """The port on which the coordinator listens."""
        return self._port

    @property
    def over(self) -> bool:
        """True if the job has ended."""
        return self._end is not None

    @property
    def connected(self) -> list[NodeId]:
        """The nodes whose agents are connected."""
        return sorted(self._links)

    # --- facts in, orders out ----------------------------------------------------------------------------------

    def submit(self, fact: Fact) -> AnswerScale | None:
        """Pass a fact to the state machine and carry out the commands that it returns.

        Returns the machine's answer to a request to scale the job; None for other facts, or if the job has ended. An
        exception in here is a defect of regrow, and ends the job.
        """
        answer: AnswerScale | None = None
        if self._end is not None:
            return answer
        if isinstance(fact, NodeReport):
            self._homes.update((past.worker, fact.node) for past in fact.workers)
        try:
            for command in self._machine.handle(fact, self._clock.now()):
                answer = command if isinstance(command, AnswerScale) else answer
                self._carry_out(command)
            if self._timer_soon is None:
                # Once for all facts of a burst, as thousands may arrive at the same time.
                self._timer_soon = asyncio.get_running_loop().call_soon(self._set_timer)
        except Exception as error:  # noqa: BLE001 - any exception ends the job and is reported
            self._fail(error, f"handling {type(fact).__name__}")
        if isinstance(fact, facts.NodeProgress):
            self._show(fact)
        return answer

    async def wait_ended(self) -> EndJob:
        """Wait for the job's end, without a deadline, and return it."""
        await self._ended.wait()
        if self._end is None:
            raise RegrowError("the job has ended without a reason", hint="please report this")
        return self._end

    def end(self, end: EndJob) -> None:
        """End the job for a reason that the machine cannot know; does nothing if it has ended already."""
        if self._end is None:
            self.publish(JobEnded(at=self._clock.now(), code=end.code, diagnosis=end.diagnosis))
            self._finish(end)

    def publish(self, record: Record) -> None:
        """Write a record and pass it to all watchers."""
        self._record(record)
        self._show(record)

    async def stop_nodes(self, reason: str, *, grace: Seconds, margin: Seconds = 3.0) -> list[NodeId]:
        """Order all agents to end their workers and themselves; returns those that did not within `grace + margin`."""
        links = list(self._links.values())
        for link in links:
            link.orders.put_nowait(orders.StopNode(link.node, reason, grace))
        async with TaskScope() as scope:
            if waits := [scope.start(link.gone.wait()) for link in links]:
                await asyncio.wait(waits, timeout=grace + margin)
        return [link.node for link in links if not link.gone.is_set()]

    def _carry_out(self, command: Command) -> None:
        match command:
            case Record():
                self.publish(command)
            case EndJob():
                self._finish(command)
            case orders.SpawnWorker():
                self._homes[command.worker] = command.node
                self._order(command.node, command)
            case _ if isinstance(command, NodeOrder):
                self._order(command.node, command)
            case _ if not isinstance(command, AnswerScale):
                self._order(self._homes[command.worker], command)

    def _order(self, node: NodeId, order: AgentOrder) -> None:
        link = self._links.get(node)
        if link is not None:
            link.orders.put_nowait(order)
        # Without a link the node is lost; the machine learns this from `NodeLost`, not from a failed order.

    def _show(self, item: Record | facts.NodeProgress) -> None:
        for watcher in list(self.watchers):
            try:
                watcher(item)
            except Exception:  # noqa: BLE001 - a watcher must not harm the job; its traceback is kept
                self.watchers.remove(watcher)
                self.crash = self.crash or traceback.format_exc()

    def _finish(self, end: EndJob) -> None:
        self._end = end
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()

    def _fail(self, error: BaseException, doing: str) -> None:
        self.crash = "".join(traceback.format_exception(error))
        self.end(EndJob(INTERNAL_ERROR, f"regrow's coordinator failed in {doing}: {type(error).__name__}: {error}"))

    def _set_timer(self) -> None:
        self._timer_soon = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            deadline = self._machine.next_deadline() if self._end is None else None
        except Exception as error:  # noqa: BLE001 - as in `submit`
            self._fail(error, "looking for the next deadline")
            return
        if deadline is not None:
            wait = max(_SHORTEST_WAIT, deadline - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(wait, self._time_passed, self._clock.now() + wait)

    def _time_passed(self, due: Instant) -> None:
        """Handle the deadline at `due`; if called late, after a pause of this process, read queued messages first."""
        late = self._clock.now() - due
        if late < _PAUSE:
            self.submit(facts.TimeAdvanced())
            return
        again = self._clock.now() + min(late, _CATCH_UP)
        self._timer = asyncio.get_running_loop().call_later(min(late, _CATCH_UP), self._time_passed, again)

    # --- agents ------------------------------------------------------------------------------------------------

    async def _serve_agent(self, request: web.Request) -> web.StreamResponse:
        # A ping every two thirds of the lease, and half of that time for its answer: lost after one lease.
        beat = None if request.query.get("node") in self._near else self._lease * 2 / 3
        socket = web.WebSocketResponse(heartbeat=beat, max_msg_size=MAX_FRAME_BYTES, timeout=_CLOSE_DEADLINE)
        await socket.prepare(request)
        joined = await self._hello(socket)
        if joined is None or joined.node != request.query.get("node"):
            await socket.close(code=4400, message=b"the first message is NodeJoined, of the node in the address")
            return socket
        if refused := self._admission.refusal(joined.node, self._links):
            await socket.close(code=4404, message=refused[0].encode())
            return socket
        if not await self._succeeds(joined, socket):
            await socket.close(code=4409, message=f"{joined.node} is in the job already".encode())
            return socket
        link = self._links[joined.node] = AgentLink(joined, socket)
        sending = supervised(link.send_orders(), "sending an order", lambda doing, error: self._fail(error, doing))
        reason = "its connection ended"
        try:
            self._introduce(joined)
            reason = await self._take_facts(link)
        except RegrowError as error:
            reason = f"{error}; does it run the same version of regrow?"
        except Exception as error:  # noqa: BLE001 - as in `submit`
            self._fail(error, f"listening to {link.node}")
        finally:
            sending.cancel()
            self._unlink(link, reason)
        await socket.close(message=b"this connection is over")
        return socket

    async def _succeeds(self, joined: facts.NodeJoined, socket: web.WebSocketResponse) -> bool:
        """True if an agent may take its node's place; waits until an earlier agent of the node is known to be lost."""
        while (former := self._links.get(joined.node)) is not None and not former.is_of(joined):
            if not await former.gives_way(socket, within=1.5 * self._lease):
                return False
        return True

    def _introduce(self, joined: facts.NodeJoined) -> None:
        for node in self._admission.introduce(joined.node, self._links):
            self.submit(self._links[node].joined)

    def make_offer(self, request: JoinRequest) -> JoinOffer:
        """The offer to a node that asks to join. Raises `UsageError` if it may not join."""
        if self.offer is None:
            raise UsageError("this job takes no further nodes")
        return self._admission.offer(self.offer, request, self._links)

    async def _hello(self, socket: web.WebSocketResponse) -> facts.NodeJoined | None:
        try:
            message = await socket.receive(timeout=HELLO_DEADLINE)
            fact = self._codec.decode(message.data) if message.type is WSMsgType.BINARY else None
        except (TimeoutError, RegrowError):
            return None
        return fact if isinstance(fact, facts.NodeJoined) else None

    async def _take_facts(self, link: AgentLink) -> str:
        """Take an agent's facts until its connection ends; returns the reason of that end."""
        async for message in link.socket:
            if message.type is not WSMsgType.BINARY:
                continue
            if self._links.get(link.node) is not link:
                return "another connection is in its place"
            fact = self._codec.decode(message.data)
            if isinstance(fact, facts.NodeStopped):
                link.stopped = True
                link.gone.set()
            self.submit(fact)
        return link.ended(self._lease)

    def _unlink(self, link: AgentLink, reason: str) -> None:
        link.gone.set()
        if self._links.get(link.node) is not link:
            return
        del self._links[link.node]
        if not link.stopped and self._end is None:
            self.submit(facts.NodeLost(link.node, reason, link.silent(self._lease)))
            for callback in self.on_node_lost:
                callback(link.node)

    # --- people and other nodes --------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if (stranger := unknown(request, self._secret, endpoint="coordinator")) is not None:
            return stranger
        http.admit(request)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return refusal(error.status, f"{request.method} {request.path}: {error.reason}", "")
        except Exception:  # noqa: BLE001 - a request must not harm the job; the traceback is kept
            self.crash = self.crash or traceback.format_exc()
            return refusal(500, f"a defect of regrow: {request.path} cannot be answered; the job goes on", "")
