"""Speed of the coordinator's decisions: facts a second, and one incident in a job of 10,000 ranks, without I/O.

python benchmarks/membership.py [--json FILE] [--quick]
"""

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

from targets import tell

from regrow.core.ids import NO_STATE, Generation, Instant, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts
from regrow.core.messages.observations import WorkerAlive
from regrow.core.messages.unions import Fact
from regrow.core.messages.vocabulary import Warmth
from regrow.membership.machine import Membership


class Drive:
    """Feeds facts to the coordinator's state machine, asks for its deadline after each, as the server does; counts."""

    def __init__(self, nodes: int, nproc: int) -> None:
        spec = JobSpec(JobId("bench"), nproc, nodes, 1, Warmth.BUILT, 100, 3600.0, None, False)
        self.machine = Membership(spec)
        self.now: Instant = 0.0
        self.heard = 0

    def tell(self, news: Iterable[Fact]) -> None:
        """Feed facts, each a millisecond after the previous one."""
        for fact in news:
            self.now += 0.001
            self.heard += 1
            self.machine.handle(fact, self.now)
            self.machine.next_deadline()

    def ready(self, workers: Iterable[WorkerId], state: StepNo) -> None:
        """Report that workers are built."""
        for worker in workers:
            self.tell(
                [facts.WorkerStarted(worker, 1), facts.WorkerReady(worker, state, f"tcp:host:{worker}", "layout", 1.0)]
            )

    def resume(self, step: StepNo) -> None:
        """Resume every rank, and commit its next step."""
        places, generation = list(self.machine.roster.places.values()), self.machine.generation
        self.tell(facts.WorkerResumed(worker, generation) for worker in places)
        self.tell(facts.WorkerCommitted(worker, generation, step, self.now, 0.1) for worker in places)

    def join(self, nodes: Iterable[NodeId]) -> None:
        """Register agents."""
        nproc = self.machine.spec.nproc
        self.tell(facts.NodeJoined(node, f"host-{node}", nproc, f"tcp:host-{node}:40000") for node in nodes)

    def start(self) -> None:
        """Run from the start to the first committed step with built standbys."""
        self.join(NodeId(f"n{node}") for node in range(self.machine.spec.nodes))
        self.ready(list(self.machine.roster.places.values()), StepNo(0))
        self.resume(StepNo(0))
        self.ready([standby.worker for standby in self.machine.roster.standbys()], NO_STATE)

    def lose(self, ranks: Iterable[int], step: StepNo) -> None:
        """Kill ranks and recover: from the first exit to the next step on every rank."""
        lost = [self.machine.roster.places[Rank(rank)] for rank in ranks]
        survivors = [worker for worker in self.machine.roster.places.values() if worker not in set(lost)]
        generation: Generation = self.machine.generation
        self.tell(facts.WorkerExited(worker, -9, self.now) for worker in lost)
        self.tell(facts.WorkerHalted(worker, generation, step) for worker in survivors)
        self.tell(WorkerAlive(worker) for worker in list(self.machine.roster.unproven))
        joiners = [
            worker for worker in self.machine.roster.places.values() if self.machine.roster.workers[worker].pid == 0
        ]
        self.ready(joiners, NO_STATE)
        self.resume(step)


def measure(nodes: int, nproc: int) -> dict[str, float]:
    """Seconds for one incident of one rank, one of two whole nodes, and facts a second in between."""
    drive = Drive(nodes, nproc)
    begun = time.perf_counter()
    drive.start()
    started = time.perf_counter()
    drive.lose([nodes * nproc // 2], StepNo(1))
    mended = time.perf_counter()
    drive.lose(range(nproc, 3 * nproc), StepNo(2))
    mended_nodes = time.perf_counter()
    places, generation = list(drive.machine.roster.places.values()), drive.machine.generation
    before = drive.heard
    for step in range(3, 13):
        commits = [facts.WorkerCommitted(worker, generation, StepNo(step), drive.now, 0.1) for worker in places[:nproc]]
        drive.tell(facts.NodeProgress(NodeId("n0"), commits) for _ in range(500))
    steady = time.perf_counter()
    if drive.machine.incident is not None or drive.machine.generation != 3:
        raise SystemExit(f"the job was not mended: {drive.machine.state}, generation {drive.machine.generation}")
    return {
        "start_s": started - begun,
        "incident_s": mended - started,
        "incident_two_nodes_s": mended_nodes - mended,
        "facts_per_s": drive.heard / (steady - begun),
        "progress_per_s": (drive.heard - before) / (steady - mended_nodes),
    }


def main() -> None:
    """Print a table; with `--json` write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="1,000 ranks instead of 10,000")
    options = parser.parse_args()
    nodes = 125 if options.quick else 1250
    figures = measure(nodes, 8)
    print(f"{nodes * 8} ranks on {nodes} nodes, one standby each")
    for name, value in figures.items():
        print(f"{name:24} {value:12.3f}")
    tell("membership", figures, options.json)


if __name__ == "__main__":
    main()
