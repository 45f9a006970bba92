"""Hosts the coordinator of a running job in the launcher that was elected."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from regrow.core import records as record
from regrow.core import tls
from regrow.core.clock import MonotonicClock
from regrow.core.errors import UsageError
from regrow.core.exit_codes import INTERNAL_ERROR, OK
from regrow.core.hosts import address_of
from regrow.core.ids import Seconds
from regrow.core.job import JobSpec
from regrow.core.messages import facts
from regrow.core.process.tasks import supervised
from regrow.hydration.durable import ownership
from regrow.launch import folder
from regrow.launch.console import Console
from regrow.launch.job import JobPlan
from regrow.launch.succession.coordinator_host import CoordinatorHost
from regrow.launch.succession.following import Elected
from regrow.membership.deadlines import ARRIVE_S
from regrow.membership.machine import Membership
from regrow.membership.orders import Deposed, EndJob
from regrow.membership.restartable import RestartableMachine
from regrow.membership.server.coordinator import Coordinator
from regrow.membership.server.witness_folder import WitnessFolder
from regrow.membership.succession.memory import CoordinatorLoss
from regrow.membership.succession.voters import VOTE_LEASE, Voters
from regrow.membership.succession.written import read

_HOLD_AGAIN_S: Seconds = 0.2


class NextHost:
    """Hosts the coordinator after this launcher was elected; does nothing before that.

    Args:
        plan: this node's plan.
        spec: the job's specification.
        job_dir: folder for the records.
        advertise: host under which the other nodes reach this one.
        console: prints events.
    """

    def __init__(self, plan: JobPlan, spec: JobSpec, job_dir: Path, advertise: str, console: Console) -> None:
        self._plan, self._spec, self._job_dir, self._console = plan, spec, job_dir, console
        self._advertise = advertise
        self._stack = AsyncExitStack()
        self._host: CoordinatorHost | None = None
        self._entry: folder.JobEntry | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self, elected: Elected) -> str:
        """Start the coordinator after this election; returns its URL."""
        plan, spec, stack, now = self._plan, self._spec, self._stack, MonotonicClock().now()
        memory, nodes = read(elected.handover.memory, elected.ahead)
        memory.loss = CoordinatorLoss(elected.handover.writer, elected.lost_at)
        expected = [node for node in nodes if node != elected.handover.writer]
        machine = RestartableMachine(lambda memory: Membership(spec, memory=memory), memory, expected, now + ARRIVE_S)
        voters = Voters.of_successor(elected.me, elected.term, VOTE_LEASE, elected.handover, now)
        witness = WitnessFolder.among(elected.handover.voters)
        host = CoordinatorHost(plan, machine, voters, plan.token, self._console, witness)
        await self._hold_checkpoints()
        coordinator = Coordinator(
            host.leased,
            token=plan.token,
            record=host.records(stack, self._job_dir),
            host=plan.bind,
            known={*nodes, *memory.named},
            lease=spec.node_lease,
            routes=host.succession_api.routes(),
        )
        coordinator.offer = msgspec.structs.replace(plan.offer(spec), term=elected.term)
        coordinator.watchers.append(self._console.record)
        self._host = host
        await host.listen(stack, coordinator)
        address = address_of(self._advertise, coordinator.port)
        self._write_entry(address)
        text = f"the coordinator was lost; {plan.node} was elected in its place (term {elected.term})"
        coordinator.publish(record.Noted(at=now, text=text, worker=None))
        coordinator.submit(facts.TimeAdvanced())
        self._watching = supervised(self._give_way(host), "giving way", self._cannot)
        return tls.url(address)

    async def _give_way(self, host: CoordinatorHost) -> None:
        """Stop hosting once another coordinator is elected; others notice that nothing listens here any more."""
        if isinstance(end := await host.coordinator.wait_ended(), Deposed):
            self._console.say(f"{self._plan.node}: {end.diagnosis}")
            host.succession_api.give_way()
            stack, self._stack = self._stack, AsyncExitStack()
            self._host = self._entry = None
            await stack.aclose()

    def _cannot(self, doing: str, error: BaseException) -> None:
        text = f"{self._plan.node} failed in {doing}: {type(error).__name__}: {error}"
        self._console.say(text)
        if self._host is not None:
            self._host.coordinator.end(EndJob(INTERNAL_ERROR, text))

    async def stop_nodes(self, end: EndJob) -> None:
        """End the agents after the job's end."""
        if self._host is not None:
            self._host.succession_api.end()
            await self._host.stop_nodes(end)

    async def close(self, end: EndJob) -> None:
        """Close the coordinator after the job's end; or, if only this node leaves, let the others elect another one."""
        host = self._host
        if host is None:
            return
        if not host.coordinator.over:
            host.leased.retire()  # The others notice the end of this process.
            # The end of this process closes connections; a process that then checks for the coordinator gets no answer.
            await host.coordinator.let_nobody_in()
            return
        if self._entry is not None:
            done = msgspec.structs.replace(self._entry, token="", ended=time.time(), code=end.code)
            self._keep(done)
        if self._plan.checkpoint_dir:
            say = self._console.note if end.code == OK else self._console.say
            say(ownership.newest(self._plan.checkpoint_dir, self._spec.lineage, host.machine.machine.refused))
        await self._stack.aclose()
        if crash := host.crash:
            self._console.say(f"please report this:\n{crash}")

    async def _hold_checkpoints(self) -> None:
        """Wait for the former coordinator to release its lock; one that does not is cut off and writes nothing."""
        until = time.monotonic() + VOTE_LEASE
        while True:
            try:
                self._stack.enter_context(folder.hold_checkpoints(self._plan.checkpoint_dir or ""))
                return
            except UsageError as error:
                if time.monotonic() > until:
                    self._console.say(f"{error.cause}; the job goes on")
                    return
            await asyncio.sleep(_HOLD_AGAIN_S)

    def _write_entry(self, address: str) -> None:
        plan = self._plan
        command = [plan.script.target, *plan.script.args]
        log_dir = plan.log_dir or str(self._job_dir / "logs")
        self._entry = folder.describe(self._spec, address, plan.token, command=command, log_dir=log_dir)
        self._keep(self._entry)

    def _keep(self, entry: folder.JobEntry) -> None:
        try:
            folder.write_entry(self._job_dir, entry)
        except OSError as error:
            self._console.say(f"{self._job_dir / folder.JOB_FILE} cannot be written: {error.strerror or error}")
