"""Records of trainings that never ran, each step read in the order that its loader has, for tests of the proof."""

from collections.abc import Callable

import msgspec
import xxhash

from regrow.core.ids import Generation, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages.data import BatchRecord, OrderSpec, SourceSpec
from regrow.core.records import (
    NODE_LOST,
    GenerationFormed,
    JobEnded,
    OrderStated,
    Record,
    StepCommitted,
    WorkerGone,
    WorkerSpawned,
)
from regrow.data.order import keys_of, samples_digest
from regrow.observe.reads import RunRecords
from regrow.step.dealing import MicroBatchCounts, deal

GLOBAL = OrderSpec(
    "ordered", seed=3, sources=[SourceSpec("corpus", 100)], global_batch=24, shuffle=True, remainder="wrap"
)
Share = Callable[[int, int], tuple[int, int]]


def read(order: OrderSpec, step: int, share: int, shares: int) -> BatchRecord:
    """Record of a rank that reads as it should."""
    keys = keys_of(order, step, share, shares)
    return BatchRecord(share, shares, xxhash.xxh3_64_hexdigest(repr(keys).encode()), samples_digest(keys))


def own_share(rank: int, world: int) -> tuple[int, int]:
    return rank, world


class FakeRun:
    """Writes the records of one job."""

    def __init__(
        self,
        name: str = "job",
        *,
        world: int = 4,
        order: OrderSpec = GLOBAL,
        start: int = 0,
        share: Share = own_share,
        nodes: int = 1,
        microbatches: int | dict[int, int] = 0,
    ) -> None:
        self.name, self.order, self.step = name, order, start
        self.records: list[Record] = []
        self.world = world
        self._share, self._nodes, self._microbatches = share, nodes, microbatches
        self._now, self._made, self._generation = 0.0, 0, 0
        self._workers = {rank: self._spawn(rank) for rank in range(world)}
        self.form(start)

    def run(self, steps: int) -> "FakeRun":
        """Run `steps` steps that all ranks commit."""
        for _ in range(steps):
            for rank in range(self.world):
                self.commit(rank)
            self.step += 1
        return self

    def commit(self, rank: int, *, adopted: bool = False) -> None:
        share, shares = self._share(rank, self.world)
        count = MicroBatchCounts(self._microbatches).of(self.world) if self._microbatches else 0
        parts = range(*deal(count, self.world, rank)) if count else ()
        self._now += 0.1
        self.records.append(
            StepCommitted(
                self._now,
                StepNo(self.step),
                Rank(rank),
                self._workers[rank],
                Generation(self._generation),
                0.1,
                {},
                adopted=adopted,
                data=None if parts else read(self.order, self.step, share, shares),
                parts=[read(self.order, self.step, part, count) for part in parts],
            )
        )

    def form(self, step: int) -> "FakeRun":
        """A new generation, with `state@step`."""
        self.step, self._generation = step, self._generation + 1
        members = {str(rank): worker for rank, worker in self._workers.items()}
        self.records.append(GenerationFormed(self._now, Generation(self._generation), StepNo(step), members))
        return self

    def kill_in_update(self, rank: int) -> "FakeRun":
        """The others commit the step; a rank dies and is adopted, another that had not come so far adopts it."""
        behind = (rank + 1) % self.world
        for other in range(self.world):
            if other not in (rank, behind) or (self.world <= 2 and other != rank):
                self.commit(other)
        self.commit(rank, adopted=True)
        self.replace(rank)
        self.form(self.step + 1)
        if self.world > 2:
            self.step -= 1
            self.commit(behind, adopted=True)
            self.step += 1
        return self

    def resize(self, world: int) -> "FakeRun":
        """A world of another size goes on with the next step."""
        for rank in range(self.world, world):
            self._workers[rank] = self._spawn(rank)
        self._workers = {rank: self._workers[rank] for rank in range(world)}
        self.world = world
        return self.form(self.step)

    def replace(self, rank: int, reason: str = "killed by SIGKILL") -> "FakeRun":
        """A rank's worker is gone, and there is another."""
        self.records.append(WorkerGone(self._now, self._workers[rank], Rank(rank), -9, reason))
        self._workers[rank] = self._spawn(rank)
        return self

    def lose_node(self, node: int) -> "FakeRun":
        """All its workers are gone with it, and it comes back."""
        for rank in range(self.world):
            if self.node_of(rank) == f"node{node}":
                self.replace(rank, NODE_LOST)
        return self

    def node_of(self, rank: int) -> NodeId:
        return NodeId(f"node{rank * self._nodes // self.world}")

    def end(self, code: int = 0) -> RunRecords:
        self.records.append(JobEnded(self._now, code, ""))
        return self.made()

    def made(self, *, live: bool = False) -> RunRecords:
        return RunRecords(self.name, list(self.records), live=live)

    def _spawn(self, rank: int) -> WorkerId:
        worker, self._made = WorkerId(f"{self.name}.w{self._made}"), self._made + 1
        generation = Generation(self._generation)
        self.records.append(WorkerSpawned(self._now, worker, self.node_of(rank), "rank", Rank(rank), generation))
        self.records.append(OrderStated(self._now, Rank(rank), worker, self.order))
        return worker


def changed(run: RunRecords, change: Callable[[StepCommitted], StepCommitted | None]) -> RunRecords:
    """A run some of whose commits say something else, or are not there (None)."""
    records = [change(record) if isinstance(record, StepCommitted) else record for record in run.records]
    return RunRecords(run.name, [record for record in records if record is not None], run.torn, run.live)


def with_data(commit: StepCommitted, **data: object) -> StepCommitted:
    assert commit.data is not None
    return msgspec.structs.replace(commit, data=msgspec.structs.replace(commit.data, **data))
