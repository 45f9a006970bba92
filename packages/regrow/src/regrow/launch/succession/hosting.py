"""The coordinator of a job that runs already, in the launcher that was elected."""

import asyncio
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec

from regrow.core import records as record
from regrow.core import tls
from regrow.core.background import Background
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
from regrow.launch.succession.deputy import Elected
from regrow.membership.deadlines import ARRIVE_S
from regrow.membership.machine import Membership
from regrow.membership.orders import Deposed, EndJob
from regrow.membership.restartable import RestartableMachine
from regrow.membership.server.collecting import QuietCollections
from regrow.membership.server.coordinator import Coordinator
from regrow.membership.server.http_api import HttpApi
from regrow.membership.server.launchers import LauncherDesk
from regrow.membership.server.leased import LeasedMachine
from regrow.membership.server.witness_folder import WitnessFolder
from regrow.membership.succession.memory import CoordinatorLoss
from regrow.membership.succession.voters import VOTE_LEASE, Voters
from regrow.membership.succession.written import MemoryWriter, read
from regrow.observe.record import EventWriter
from regrow.observe.watch.acting import PageActions
from regrow.observe.watch.site import WatchSite

_HOLD_AGAIN_S: Seconds = 0.2


class NextHost:
    """Hosts the coordinator, where this launcher is elected; until then, and otherwise, it does nothing.

    Args:
        plan: this node's.
        spec: the job's.
        job_dir: for records.
        advertise: under which host the other nodes reach this one.
        speaker: says what happens.
    """

    def __init__(self, plan: JobPlan, spec: JobSpec, job_dir: Path, advertise: str, speaker: Console) -> None:
        self._plan, self._spec, self._job_dir, self._speaker = plan, spec, job_dir, speaker
        self._advertise = advertise
        self._stack = AsyncExitStack()
        self._coordinator: Coordinator | None = None
        self._desk: LauncherDesk | None = None
        self._machine: RestartableMachine | None = None
        self._leased: LeasedMachine | None = None
        self._entry: folder.JobEntry | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self, elected: Elected) -> str:
        """Begin; the coordinator's URL."""
        plan, spec, stack, now = self._plan, self._spec, self._stack, MonotonicClock().now()
        memory, nodes = read(elected.handover.memory, elected.ahead)
        memory.loss = CoordinatorLoss(elected.handover.writer, elected.lost_at)
        expected = [node for node in nodes if node != elected.handover.writer]
        machine = self._machine = RestartableMachine(
            lambda memory: Membership(spec, memory=memory), memory, expected, now + ARRIVE_S
        )
        voters = Voters.of_successor(elected.me, elected.term, VOTE_LEASE, elected.handover, now)
        writer = MemoryWriter(lambda: (machine.remember(), machine.nodes))
        witness = WitnessFolder.among(elected.handover.voters)
        desk = self._desk = LauncherDesk(voters, writer.write, plan.token, say=self._speaker.say, witness=witness)
        await self._hold_checkpoints()
        events = stack.enter_context(EventWriter(self._job_dir / folder.EVENTS_FILE, complain=self._speaker.say))
        disk = stack.enter_context(Background("regrow-records"))
        leased = self._leased = LeasedMachine(machine, voters, desk.changed)
        coordinator = self._coordinator = Coordinator(
            leased,
            token=plan.token,
            record=lambda item: disk.do(partial(events.write, item, time.time())),
            host=plan.bind,
            known={*nodes, *memory.named},
            lease=spec.node_lease,
            routes=desk.routes(),
        )
        coordinator.offer = msgspec.structs.replace(plan.offer(spec), term=elected.term)
        coordinator.watchers.append(self._speaker.record)
        if plan.watch is not None:
            acts = HttpApi(coordinator, spec, lambda: machine.world, machine.snapshot).actions()
            actions = PageActions(plan.token, acts)
            site = await stack.enter_async_context(WatchSite(*plan.watch, say=self._speaker.say, actions=actions))
            coordinator.watchers.append(site.feed)
        stack.enter_context(QuietCollections(lambda: machine.machine.quiet))
        await stack.enter_async_context(coordinator)
        await stack.enter_async_context(desk)
        address = address_of(self._advertise, coordinator.port)
        self._write_entry(address)
        text = f"the coordinator was lost; {plan.node} was elected in its place (term {elected.term})"
        coordinator.publish(record.Noted(at=now, text=text, worker=None))
        coordinator.submit(facts.TimeAdvanced())
        self._watching = supervised(self._give_way(coordinator), "giving way", self._cannot)
        return tls.url(address)

    async def _give_way(self, coordinator: Coordinator) -> None:
        """Stop hosting when another is elected: launcher and agent find out, since nothing listens here any more."""
        if isinstance(end := await coordinator.wait_ended(), Deposed):
            self._speaker.say(f"{self._plan.node}: {end.diagnosis}")
            if self._desk is not None:
                self._desk.give_way()
            stack, self._stack = self._stack, AsyncExitStack()
            self._coordinator = self._entry = None
            await stack.aclose()

    def _cannot(self, doing: str, error: BaseException) -> None:
        text = f"{self._plan.node} failed in {doing}: {type(error).__name__}: {error}"
        self._speaker.say(text)
        if self._coordinator is not None:
            self._coordinator.end(EndJob(INTERNAL_ERROR, text))

    async def stop_nodes(self, end: EndJob) -> None:
        """The job has ended: so do its agents."""
        if self._coordinator is not None and self._desk is not None:
            self._desk.end()
            reason = end.diagnosis.splitlines()[0] if end.diagnosis else "the job is done"
            for node in await self._coordinator.stop_nodes(reason, grace=self._plan.grace):
                self._speaker.say(f"{node} did not end its workers in time")
            self._desk.remove_witness()

    async def close(self, end: EndJob) -> None:
        """Nobody needs the coordinator any more; or this node leaves, and the others elect another."""
        if self._coordinator is None or self._machine is None or self._leased is None:
            return
        if not self._coordinator.over:
            self._leased.retire()  # the end of this process is what the others notice
            # As it ends connections are closed, and who then asks whether the coordinator is there must find nobody.
            await self._coordinator.let_nobody_in()
            return
        if self._entry is not None:
            done = msgspec.structs.replace(self._entry, token="", ended=time.time(), code=end.code)
            self._keep(done)
        if self._plan.checkpoint_dir:
            say = self._speaker.note if end.code == OK else self._speaker.say
            say(ownership.newest(self._plan.checkpoint_dir, self._spec.lineage, self._machine.machine.refused))
        await self._stack.aclose()
        if (
            crash := self._machine.crash
            + self._coordinator.crash
            + (self._desk.crash if self._desk is not None else "")
        ):
            self._speaker.say(f"please report this:\n{crash}")

    async def _hold_checkpoints(self) -> None:
        """As soon as the former coordinator lets go of them; where it does not, it is cut off and writes nothing."""
        until = time.monotonic() + VOTE_LEASE
        while True:
            try:
                self._stack.enter_context(folder.hold_checkpoints(self._plan.checkpoint_dir or ""))
                return
            except UsageError as error:
                if time.monotonic() > until:
                    self._speaker.say(f"{error.cause}; the job goes on")
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
            self._speaker.say(f"{self._job_dir / folder.JOB_FILE} cannot be written: {error.strerror or error}")
