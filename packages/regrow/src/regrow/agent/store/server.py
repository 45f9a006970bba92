"""The node's server of the job's key-value store, in which ranks publish what others need to form groups.

The keys are distributed over the agents of the job and outlive every worker. A worker connects to its own node's agent,
which connects to the others (`node`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from regrow.agent.store.peers import PeerLinks
from regrow.agent.store.set_up_answers import SetUpAnswers
from regrow.agent.store.store_node import StoreNode
from regrow.core.config import AgentConfig
from regrow.core.errors import ProtocolError
from regrow.core.ids import Generation, Instant, Seconds
from regrow.core.messages.store import (
    FIRST_SPAWNED,
    AnswersAsked,
    AnswersNoted,
    StoreCancel,
    StoreHello,
    StoreReply,
    StoreRequest,
    StoreSet,
    StoreTable,
)
from regrow.core.net import is_own, same_secret, serve
from regrow.core.process.tasks import supervised
from regrow.core.strangers import HELLO_S, MOST, TURN_S, refused
from regrow.core.wire import MAX_FRAME_BYTES, FrameCodec

_HELLO_BYTES = 64 << 10
_END_S: Seconds = 5.0
_TOGETHER_BYTES = 64 << 10
"""Most bytes of answers that are sent together, if their requests arrived together."""
_CODEC: FrameCodec[StoreRequest] = FrameCodec(StoreRequest)
_log = logging.getLogger("regrow.agent")


class StoreServer:
    """Serves the store to workers of this node and to other agents that know the job's token.

    Args:
        config: a job on one machine is served on a unix socket, others on TCP at `bind`.
        tables: answers requests for tables of generations, if it is to serve them.
    """

    def __init__(
        self, config: AgentConfig, tables: Callable[[StoreTable], Awaitable[StoreReply]] | None = None
    ) -> None:
        self._config = config
        self._token = config.token.encode()
        self.peers = PeerLinks(config.token)
        self._tables = tables
        self.answers = SetUpAnswers(self.peers)
        """Answers that the first workers received before their loop."""
        self._server: asyncio.Server | None = None
        self._serving: set[_Conversation] = set()
        self._crowd = _Crowd()
        self.address = ""
        self.node = self._make_node()

    def _make_node(self) -> StoreNode:
        return StoreNode(self.address, self.peers, alone=self._config.spec.node_limit == 1)

    async def __aenter__(self) -> Self:
        config = self._config
        path = Path(config.socket_dir) / "store" if config.one_machine else None
        serving = serve(self._conversation, path, bind=config.bind, advertise=config.advertise)
        self._server, self.address = await serving
        self.peers.open(self.address)
        self.node = self._make_node()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        await self.answers.close()
        await self.peers.close()
        left = [conversation.hang_up() for conversation in self._serving]
        if left:
            await asyncio.wait(left, timeout=_END_S)

    def generation_formed(self, generation: Generation, stores: Sequence[str] = (), world: int = 0) -> None:
        """Keep the keys of this generation of `world` ranks on these agents, and those of the generation before."""
        self.node.learn(generation, stores, world)
        self.answers.learn(self.address, stores, world)
        self.node.drop_before(Generation(generation - 1))

    def spawned(self, generation: Generation) -> None:
        """Note the first generation for which a worker is spawned, which later workers can read."""
        if self.node.table.get(FIRST_SPAWNED) is None:
            self.node.table.put(FIRST_SPAWNED, str(generation).encode())

    def _conversation(self) -> "_Conversation":
        return _Conversation(self._at_once, self._answer, self._token, self._serving, self._crowd)

    def _at_once(self, request: StoreRequest, caller: str) -> StoreReply | None:
        if isinstance(request, AnswersNoted):
            self.answers.note(request)
            return StoreReply()
        if isinstance(request, AnswersAsked):
            return self.answers.at_once(request)
        return self.node.at_once(request, caller)

    async def _answer(self, request: StoreRequest, caller: str) -> StoreReply:
        if isinstance(request, StoreTable) and self._tables is not None:
            return await self._tables(request)
        if isinstance(request, AnswersAsked):
            return await self.answers.answer(request)
        return await self.node.carry_out(request, caller)


class _Crowd:
    """Clients that have sent no greeting: if there are more than `MOST`, the oldest are refused after `TURN_S`."""

    def __init__(self) -> None:
        self._since: dict[_Conversation, Instant] = {}
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, client: "_Conversation") -> None:
        """Add a client that has connected."""
        self._since[client] = time.monotonic()
        if len(self._since) > MOST and self._timer is None:
            self._look()

    def leave(self, client: "_Conversation") -> None:
        """Remove a client that has greeted or disconnected."""
        self._since.pop(client, None)

    def _look(self) -> None:
        self._timer = None
        while len(self._since) > MOST:
            client, since = next(iter(self._since.items()))
            left = since + TURN_S - time.monotonic()
            if left > 0.0:
                self._timer = asyncio.get_running_loop().call_later(left, self._look)
                return
            del self._since[client]
            client.give_way()


class _Conversation(asyncio.Protocol):
    """Conversation with one client, a worker or another agent. Waiting requests do not delay others.

    Args:
        at_once: returns the answer to a request that needs no wait, None for any other request.
        carry_out: answers all other requests.
        token: the job's secret, which the client must know.
        serving: all open conversations.
        crowd: clients that have not greeted yet.
    """

    def __init__(
        self,
        at_once: Callable[[StoreRequest, str], StoreReply | None],
        carry_out: Callable[[StoreRequest, str], Awaitable[StoreReply]],
        token: bytes,
        serving: "set[_Conversation]",
        crowd: "_Crowd",
    ) -> None:
        self._at_once, self._carry_out = at_once, carry_out
        self._token = token
        self._serving, self._crowd = serving, crowd
        self._transport: asyncio.Transport
        self._hello_timer: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._caller: str | None = None
        self._received = bytearray()
        self._full = False
        """True if the client reads its answers too slowly, so that its requests wait."""
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._taking = False
        self._said = bytearray()
        """Answers to the requests that are being handled."""

    # --- called by the event loop ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with a client that has connected, which must greet now."""
        self._transport = transport  # type: ignore[assignment]  # of a stream, so it can write
        self._serving.add(self)
        self._crowd.enter(self)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_S, self._refuse, "no greeting came")
        if not is_own(transport.get_extra_info("socket")):
            self._refuse("it is of another user")

    def data_received(self, data: bytes) -> None:
        """Take bytes of requests."""
        self._received += data
        self._go_on()

    def pause_writing(self) -> None:
        """Stop reading for now, as the buffer of answers is full."""
        self._full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again, as the buffer has room."""
        self._full = False
        self._go_on()
        if not self._full:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Drop the answers that are under way, as the connection has ended."""
        self._serving.discard(self)
        self._crowd.leave(self)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        for task in list(self._answering.values()):
            task.cancel()
        if not self._over.done():
            self._over.set_result(None)

    # --- the conversation --------------------------------------------------------------------------------------

    def hang_up(self) -> "asyncio.Future[None]":
        """Close the connection; returns a future that is done when it has ended."""
        self._transport.close()
        return self._over

    def _go_on(self) -> None:
        """Handle the requests that have arrived completely."""
        self._taking = True
        try:
            while not self._full and not self._transport.is_closing():
                greeted = self._caller is not None
                request = _CODEC.next(self._received, MAX_FRAME_BYTES if greeted else _HELLO_BYTES)
                if request is None:
                    break
                if greeted:
                    self._take(request)
                else:
                    self._greet(request)
                if len(self._said) > _TOGETHER_BYTES:
                    self._send_said()
        except ProtocolError as error:
            self._refuse(str(error))
        finally:
            self._taking = False
            self._send_said()

    def _send_said(self) -> None:
        said, self._said = self._said, bytearray()
        if said and not self._transport.is_closing():
            self._transport.write(said)

    def give_way(self) -> None:
        """Refuse this client, which has not greeted while others wait."""
        self._refuse("a client that sent no greeting while others waited")

    def _refuse(self, why: str) -> None:
        if not self._transport.is_closing():
            refused.add("store", why)
            self._transport.close()

    def _greet(self, hello: StoreRequest) -> None:
        if not isinstance(hello, StoreHello) or not same_secret(hello.token, self._token):
            raise ProtocolError("the client does not know the job's token")
        self._crowd.leave(self)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._caller = hello.agent
        self._say(StoreReply(), hello)

    def _take(self, request: StoreRequest) -> None:
        number, caller = request.ask, self._caller or ""
        asked = self._answering.get(number)
        if isinstance(request, StoreCancel):
            if asked is not None:
                asked.cancel()
            return
        if asked is not None:
            raise ProtocolError(f"request {number} is not answered yet, and was sent again")
        reply = self._at_once(request, caller)
        if reply is not None:
            self._say(reply, request)
            return
        task = supervised(self._answer(request, caller), "a request to the store could not be answered", self._failed)
        self._answering[number] = task
        task.add_done_callback(lambda _: self._answering.pop(number))

    def _failed(self, what: str, error: BaseException) -> None:
        _log.error(what, exc_info=error)
        self._transport.close()  # So that the client does not wait for the answer.

    async def _answer(self, request: StoreRequest, caller: str) -> None:
        self._say(await self._carry_out(request, caller), request)

    def _say(self, reply: StoreReply, request: StoreRequest) -> None:
        if isinstance(request, StoreSet | StoreHello | AnswersNoted) and request.quiet and not reply.error:
            return
        number = request.ask
        try:
            frame = _CODEC.frame(reply if reply.ask == number else msgspec.structs.replace(reply, ask=number))
        except ProtocolError as error:
            frame = _CODEC.frame(StoreReply(error=str(error), ask=number))
        if self._taking:
            self._said += frame
        else:
            self._transport.write(frame)
