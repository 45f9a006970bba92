"""The coordinator's side of succession: it sends other nodes' launchers all that they need for a takeover."""

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from functools import partial

import msgspec
from aiohttp import ClientConnectorError, ClientError, ClientSession, ClientTimeout, web

from regrow.core import http, tls
from regrow.core.clock import Clock, MonotonicClock
from regrow.core.ids import Seconds
from regrow.core.messages.elections import CoordinatorPresent, LauncherPresent, Leader, Voter
from regrow.core.process.tasks import Tasks
from regrow.core.wire import UNREADABLE
from regrow.membership.server.http_replies import refusal
from regrow.membership.server.witness_folder import WitnessFolder
from regrow.membership.succession.voters import Voters
from regrow.membership.succession.witness import is_witness

_WRITE_S: Seconds = 0.2
"""Time for which changes are collected before they are written."""
_PROBE_S: Seconds = 1.0
_log = logging.getLogger(__name__)


class _LeaderStatus(Enum):
    OPEN = auto()
    ENDED = auto()
    """The job has ended; no successor is needed."""
    GIVEN_WAY = auto()
    """Another coordinator takes the place of this one."""


class SuccessionApi:
    """Answers launchers; as a context manager, it also keeps the list of voters up to date.

    Args:
        voters: the launchers that may elect a successor.
        remember: returns the encoded knowledge that a successor needs.
        token: the job's secret.
        clock: clock of the machine.
        say: reports to the user, once, that something here fails; it is retried as long as the job lasts.
        witness: a voter on a disk, if there is one.
    """

    def __init__(
        self,
        voters: Voters,
        remember: Callable[[], bytes],
        token: str,
        clock: Clock | None = None,
        say: Callable[[str], None] = _log.error,
        witness: WitnessFolder | None = None,
    ) -> None:
        self.voters = voters
        self._witness = witness
        self.crash = ""
        """Traceback of the first defect of regrow here, for the record."""
        self._say = say
        self._remember = remember
        self._headers = {"Authorization": f"Bearer {token}"}
        self._clock = clock or MonotonicClock()
        self._news = asyncio.Event()
        self._dirty = True
        self._status = _LeaderStatus.OPEN
        self._tasks = Tasks(lambda _, error: self._fail(error))

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to serve."""
        return [web.post("/launcher", self._serve)]

    def changed(self) -> None:
        """Note that the coordinator has made decisions, which successors need to know."""
        self._dirty = True

    def end(self) -> None:
        """Inform launchers that the job has ended, so that they elect no successor."""
        self._status = _LeaderStatus.ENDED
        self._wake()

    def give_way(self) -> None:
        """Release waiting launchers without reporting an end, as the job goes on without this coordinator."""
        self._status = _LeaderStatus.GIVEN_WAY
        self._wake()

    async def __aenter__(self) -> "SuccessionApi":
        """Begin to watch the voters."""
        self._tasks.start(self._look_after(), "looking after the launchers")
        self._tasks.start(self._keep_witness(), "keeping the witness")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop watching the voters."""
        if self._status is _LeaderStatus.OPEN:
            self.end()
        await self._tasks.close()
        if self._witness is not None:
            self._witness.close()

    def remove_witness(self) -> None:
        """Delete the witness, which is no longer needed because the job has ended."""
        if self._witness is not None:
            self._witness.close(remove=True)
            self._witness = None

    async def _keep_witness(self) -> None:
        reported = False
        while (witness := self._witness) is not None:
            try:
                if await witness.bind(self.voters):
                    self._advance()
            except Exception as error:  # noqa: BLE001 - as in `_look_after`
                self._fail(error)
            if not witness.answers and not reported:
                reported = True
                self._say(f"the witness at {witness.voter.address} does not answer; the job goes on without it")
            await asyncio.sleep(self.voters.lease / (4 if self.voters.may_change else 20))

    async def _serve(self, request: web.Request) -> web.Response:
        try:
            present = msgspec.msgpack.decode(await request.read(), type=LauncherPresent)
        except UNREADABLE as error:
            return refusal(400, f"POST /launcher is not understood: {error}", "do all nodes run the same regrow?")
        name, voters = present.voter.name, self.voters
        voters.received(present, self._clock.now())
        self._advance()
        held = present.number if present.term == voters.term else 0
        loop = asyncio.get_running_loop()
        until = loop.time() + voters.lease / 4
        while held >= voters.number and self._status is _LeaderStatus.OPEN and loop.time() < until:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), until - loop.time())
        handover = voters.handover(name) if held < voters.number else None
        ended = self._status is _LeaderStatus.ENDED
        answer = CoordinatorPresent(voters.term, self._clock.now(), voters.lease, handover, ended)
        return web.Response(body=msgspec.msgpack.encode(answer))

    def _write(self) -> None:
        before = self.voters.number
        self.voters.write(self._remember())
        if self.voters.number > before:
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _advance(self) -> None:
        if self.voters.change(self._clock.now()):
            self._wake()

    async def _look_after(self) -> None:
        async with http.session(timeout=ClientTimeout(total=_PROBE_S)) as session:
            tasks: list[Callable[[], Awaitable[None] | None]]
            tasks = [self._write_news, self._advance, partial(self._ask_silent, session)]
            while True:
                await asyncio.sleep(_WRITE_S)
                for task in tasks:
                    try:
                        if (waiting := task()) is not None:
                            await waiting
                    except Exception as error:  # noqa: BLE001 - no exception may end the other tasks
                        self._fail(error)

    def _write_news(self) -> None:
        if self._dirty:
            self._write()
            self._dirty = False

    async def _ask_silent(self, session: ClientSession) -> None:
        now = self._clock.now()
        silent = self.voters.quiet(now) + ([] if self.voters.may_decide(now) else self.voters.free(now))
        for voter in silent:
            if not is_witness(voter):
                await self._ask(session, voter)

    def _fail(self, error: BaseException) -> None:
        if self.crash:
            return
        self.crash = "".join(traceback.format_exception(error))
        self._say(
            f"the state that another coordinator would need cannot be sent ({type(error).__name__}: {error}): the job "
            f"goes on, but may not outlive this node until that succeeds"
        )

    async def _ask(self, session: ClientSession, voter: Voter) -> None:
        """Ask a launcher which leader it follows; note that its process has ended if nothing listens at its address."""
        try:
            async with session.get(tls.url(f"{voter.address}/leader"), headers=self._headers) as response:
                if response.status == 200:
                    self.voters.notified(voter.name, msgspec.json.decode(await response.read(), type=Leader))
        except ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                self.voters.ended(voter.name, self._clock.now())
        except (ClientError, TimeoutError, *UNREADABLE):
            pass
