"""Running another node than 0 of a job: an agent that joins node 0's coordinator, until the job's end."""

import asyncio
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from regrow.agent.processes import adopt_orphans
from regrow.core.errors import DeadlineExceeded, RegrowError, UsageError
from regrow.core.ids import NO_STATE, Seconds, StepNo
from regrow.core.messages import JobFacts
from regrow.launch import folder
from regrow.launch.cache import CacheHome
from regrow.launch.child import AGENT_COMMAND
from regrow.launch.console import Interruptions, Speaker
from regrow.launch.job import JobPlan
from regrow.launch.keeper import AgentKeeper, Household
from regrow.launch.local import GATHER_DEADLINE, VERDICT_DEADLINE, report_left
from regrow.membership.ladder import OK, RUN_AGAIN
from regrow.membership.orders import EndJob
from regrow.membership.view import JobView

Answer = TypeVar("Answer", bound=msgspec.Struct)
_RETRY_EVERY: Seconds = 0.5
_ANSWER_DEADLINE: Seconds = 10.0
_LOST = EndJob(RUN_AGAIN, "node 0, which hosts the job's coordinator, was lost")


def join(plan: JobPlan, *, agent_command: Sequence[str] = AGENT_COMMAND) -> int:
    """Run this node until the job ends; for the main thread of a process that has no other children.

    Returns:
        The job's exit code, the same on every node.

    Raises:
        UsageError: the token or the flags do not fit those of node 0.
        DeadlineExceeded: node 0 could not be reached.
    """
    speaker = Speaker(quiet=plan.quiet)
    adopt_orphans()
    try:
        end = asyncio.run(_Joining(plan, agent_command, speaker).run())
    finally:
        report_left(speaker)
    if end.code != OK:
        speaker.say(f"{plan.node}: {end.diagnosis}")
    return end.code


class _Joining:
    """One node's part of a job."""

    def __init__(self, plan: JobPlan, agent_command: Sequence[str], speaker: Speaker) -> None:
        self._plan = plan
        self._agent_command = agent_command
        self._speaker = speaker
        host, port = plan.endpoint
        self._base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._force = asyncio.Event()
        self._stops: set[asyncio.Task[None]] = set()

    async def run(self) -> EndJob:
        """How the job ended."""
        headers = {"Authorization": f"Bearer {self._plan.token}"}
        async with aiohttp.ClientSession(self._base, headers=headers) as session:
            facts = await self._find_job(session)
            self._check(facts)
            job_dir = self._plan.jobs_home / facts.job
            folder.make_log_dir(Path(self._plan.log_dir) if self._plan.log_dir else job_dir / "logs")
            keeper = self._make_keeper(session, facts, job_dir)
            with Interruptions(lambda why: self._ask_stop(session, why), self._force.set):
                self._speaker.note(f"{self._plan.node} joins job {facts.job} at {self._base}; logs in {job_dir}")
                return await self._accompany(session, keeper)

    def _make_keeper(self, session: aiohttp.ClientSession, facts: JobFacts, job_dir: Path) -> AgentKeeper:
        async def progress() -> StepNo:
            try:
                return (await self._ask(session, "GET", "/status", JobView)).step
            except (aiohttp.ClientError, TimeoutError):
                return NO_STATE  # node 0 is lost: `_wait_end` says so

        config = self._plan.agent_config(
            facts,
            node_rank=self._plan.node_rank,
            coordinator=self._base,
            token=self._plan.token,
            job_dir=job_dir,
            advertise=self._plan.advertise or _route_to(*self._plan.endpoint),
        )
        caches = CacheHome(self._plan.cache, 1, self._speaker)
        caches.open()
        household = Household(self._agent_command, self._plan.socket_home, self._speaker, caches)
        return AgentKeeper(household, config, progress)

    async def _find_job(self, session: aiohttp.ClientSession) -> JobFacts:
        """Node 0 may start later than this one."""
        deadline = time.monotonic() + GATHER_DEADLINE
        waiting = False
        while True:
            try:
                return await self._ask(session, "GET", "/job", JobFacts)
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"no coordinator answered at {self._base} within {GATHER_DEADLINE:g} s: {error}",
                        hint="is node 0 up, and does its --bind let this node reach it?",
                    ) from error
            if not waiting:
                self._speaker.note(f"waiting for node 0 at {self._base}")
                waiting = True
            await asyncio.sleep(_RETRY_EVERY)

    async def _ask(self, session: aiohttp.ClientSession, method: str, path: str, kind: type[Answer]) -> Answer:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_DEADLINE)
        async with session.request(method, path, timeout=timeout) as response:
            body = await response.read()
        if response.status == 401:
            raise UsageError(f"{self._base} refused the token", hint="use the same REGROW_TOKEN on every node")
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{self._base} is no regrow coordinator of this version: {error}",
                hint="check --rdzv-endpoint, and that all nodes run the same regrow",
            ) from error

    def _check(self, facts: JobFacts) -> None:
        mine = self._plan.facts
        for flag, here, there in (
            ("--nnodes", mine.nodes, facts.nodes),
            ("--nproc-per-node", mine.nproc, facts.nproc),
        ):
            if here != there:
                raise UsageError(f"{flag} is {here} here and {there} on node 0", hint="give the same on every node")

    async def _accompany(self, session: aiohttp.ClientSession, keeper: AgentKeeper) -> EndJob:
        """Until the job ends, node 0 is lost, or this node's agents do not stay."""
        ending = asyncio.create_task(_wait_end(session))
        leaving = asyncio.create_task(keeper.keep())
        forced = asyncio.create_task(self._force.wait())
        try:
            await asyncio.wait({ending, leaving, forced}, return_when=asyncio.FIRST_COMPLETED)
            keeper.retire()
            if forced.done():
                return EndJob(RUN_AGAIN, "interrupted twice")
            if not ending.done():
                await asyncio.wait({ending, forced}, timeout=VERDICT_DEADLINE, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                return EndJob(RUN_AGAIN, f"the agent of this node {leaving.result()}; what it said is above")
            await asyncio.wait(
                {leaving, forced}, timeout=self._plan.grace + VERDICT_DEADLINE, return_when=asyncio.FIRST_COMPLETED
            )
            return ending.result()
        finally:
            await keeper.end(within=0.0)
            await asyncio.wait({leaving}, timeout=VERDICT_DEADLINE)
            for task in (ending, leaving, forced):
                task.cancel()

    def _ask_stop(self, session: aiohttp.ClientSession, why: str) -> None:
        self._speaker.note(f"{why}; asking the job to stop (Ctrl-C again: at once)")
        task = asyncio.create_task(self._post_stop(session, why))
        self._stops.add(task)

    async def _post_stop(self, session: aiohttp.ClientSession, why: str) -> None:
        timeout = aiohttp.ClientTimeout(total=VERDICT_DEADLINE)
        try:
            async with session.post("/stop", data=f"{self._plan.node}: {why}", timeout=timeout) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self._speaker.say(f"node 0 cannot be told ({error}); ending this node")
            self._force.set()


async def _wait_end(session: aiohttp.ClientSession) -> EndJob:
    """The job's end, as long as that takes; losing the connection before means that node 0 is gone."""
    try:
        async with session.get("/end", timeout=aiohttp.ClientTimeout(total=None)) as response:
            return msgspec.json.decode(await response.read(), type=EndJob)
    except (aiohttp.ClientError, msgspec.MsgspecError):
        return _LOST


def _route_to(host: str, port: int) -> str:
    """This machine's own address on the way to another one; sends nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RegrowError(f"no way to {host}: {error.strerror or error}", hint="check --rdzv-endpoint") from error
