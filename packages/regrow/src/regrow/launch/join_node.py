"""Runs a node other than node 0: its agent joins node 0's coordinator until the job ends or the node leaves it."""

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from regrow.agent.calls import check_calls, check_temporary_folder
from regrow.agent.workers.processes import adopt_orphans
from regrow.core import http, tls
from regrow.core.errors import DeadlineExceeded, UsageError
from regrow.core.exit_codes import OK, RUN_AGAIN
from regrow.core.hosts import address_of, route_to
from regrow.core.ids import NO_STATE, NodeId, Seconds
from regrow.core.job import JobSpec
from regrow.core.messages.elections import Leader
from regrow.core.process.tasks import Tasks, TaskScope
from regrow.core.wire import UNREADABLE
from regrow.launch import folder
from regrow.launch.agent_supervisor import AgentSupervisor, Departure, NodeAgents, Outlook
from regrow.launch.cache import CacheHome
from regrow.launch.child import AGENT_COMMAND
from regrow.launch.console import Console, Interruptions
from regrow.launch.job import JobPlan
from regrow.launch.local import GATHER_DEADLINE, VERDICT_DEADLINE, report_left
from regrow.launch.remote import refusal_of
from regrow.launch.succession.following import FollowingLauncher
from regrow.launch.succession.hosting import NextHost
from regrow.membership.orders import AnswerScale, EndJob
from regrow.membership.server.requests import DrainRequest
from regrow.membership.view import JobView
from regrow.observe.story import not_kept

Answer = TypeVar("Answer", bound=msgspec.Struct)
_RETRY_EVERY: Seconds = 0.5
_SAID_AFTER = 10
"""Warn after this many refused connections."""
_ANSWER_DEADLINE: Seconds = 10.0
_END_NEWS_S: Seconds = 1.0
"""Time, after an agent ended on order, for a message to arrive that the job has ended, if that was the reason."""
_ELECTED_S: Seconds = 60.0
"""Longest search for an elected coordinator."""
_LOST = EndJob(RUN_AGAIN, "node 0, which hosts the job's coordinator, was lost")


def join(
    plan: JobPlan,
    leader: Leader | None = None,
    *,
    agent_command: Sequence[str] = AGENT_COMMAND,
    given_back_code: int = OK,
) -> int:
    """Run this node until the job ends or the node leaves it. Call it in the main thread, without child processes.

    Args:
        plan: this node's part of the job.
        leader: the coordinator; None: the one at the endpoint of the plan.
        agent_command: command line that starts an agent.
        given_back_code: exit code for a node that was given back while the job goes on.

    Returns:
        The job's exit code, the same on every node, or `given_back_code`.

    Raises:
        UsageError: the token or the flags do not match those of node 0.
        DeadlineExceeded: the coordinator could not be reached.
    """
    check_calls()
    check_temporary_folder()
    console = Console(quiet=plan.quiet)
    for note in plan.notes:
        console.note(note)
    adopt_orphans()
    try:
        leader = leader or Leader(plan.term, tls.url(address_of(*plan.endpoint)))
        end = asyncio.run(_Joining(plan, leader, agent_command, console, given_back_code).run())
    finally:
        report_left(console)
    if end.code != OK:
        console.say(f"{plan.node}: {end.diagnosis}")
    return end.code


class _Joining:
    """One node's part of a job, from joining it to its end."""

    def __init__(
        self, plan: JobPlan, leader: Leader, agent_command: Sequence[str], console: Console, given_back_code: int
    ) -> None:
        self._plan, self._leader = plan, leader
        self._given_back_code = given_back_code
        self._agent_command = agent_command
        self._console = console
        self._base = leader.address
        self._force = asyncio.Event()
        self._forced_by = "interrupted twice"
        self._messages = Tasks(lambda doing, error: self._give_up(f"{doing} failed: {error!r}"))
        self._follower: FollowingLauncher | None = None

    async def run(self) -> EndJob:
        """Take part in the job; returns its end."""
        headers = {"Authorization": f"Bearer {self._plan.token}"}
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(http.session(headers=headers))
            spec = await self._find_job(session)
            self._check(spec)
            job_dir = self._plan.jobs_home / spec.job
            folder.make_log_dir(Path(self._plan.log_dir) if self._plan.log_dir else job_dir / "logs")
            advertise = self._plan.advertise or route_to(*self._plan.endpoint, flag="--rdzv-endpoint")
            host = NextHost(self._plan, spec, job_dir, advertise, self._console)
            if spec.can_elect:
                self._follower = await stack.enter_async_context(
                    FollowingLauncher(
                        self._plan.node,
                        token=self._plan.token,
                        bind=self._plan.bind,
                        advertise=advertise,
                        say=self._console.say,
                        become_leader=host.open,
                    )
                )
                self._follower.follow(self._leader)
            supervisor = self._make_supervisor(session, spec, job_dir, advertise)
            with self._interruptions(session, spec):
                self._console.note(f"{self._plan.node} joins job {spec.job} at {self._base}; logs in {job_dir}")
                end = await self._accompany(session, supervisor, host)
            await host.close(end)
            if end.code == OK and (unkept := not_kept(self._console.unkept)):
                self._console.say(unkept)
            return end

    def _make_supervisor(
        self, session: aiohttp.ClientSession, spec: JobSpec, job_dir: Path, advertise: str
    ) -> AgentSupervisor:
        async def ask(node: NodeId) -> Outlook:
            try:
                job = await self._ask(session, "GET", "/status", JobView)
            except (aiohttp.ClientError, TimeoutError):
                return Outlook(NO_STATE, leaving=False)  # Node 0 is lost, which `_wait_end` reports.
            return Outlook(job.step, any(each.draining or each.left for each in job.nodes if each.node == node))

        config = self._plan.agent_config(
            spec,
            node_rank=self._plan.node_rank,
            coordinator=self._base,
            token=self._plan.token,
            job_dir=job_dir,
            advertise=advertise,
        )
        if self._follower is not None:
            config = msgspec.structs.replace(config, launcher=self._follower.url, term=self._leader.term)
        caches = CacheHome(self._plan.cache, 1, self._console)
        caches.open()
        node_agents = NodeAgents(self._agent_command, self._console, caches)
        return AgentSupervisor(node_agents, config, ask)

    async def _find_job(self, session: aiohttp.ClientSession) -> JobSpec:
        """Query the job's specification; retries, because node 0 may start later than this node."""
        within = GATHER_DEADLINE if self._leader.term == 1 else _ELECTED_S
        deadline = time.monotonic() + within
        waiting, silent = False, 0
        while True:
            try:
                return await self._ask(session, "GET", "/job", JobSpec)
            except aiohttp.ClientConnectorCertificateError as error:
                raise UsageError(f"there is no TLS connection to {self._base}: {error}", hint=tls.ALIKE) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                # A proxy in front of a node 0 that is not up yet accepts connections too.
                unlike = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientSSLError)
                silent += unlike
                if unlike and silent == _SAID_AFTER:
                    cause = f"{self._base} closes the connection without an answer: perhaps a job with TLS"
                    if isinstance(error, aiohttp.ClientSSLError):
                        cause = f"there is no TLS connection to {self._base}: {error}"
                    self._console.say(f"{cause} ({tls.ALIKE}); waiting on")
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"no coordinator answered at {self._base} within {within:g} s: {error}",
                        hint="is node 0 up, and does its --bind let this node reach it?",
                    ) from error
            if not waiting:
                self._console.note(f"waiting for node 0 at {self._base}")
                waiting = True
            await asyncio.sleep(_RETRY_EVERY)

    async def _ask(
        self, session: aiohttp.ClientSession, method: str, path: str, kind: type[Answer], body: bytes | None = None
    ) -> Answer:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_DEADLINE)
        async with session.request(method, f"{self._base}{path}", data=body, timeout=timeout) as response:
            answer = await response.read()
        if response.status == 401:
            raise UsageError(f"{self._base} refused the token", hint="use the same REGROW_TOKEN on every node")
        if response.status >= 400:
            raise refusal_of(self._base, response.status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except UNREADABLE as error:
            raise UsageError(
                f"{self._base} is no regrow coordinator of this version: {error}",
                hint="check --rdzv-endpoint, and that all nodes run the same regrow",
            ) from error

    def _check(self, spec: JobSpec) -> None:
        mine = self._plan.spec
        for flag, here, there in (
            ("--nnodes", mine.nodes, spec.nodes),
            ("--nproc-per-node", mine.nproc, spec.nproc),
            ("--spares", mine.spares, spec.spares),
        ):
            if here != there:
                raise UsageError(f"{flag} is {here} here and {there} on node 0", hint="give the same on every node")

    async def _accompany(self, session: aiohttp.ClientSession, supervisor: AgentSupervisor, host: NextHost) -> EndJob:
        """Wait until the job ends, its coordinator is lost for good, the node was given back, or its agents give up."""
        async with TaskScope() as scope:
            ending = scope.start(self._wait_end(session, supervisor))
            leaving, forced = scope.start(supervisor.keep()), scope.start(self._force.wait())
            try:
                await asyncio.wait({ending, leaving, forced}, return_when=asyncio.FIRST_COMPLETED)
                supervisor.retire()
                if forced.done():
                    return EndJob(RUN_AGAIN, self._forced_by)
                if not ending.done():
                    return await self._left(leaving.result(), ending, forced)
                stopping = scope.start(host.stop_nodes(ending.result()))
                await asyncio.wait(
                    {leaving, forced}, timeout=self._plan.grace + VERDICT_DEADLINE, return_when=asyncio.FIRST_COMPLETED
                )
                await asyncio.wait({stopping, forced}, return_when=asyncio.FIRST_COMPLETED)
                return ending.result()
            finally:
                await supervisor.end(within=0.0)
                await asyncio.wait({leaving}, timeout=VERDICT_DEADLINE)
                self._messages.cancel()

    async def _wait_end(self, session: aiohttp.ClientSession, supervisor: AgentSupervisor) -> EndJob:
        """Wait for the job's end, which the coordinator of that time reports."""
        term = self._leader.term
        if self._follower is None:
            return await _end_of(session, self._base) or _LOST
        while True:
            async with TaskScope() as scope:
                ending, following = scope.start(_end_of(session, self._base)), scope.start(self._follower.next(term))
                # A coordinator that lost power closes no connection: follow the election as well.
                await asyncio.wait({ending, following}, return_when=asyncio.FIRST_COMPLETED)
                if ending.done() and (end := ending.result()) is not None:
                    return end
                await asyncio.wait({following}, timeout=_RETRY_EVERY)
                if not following.done():
                    continue  # The coordinator may still run; only this connection is lost.
                leader = following.result()
                if leader is None and self._follower.ended:
                    await asyncio.wait({ending}, timeout=VERDICT_DEADLINE)
                    return (ending.result() if ending.done() else None) or _LOST
            if leader is None:
                return _LOST
            term, self._base = leader.term, leader.address
            supervisor.follow(leader)
            self._console.note(f"{self._plan.node} follows the job's coordinator to {self._base}")

    async def _left(self, left: Departure, ending: "asyncio.Task[EndJob]", forced: "asyncio.Task[bool]") -> EndJob:
        """The end to report if the node's last agent ended before a message of the job's end arrived."""
        wait = _END_NEWS_S if left.given_back else VERDICT_DEADLINE
        await asyncio.wait({ending, forced}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            return ending.result()
        if left.given_back:
            self._console.note(f"{self._plan.node} has left the job, which goes on without it")
            return EndJob(self._given_back_code, "it was given back")
        return EndJob(RUN_AGAIN, f"the agent of this node {left.how}; its output is above")

    # --- interruptions -----------------------------------------------------------------------------------------

    def _interruptions(self, session: aiohttp.ClientSession, spec: JobSpec) -> Interruptions:
        if not spec.can_lose_nodes:
            return Interruptions(lambda why, _: self._ask_stop(session, why), self._force.set)
        return Interruptions(
            lambda why, number: self._ask_drain(session, why, number), self._force.set, notice=signal.SIGUSR1
        )

    def _ask_stop(self, session: aiohttp.ClientSession, why: str) -> None:
        self._console.note(f"{why}; asking the job to stop (Ctrl-C again: at once)")
        self._messages.start(self._post_stop(session, why), "asking the job to stop")

    async def _post_stop(self, session: aiohttp.ClientSession, why: str) -> None:
        timeout = aiohttp.ClientTimeout(total=VERDICT_DEADLINE)
        try:
            async with session.post(
                f"{self._base}/stop",
                params={"patience": f"{self._plan.drain_grace:g}"},
                data=f"{self._plan.node}: {why}",
                timeout=timeout,
            ) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self._give_up(f"node 0 cannot be notified ({error})")

    def _ask_drain(self, session: aiohttp.ClientSession, why: str, number: signal.Signals) -> None:
        grace = self._plan.drain_grace
        self._console.note(f"{why}; giving {self._plan.node} back, its ranks have {grace:g} s (again: at once)")
        self._messages.start(self._drain(session, why), "giving this node back")
        if number != signal.SIGUSR1:  # a request to end is honored, whatever the coordinator answers
            late = f"its ranks had not left it after {grace:g} s"
            asyncio.get_running_loop().call_later(grace, self._give_up, late)

    async def _drain(self, session: aiohttp.ClientSession, why: str) -> None:
        request = DrainRequest(self._plan.node, self._plan.drain_grace, why, certain=True)
        try:
            answer = await self._ask(session, "POST", "/drain", AnswerScale, msgspec.json.encode(request))
        except (aiohttp.ClientError, TimeoutError, UsageError) as error:
            self._give_up(f"node 0 cannot be notified ({error})")
        else:
            if not answer.accepted:
                self._give_up(answer.reason)

    def _give_up(self, why: str) -> None:
        if not self._force.is_set():
            self._console.say(f"{why}; ending this node")
            self._forced_by = why
            self._force.set()


async def _end_of(session: aiohttp.ClientSession, base: str) -> EndJob | None:
    """Wait without a limit for the job's end; None if the connection is lost before that."""
    try:
        async with session.get(f"{base}/end", timeout=aiohttp.ClientTimeout(total=None)) as response:
            return msgspec.json.decode(await response.read(), type=EndJob)
    except (aiohttp.ClientError, *UNREADABLE):
        return None
