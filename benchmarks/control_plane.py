"""Latency of the coordinator: the real one, with up to 5,000 simulated agents over real sockets.

A worker dies. Measured from the report of its death until the last survivor is ordered to abort its groups (abort), and
until the last one has received its place in the next generation (assign). Coordinator and agents share this machine's
cores, so the figures include the agents' work. A process has many agents (`simulated_agents.py`), a socket each.

python benchmarks/control_plane.py [--quick] [--json FILE] [--ranks-per-agent N] [--agents N,...]
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

from regrow.core.background import Background
from regrow.core.ids import JobId, NodeId
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import Warmth
from regrow.membership.machine import Membership
from regrow.membership.orders import EndJob
from regrow.membership.server.collecting import QuietCollections
from regrow.membership.server.coordinator import Coordinator
from regrow.membership.states import Training
from regrow.observe.record import EventWriter

SIZES = (10, 100, 1_000, 5_000)
PROCESSES = 2
TOKEN = "a token of the usual length, 43 characters."
_PATIENCE_S = 300.0
_AGENTS = Path(__file__).with_name("simulated_agents.py")


class AgentsProcess:
    """A process that simulates many agents."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def end(self) -> None:
        """Close the process."""
        self.process.kill()
        await self.process.wait()

    async def hear(self) -> Any:
        """Next message of the process."""
        if self.process.stdout is None or not (line := await self.process.stdout.readline()):
            raise SystemExit("a process of agents has ended")
        return json.loads(line)

    async def ask(self, what: str) -> Any:
        """Send a command; returns the reply."""
        if self.process.stdin is not None:
            self.process.stdin.write(what.encode() + b"\n")
        return await self.hear()


async def started(stack: AsyncExitStack, port: int, agents: int, nproc: int) -> list[AgentsProcess]:
    """All agents, connected to the coordinator."""
    count = min(PROCESSES, agents)
    edges = [agents * number // count for number in range(count + 1)]
    made: list[AgentsProcess] = []
    for first, end in pairwise(edges):
        words = {"--port": port, "--first": first, "--count": end - first, "--nproc": nproc, "--token": TOKEN}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(_AGENTS),
            *(str(word) for pair in words.items() for word in pair),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=1 << 20,
        )
        made.append(AgentsProcess(process))
        stack.push_async_callback(made[-1].end)
    await asyncio.gather(*(each.hear() for each in made))
    return made


async def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for a condition on the coordinator."""
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"within {_PATIENCE_S:g} s it did not come to pass that {what}")
        await asyncio.sleep(0.02)


async def measure(agents: int, nproc: int, kills: int, folder: Path) -> dict[str, float]:
    """Run one job of `agents` agents, with `kills` deaths."""
    spec = JobSpec(JobId("bench"), nproc, agents, 1, Warmth.BUILT, 1000, 3600.0, None, False)
    machine, world, begun = Membership(spec), agents * nproc, time.monotonic()
    async with AsyncExitStack() as stack:
        disk = stack.enter_context(Background("records"))
        events = stack.enter_context(EventWriter(folder / "events.jsonl", complain=print))
        coordinator = Coordinator(
            machine,
            token=TOKEN,
            record=lambda record: disk.do(partial(events.write, record, time.time())),
            nodes=[NodeId(f"node{number}") for number in range(agents)],
        )
        stack.enter_context(QuietCollections(lambda: machine.quiet))
        await stack.enter_async_context(coordinator)
        clients = await started(stack, coordinator.port, agents, nproc)
        figures: dict[str, list[float]] = {"abort_s": [], "assign_s": [], "cpu_s": []}

        async def settled(generation: int) -> None:
            await until(
                lambda: (isinstance(machine.state, Training) and machine.generation == generation) or coordinator.over,
                f"generation {generation} trains",
            )
            if coordinator.over:
                there = f"{len(coordinator.connected)} of {agents} agents are connected"
                raise SystemExit(f"the job has ended, {there}: {(await coordinator.wait_ended()).diagnosis}")
            await asyncio.gather(*(client.ask("commit") for client in clients))
            await until(lambda: machine.incident is None, "the incident is closed")
            await asyncio.sleep(0.2)

        await settled(1)
        start_s = time.monotonic() - begun
        for number in range(kills):
            for client in clients:
                await client.ask("report")
            spent = cpu()
            died = await clients[number % len(clients)].ask("kill")
            await settled(2 + number)
            reports = [await client.ask("report") for client in clients]
            figures["cpu_s"].append(cpu() - spent)
            for name, order, count in (("abort_s", "HaltGeneration", world - 1), ("assign_s", "JoinGeneration", world)):
                got = sum(report["counts"].get(order, 0) for report in reports)
                if got != count or any(report["counts"].get("lost") for report in reports):
                    raise SystemExit(f"{got} of {count} workers were told: {[report['counts'] for report in reports]}")
                last = max(report["last"][order] for report in reports if order in report["last"])
                figures[name].append(last - died)
        coordinator.end(EndJob(0, "all is measured"))  # else it would handle the loss of each agent
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {name: median(values) for name, values in figures.items()}
    worst = {f"most_{name}": max(values) for name, values in figures.items() if name != "cpu_s"}
    return found | worst | {"start_s": start_s, "peak_mib": peak}


def cpu() -> float:
    """CPU seconds of this process, the coordinator's."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(agents: int, nproc: int, kills: int) -> dict[str, float]:
    """As `measure`, in a process of its own, so that its memory is that of this size."""
    words = ["--measure", str(agents), "--ranks-per-agent", str(nproc), "--kills", str(kills)]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{agents} agents could not be measured:\n{done.stdout}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


COLUMNS = {
    "abort_s": "abort",
    "most_abort_s": "at most",
    "assign_s": "assign",
    "most_assign_s": "at most",
    "cpu_s": "CPU an incident",
    "start_s": "start",
    "peak_mib": "MiB",
}


def show(found: dict[int, dict[str, float]], nproc: int, kills: int) -> None:
    """Print a table, and the growth of the figures."""
    table = Table(title=f"{nproc} ranks an agent, {kills} deaths each: medians, seconds")
    for name in ("agents", "ranks", *COLUMNS.values()):
        table.add_column(name, justify="right")
    for agents, figures in found.items():
        told = (f"{figures[name]:,.0f}" if name == "peak_mib" else f"{figures[name]:.3f}" for name in COLUMNS)
        table.add_row(f"{agents:,}", f"{agents * nproc:,}", *told)
    Console(width=120).print(table)
    few, many = sorted(found)[-2:] if len(found) > 1 else (0, 0)
    if few:
        for name in ("abort_s", "assign_s", "cpu_s", "peak_mib"):
            print(f"{name} grows {found[many][name] / found[few][name]:.1f} times from {few:,} to {many:,} agents")


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three deaths at each size instead of ten")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--ranks-per-agent", type=int, default=1, metavar="N")
    parser.add_argument("--agents", default=",".join(map(str, SIZES)), metavar="N,...")
    parser.add_argument("--kills", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=int, default=0, help=argparse.SUPPRESS)
    words = parser.parse_args()
    nproc, kills = words.ranks_per_agent, words.kills or (3 if words.quick else 10)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if words.measure:
        with tempfile.TemporaryDirectory(prefix="regrow-control-") as folder:
            print(json.dumps(asyncio.run(measure(words.measure, nproc, kills, Path(folder)))))
        return
    warn_if_busy()
    found = {agents: measured(agents, nproc, kills) for agents in map(int, words.agents.split(","))}
    show(found, nproc, kills)
    figures = {f"{name}_{agents}": value for agents, each in found.items() for name, value in each.items()}
    tell("control_plane", figures, words.json, ranks_per_agent=nproc, cores=os.cpu_count())


if __name__ == "__main__":
    main()
