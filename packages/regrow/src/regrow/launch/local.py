"""Runs node 0 of a job: the coordinator in this process, agents as its children; leaves no process behind."""

import asyncio
import secrets
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from regrow.agent.calls import check_calls, check_temporary_folder
from regrow.agent.workers.fencing import end_children
from regrow.agent.workers.processes import adopt_orphans
from regrow.core import tls
from regrow.core.clock import MonotonicClock
from regrow.core.config import AgentConfig
from regrow.core.errors import UsageError
from regrow.core.exit_codes import INTERNAL_ERROR, OK, RUN_AGAIN
from regrow.core.hosts import LOOPBACK, address_of, check_loopback
from regrow.core.ids import JobId, NodeId, Seconds, StepNo
from regrow.core.job import JobSpec
from regrow.core.messages import facts
from regrow.core.messages.elections import Leader, Voter
from regrow.core.messages.lineage import Lineage
from regrow.core.process.tasks import Tasks, TaskScope
from regrow.core.records import JobStarted
from regrow.hydration.durable import ownership
from regrow.launch import folder
from regrow.launch.agent_supervisor import AgentSupervisor, NodeAgents, Outlook
from regrow.launch.cache import CacheHome
from regrow.launch.child import AGENT_COMMAND
from regrow.launch.console import Console, Interruptions
from regrow.launch.job import JobPlan, job_nodes, node_name
from regrow.launch.succession.coordinator_host import CoordinatorHost
from regrow.membership.machine import Membership
from regrow.membership.orders import Deposed, EndJob
from regrow.membership.restartable import RestartableMachine
from regrow.membership.server.coordinator import Coordinator, Watcher
from regrow.membership.server.witness_folder import WitnessFolder, make_witness
from regrow.membership.states import Gathering
from regrow.membership.succession.voters import VOTE_LEASE, Voters
from regrow.observe.story import count, not_kept, seconds, tally
from regrow.observe.watch.figures import FiguresApi
from regrow.observe.watch.progress_lines import ProgressLines

VERDICT_DEADLINE: Seconds = 5.0
"""Time for the membership machine to end a job after a stop request."""
_KILL_DEADLINE: Seconds = 5.0
_GIVE_WAY_S: Seconds = 2.0
"""Time for this node's agents to end after another coordinator was elected, which counts this node as lost."""
GATHER_DEADLINE: Seconds = 600.0
"""Time for the nodes of a job to register; torchrun's `join_timeout`."""

Rejoin: TypeAlias = Callable[[JobPlan, Leader], int]


def run(
    plan: JobPlan,
    *,
    watchers: Sequence[Watcher] = (),
    agent_command: Sequence[str] = AGENT_COMMAND,
    rejoin: Rejoin | None = None,
) -> int:
    """Run node 0 of a job to its end. Call it in the main thread of a process that has no other children.

    Args:
        plan: the job.
        watchers: called with every record and every node's newest commits, in this process's event loop.
        agent_command: command line that starts an agent, which reads its configuration from standard input.
        rejoin: if another node's launcher was elected coordinator meanwhile, runs this node under that coordinator to
            the end of the job; without it this node ends with 75.

    Returns:
        The exit code: 0, 1 (the script's own error), 75 (run again), 70 (a defect of regrow).

    Raises:
        UsageError: the job could not be started; nothing runs.
    """
    check_calls()
    check_temporary_folder()
    console = Console(quiet=plan.quiet)
    adopt_orphans()
    try:
        launch = _Launch(plan, watchers, agent_command, console)
        end = asyncio.run(launch.run())
        if rejoin is None or not isinstance(end, Deposed) or end.by is None:
            return end.code
        report_left(console)
        code = rejoin(msgspec.structs.replace(plan, notes=[]), end.by)
        launch.close_entry(EndJob(code, ""))
        return code
    finally:
        report_left(console)
        console.close()


def report_left(console: Console) -> None:
    """End all children of this process, and print those that could not be ended."""
    if left := end_children(within=_KILL_DEADLINE):
        console.say(f"processes {', '.join(map(str, left))} cannot be ended (they wait inside the kernel)")


class _Launch:
    """One run of a job, from making its folder to its exit code."""

    def __init__(
        self, plan: JobPlan, watchers: Sequence[Watcher], agent_command: Sequence[str], console: Console
    ) -> None:
        self._plan, self._watchers = plan, watchers
        self._agent_command = agent_command
        self._console = console
        self._force = asyncio.Event()
        self._entry: tuple[Path, folder.JobEntry] | None = None
        self._refused: Callable[[], Collection[StepNo]] = tuple
        self._done: Callable[[], tuple[int, str]] = lambda: (0, "")
        """Returns the job's number of steps, and its incidents and changes in words."""
        self._lineage: Lineage | None = None
        """Owner of the job's checkpoints, if it writes any."""

    async def run(self) -> EndJob:
        """Run the job; returns its end, or a `Deposed` if another launcher hosts its coordinator by then."""
        for note in self._plan.notes:
            self._console.note(note)
        check_loopback(_listen_host(self._plan))
        _check_port(self._plan.bind, self._plan.master_port)
        job, job_dir = folder.make_job_dir(self._plan.jobs_home, self._plan.spec.job)
        try:
            end, crash = await self._run_in(job, job_dir)
        except UsageError:
            shutil.rmtree(job_dir, ignore_errors=True)
            raise
        self._say_end(job, job_dir, end, crash)
        return end

    async def _run_in(self, job: JobId, job_dir: Path) -> tuple[EndJob, str]:
        with folder.hold_checkpoints(self._plan.checkpoint_dir or ""):
            return await self._run_with(self._complete_spec(job), job_dir)

    def _complete_spec(self, job: JobId) -> JobSpec:
        """The specification for all processes, with the owner of the checkpoints filled in. Raises `UsageError`."""
        spec = msgspec.structs.replace(self._plan.spec, job=job)
        if self._plan.checkpoint_dir is None:
            return spec
        new = ownership.new_lineage(job, time.time())
        lineage = ownership.choose_lineage(self._plan.checkpoint_dir, self._plan.resume, new, note=self._console.say)
        self._lineage = lineage
        return msgspec.structs.replace(spec, lineage=lineage)

    async def _run_with(self, spec: JobSpec, job_dir: Path) -> tuple[EndJob, str]:
        plan = _with_port(self._plan)
        token = plan.token or secrets.token_urlsafe(32)
        resumes = plan.resume is not ownership.Resume.NEVER
        machine = RestartableMachine(lambda memory: Membership(spec, plan.faults, resumes, memory=memory))
        self._refused = lambda: machine.machine.refused
        self._done = lambda: (machine.machine.step, tally((v := machine.snapshot()).incidents, v.changes))
        voter = Voter(f"{plan.node}@{secrets.token_hex(8)}", plan.node, address_of(*plan.endpoint))
        voters = Voters(voter, 1, VOTE_LEASE)
        host = CoordinatorHost(plan, machine, voters, token, self._console, _witness_of(plan, spec))
        figures = FiguresApi()
        async with AsyncExitStack() as stack:
            coordinator = Coordinator(
                host.leased if spec.can_elect else machine,
                token=token,
                record=host.records(stack, job_dir),
                nodes=job_nodes(spec),
                host=_listen_host(plan),
                port=plan.port,
                near=[node_name(rank) for rank in plan.node_ranks],
                lease=spec.node_lease,
                routes=[*host.succession_api.routes(), *figures.routes()],
            )
            coordinator.offer = plan.offer(spec)
            lines = ProgressLines(self._console.note, repeats=self._console.to_terminal)
            lines.replaceable = (lambda: machine.snapshot().replaceable) if _proves(spec) else str
            coordinator.watchers.extend([self._console.record, figures.feed, lines.feed, *self._watchers])
            if page := await host.listen(stack, coordinator):
                self._console.say(f"live view {page}, metrics {page}metrics")
            address = f"{_near_host(plan)}:{coordinator.port}"
            configs = [
                msgspec.structs.replace(
                    plan.agent_config(
                        spec,
                        node_rank=rank,
                        coordinator=tls.url(address),
                        token=token,
                        job_dir=job_dir,
                        advertise=plan.advertise or LOOPBACK,
                    ),
                    near=True,
                )
                for rank in plan.node_ranks
            ]
            command = [plan.script.target, *plan.script.args]
            log_dir = configs[0].log_dir
            entry = folder.describe(spec, address, token, command=command, log_dir=log_dir)
            folder.write_entry(job_dir, entry)
            self._entry = job_dir, entry
            folder.make_log_dir(Path(log_dir))
            started, size = MonotonicClock().now(), (spec.world, spec.nodes, spec.standbys)
            coordinator.publish(JobStarted(started, spec.job, *size, command, local=plan.local))
            self._say_start(spec, job_dir)
            asked = stack.enter_context(Interruptions(lambda why, _: self._stop(coordinator, why), self._force.set))
            asked.last = not isinstance(end := await self._host(host, configs), Deposed)
            self.close_entry(end)
        return end, host.crash

    async def _host(self, host: CoordinatorHost, configs: Sequence[AgentConfig]) -> EndJob:
        """Wait for the job's end, then for the end of its processes."""
        coordinator, machine, api = host.coordinator, host.machine, host.succession_api

        async def ask(node: NodeId) -> Outlook:
            known = machine.machine.roster.nodes.get(node)
            return Outlook(machine.machine.step, known is not None and known.leave_by is not None)

        caches = CacheHome(self._plan.cache, len(configs), self._console)
        caches.open()
        node_agents = NodeAgents(self._agent_command, self._console, caches)
        agents = {config.node: AgentSupervisor(node_agents, config, ask) for config in configs}
        coordinator.on_node_lost.append(lambda node: agents[node].kill() if node in agents else None)
        loop = asyncio.get_running_loop()
        gathering = loop.call_later(GATHER_DEADLINE, self._check_gathered, coordinator, machine)
        watches = Tasks(partial(self._watch_failed, coordinator))
        for agent in agents.values():
            watches.start(self._watch_agent(coordinator, agent), f"keeping the agent of {agent.node}")
        try:
            end = await coordinator.wait_ended()
            if isinstance(end, Deposed):
                api.give_way()
                # End only this node's own agents: the others now follow the other coordinator.
                await asyncio.gather(*(agent.end(within=_GIVE_WAY_S) for agent in agents.values()))
                return end
            api.end()
            for agent in agents.values():
                agent.retire()
            async with TaskScope() as scope:
                stop = scope.start(self._wind_down(host, list(agents.values()), end))
                await asyncio.wait({stop, scope.start(self._force.wait())}, return_when=asyncio.FIRST_COMPLETED)
            return end
        finally:
            gathering.cancel()
            await asyncio.gather(*(agent.end(within=0.0) for agent in agents.values()))
            await watches.ended(VERDICT_DEADLINE)

    @staticmethod
    async def _wind_down(host: CoordinatorHost, agents: Sequence[AgentSupervisor], end: EndJob) -> None:
        late = await host.stop_nodes(end)
        await asyncio.gather(*(agent.end(within=0.0 if agent.node in late else 2.0) for agent in agents))

    def _stop(self, coordinator: Coordinator, why: str) -> None:
        self._console.note(f"{why}; stopping (Ctrl-C again: at once)")
        patience = self._plan.drain_grace
        coordinator.submit(facts.StopRequested(why, patience))
        asyncio.get_running_loop().call_later(patience + VERDICT_DEADLINE, coordinator.end, EndJob(RUN_AGAIN, why))

    def _check_gathered(self, coordinator: Coordinator, machine: RestartableMachine) -> None:
        if isinstance(machine.machine.state, Gathering):
            missing = [node for node in job_nodes(machine.spec) if node not in coordinator.connected]
            text = f"{', '.join(missing)} did not register within {GATHER_DEADLINE:g} s"
            coordinator.end(EndJob(RUN_AGAIN, text))

    async def _watch_agent(self, coordinator: Coordinator, agent: AgentSupervisor) -> None:
        """Keep a node's agent running; end the job if its agents end for good before the job does."""
        left = await agent.keep()
        if left.given_back:
            self._console.note(f"{agent.node} has left the job, which goes on without it")
        else:
            coordinator.end(EndJob(RUN_AGAIN, f"the agent of {agent.node} {left.how}; its output is above"))

    @staticmethod
    def _watch_failed(coordinator: Coordinator, doing: str, error: BaseException) -> None:
        """End the job with this error at once: nothing else would restart that node's agent."""
        coordinator.crash = coordinator.crash or "".join(traceback.format_exception(error))
        text = f"regrow's launcher failed in {doing}: {type(error).__name__}: {error}"
        coordinator.end(EndJob(INTERNAL_ERROR, text))

    def close_entry(self, end: EndJob) -> None:
        """Write the job's end, or its new address, to `job.json`, unless another coordinator has replaced the file."""
        if self._entry is None:
            return
        job_dir, entry = self._entry
        now = msgspec.structs.replace(entry, token="", ended=time.time(), code=end.code)
        if isinstance(end, Deposed) and end.by is not None:
            now = msgspec.structs.replace(entry, address=urlsplit(end.by.address).netloc)
        try:
            if folder.read_entry(job_dir) == entry:
                folder.write_entry(job_dir, now)
                self._entry = job_dir, now
        except OSError as error:
            self._console.say(f"{job_dir / folder.JOB_FILE} cannot be written: {error.strerror or error}")

    def _say_start(self, spec: JobSpec, job_dir: Path) -> None:
        nodes = f" on {spec.nodes} nodes" if spec.nodes > 1 else ""
        each = " a node" if spec.nodes > 1 else ""
        standbys = f", {spec.standbys} standby{each}" if spec.standbys else ""
        self._console.note(
            f"job {spec.job}: {count(spec.world, 'rank')}{nodes}{standbys}; records and logs in {job_dir}"
        )

    def _say_end(self, job: JobId, job_dir: Path, end: EndJob, crash: str) -> None:
        if self._lineage is not None and self._plan.checkpoint_dir and not isinstance(end, Deposed):
            say = self._console.note if end.code == OK else self._console.say
            say(ownership.newest(self._plan.checkpoint_dir, self._lineage, self._refused()))
        if end.code == OK and not isinstance(end, Deposed):
            self._console.note(self._closing(job))
            if unkept := not_kept(self._console.unkept):
                self._console.say(unkept)
        if end.code != OK:
            over = end.code == RUN_AGAIN and not isinstance(end, Deposed)
            anew = "" if self._plan.checkpoint_dir else ", from step 0: without --checkpoint-dir nothing was saved"
            again = f" (exit code {RUN_AGAIN}: it can be run again{anew})" if over else ""
            self._console.say(f"job {job}: {end.diagnosis}{again}")
        if crash:
            path = job_dir / folder.CRASH_FILE
            try:
                path.write_text(crash, encoding="utf-8")
                self._console.say(f"please report this, with {path}")
            except OSError:
                self._console.say(f"please report this:\n{crash}")

    def _closing(self, job: JobId) -> str:
        """Last line to print for a job that has ended with 0."""
        took = "" if self._entry is None else f" in {seconds(max(0.0, time.time() - self._entry[1].started))}"
        steps, incidents = self._done()
        done = f": {count(steps, 'step')}, {incidents}" if steps else ""
        return f"job {job} has ended well{took}{done} (exit code {OK})"


def _proves(spec: JobSpec) -> bool:
    """True if a newcomer may ever be compared with a rank, which takes several ranks, a standby or a spare."""
    return spec.proof and (spec.world > 1 or spec.standbys > 0 or spec.spares > 0)


def _witness_of(plan: JobPlan, spec: JobSpec) -> WitnessFolder | None:
    if not plan.witness or not spec.can_elect:
        return None
    try:
        return WitnessFolder(make_witness(Path(plan.witness), spec.job))
    except OSError as error:
        raise UsageError(
            f"--witness {plan.witness} cannot be used: {error.strerror or error}",
            hint="give a folder on a disk that all nodes share and may write to",
        ) from error


def _check_port(host: str, port: int) -> None:
    """Raise `UsageError` if the workers could not listen on the port of `--master-port`."""
    if port == 0:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"--master-port {port} cannot be used: {error.strerror or error}",
                hint="leave it out, and a free one is found",
            ) from error


def _with_port(plan: JobPlan) -> JobPlan:
    """Choose the workers' `MASTER_PORT` here if there are several agents, which must use the same one."""
    if len(plan.node_ranks) == 1 or plan.master_port:
        return plan
    with socket.create_server((plan.bind, 0)) as probe:
        return msgspec.structs.replace(plan, master_port=probe.getsockname()[1])


def _listen_host(plan: JobPlan) -> str:
    """Host to listen on: the endpoint's loopback address if it has one, else the host of `--bind`."""
    return plan.endpoint[0] if plan.bind == LOOPBACK else plan.bind


def _near_host(plan: JobPlan) -> str:
    """Host under which this machine's own processes reach the coordinator."""
    host = _listen_host(plan)
    return LOOPBACK if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
