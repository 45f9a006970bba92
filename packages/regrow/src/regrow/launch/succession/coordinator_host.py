"""Host of the coordinator, node 0's or an elected one, and of everything that is opened along with it."""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from regrow.core.background import Background
from regrow.core.ids import NodeId
from regrow.core.records import Record
from regrow.launch import folder
from regrow.launch.console import Console
from regrow.launch.job import JobPlan
from regrow.membership.orders import EndJob
from regrow.membership.restartable import RestartableMachine
from regrow.membership.server.collecting import QuietCollections
from regrow.membership.server.coordinator import Coordinator
from regrow.membership.server.http_api import HttpApi
from regrow.membership.server.launchers import SuccessionApi
from regrow.membership.server.leased import LeasedMachine
from regrow.membership.server.witness_folder import WitnessFolder
from regrow.membership.succession.voters import Voters
from regrow.membership.succession.written import MemoryWriter
from regrow.observe.record import EventWriter
from regrow.observe.watch.acting import PageActions
from regrow.observe.watch.site import WatchSite


class CoordinatorHost:
    """A coordinator with its records, its live page, and its API for other launchers."""

    coordinator: Coordinator

    def __init__(
        self,
        plan: JobPlan,
        machine: RestartableMachine,
        voters: Voters,
        token: str,
        console: Console,
        witness: WitnessFolder | None,
    ) -> None:
        self._plan, self._token, self._console = plan, token, console
        self.machine = machine
        memory = MemoryWriter(lambda: (machine.remember(), machine.nodes))
        self.succession_api = SuccessionApi(voters, memory.write, token, say=console.say, witness=witness)
        self.leased = LeasedMachine(machine, voters, self.succession_api.changed)

    def records(self, stack: AsyncExitStack, job_dir: Path) -> Callable[[Record], None]:
        """Open the job's records; returns a function that writes one, in a thread of its own. Raises `OSError`."""
        events = stack.enter_context(EventWriter(job_dir / folder.EVENTS_FILE, complain=self._console.say))
        disk = stack.enter_context(Background("regrow-records"))
        return lambda record: disk.do(partial(events.write, record, time.time()))

    async def listen(self, stack: AsyncExitStack, coordinator: Coordinator) -> str:
        """Open the live page, if requested, then the coordinator and its API; returns the page's address, or empty.

        Raises `UsageError` if an address is taken or is not this machine's.
        """
        self.coordinator, plan, machine, address = coordinator, self._plan, self.machine, ""
        if plan.watch is not None:
            acts = HttpApi(coordinator, machine.spec, lambda: machine.world, machine.snapshot).actions()
            actions = PageActions(self._token, acts)
            site = await stack.enter_async_context(WatchSite(*plan.watch, say=self._console.say, actions=actions))
            coordinator.watchers.append(site.feed)
            address = site.address if site.port else ""
        stack.enter_context(QuietCollections(lambda: machine.machine.quiet))
        await stack.enter_async_context(coordinator)
        await stack.enter_async_context(self.succession_api)
        return address

    @property
    def crash(self) -> str:
        """Stack traces of regrow's own defects, for the records."""
        return self.machine.crash + self.coordinator.crash + self.succession_api.crash

    async def stop_nodes(self, end: EndJob) -> Sequence[NodeId]:
        """End the agents after the job's end; returns the nodes whose workers did not end in time."""
        reason = end.diagnosis.splitlines()[0] if end.diagnosis else "the job is done"
        late = await self.coordinator.stop_nodes(reason, grace=self._plan.grace)
        for node in late:
            self._console.say(f"{node} did not end its workers in time")
        self.succession_api.remove_witness()
        return late
