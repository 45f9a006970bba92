"""A node's view of its own workers, from its orders and their reports. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from regrow.agent.held_tables import Feasible
from regrow.core.ids import Generation, Instant, JobId, NodeId, Seconds, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.tables import GenerationTable
from regrow.core.messages.unions import AgentFact
from regrow.core.messages.vocabulary import Role
from regrow.core.metrics_text import Series, refusals_of, series_of

STATES = ("starting", "standby", "training", "mending", "done")
"""States of workers. Before its first generation a worker is "starting", or "standby" once a standby is ready."""


@dataclass
class _Seen:
    standby: bool
    state: str = "starting"
    pid: int = 0
    commit: facts.WorkerCommitted | None = None


class WorkerStates:
    """Follows all facts and orders of a node; its memory is proportional to the number of workers."""

    def __init__(self) -> None:
        self.generation = Generation(0)
        self.hydrated = 0
        """Bytes of state that workers of this node have received from peers."""
        self._workers: dict[WorkerId, _Seen] = {}

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [seen.pid for seen in self._workers.values() if seen.pid]

    def ordered(self, order: Feasible) -> None:
        """Enter an order that is being carried out."""
        match order:
            case GenerationTable(head=head):
                self.generation = head.generation
            case orders.NoteGeneration(generation=generation):
                self.generation = generation
            case orders.SpawnWorker() if order.role is not Role.PROVER:
                self._workers.setdefault(order.worker, _Seen(order.role is Role.STANDBY))
            case orders.FormGeneration() if (seen := self._workers.get(order.worker)) is not None:
                seen.state = "mending" if seen.state in ("training", "mending", "done") else "starting"
            case orders.HaltGeneration(at=None):
                self._become(order.worker, "mending")
            case _:
                pass

    def sent(self, fact: AgentFact) -> None:
        """Enter a fact that is being sent to the coordinator, or queued for it."""
        match fact:
            case facts.NodeProgress(commits=commits):
                for commit in commits:
                    self.sent(commit)
            case facts.WorkerStarted() if (seen := self._workers.get(fact.worker)) is not None:
                seen.pid = fact.pid
            case facts.WorkerReady() if (seen := self._workers.get(fact.worker)) is not None and seen.standby:
                seen.state = "standby"
            case facts.WorkerResumed():
                self.hydrated += fact.hydrated_bytes
                self._become(fact.worker, "training")
            case facts.WorkerCommitted() if (seen := self._workers.get(fact.worker)) is not None and not fact.adopted:
                seen.commit = fact
            case facts.WorkerHalted() | facts.WorkerFaulted():
                self._become(fact.worker, "mending")
            case facts.WorkerFinished():
                self._become(fact.worker, "done")
            case facts.WorkerExited():
                self._workers.pop(fact.worker, None)
            case _:
                pass

    def _become(self, worker: WorkerId, state: str) -> None:
        if (seen := self._workers.get(worker)) is not None:
            seen.state = state

    def counts(self) -> Mapping[str, int]:
        """Number of workers in each state."""
        return dict.fromkeys(STATES, 0) | Counter(seen.state for seen in self._workers.values())

    def step_seconds(self) -> list[Seconds]:
        """Duration of the newest step of each living worker, in ascending order."""
        return sorted(commit.seconds for commit in self._commits())

    def last_commit(self) -> Instant | None:
        """Time of the last commit of a living worker; None: none has committed."""
        return max((commit.at for commit in self._commits()), default=None)

    def _commits(self) -> Iterable[facts.WorkerCommitted]:
        return [seen.commit for seen in self._workers.values() if seen.commit is not None]


def node_series(
    worker_states: WorkerStates,
    *,
    job: JobId,
    node: NodeId,
    memory: Mapping[str, int],
    offset: Seconds,
    refused: Mapping[str, int] = MappingProxyType({}),
) -> list[Series]:
    """Metrics that the agent of a node serves; all have the label `node`.

    Args:
        worker_states: states of its workers.
        job, node: names of the agent's job and node.
        memory: bytes by use.
        offset: difference of the wall clock from the agent's clock.
        refused: number of refused connections by endpoint.
    """
    here = {"node": str(node)}
    steps, last = worker_states.step_seconds(), worker_states.last_commit()
    step_seconds = {"median": median(steps), "max": steps[-1]} if steps else {}
    return [
        series_of("regrow_job_info", "The job.", [({"job": str(job)} | here, 1)]),
        series_of("regrow_workers", "Workers by their state.", _labelled(here, "state", worker_states.counts())),
        series_of("regrow_generation", "Number of the agreed membership.", [(here, worker_states.generation)]),
        series_of("regrow_step_seconds", "Newest step of the ranks.", _labelled(here, "stat", step_seconds)),
        series_of(
            "regrow_newest_timestamp_seconds",
            "When a rank committed last, as Unix time.",
            [] if last is None else [(here | {"of": "commit"}, last + offset)],
        ),
        series_of("regrow_memory_bytes", "Memory by its use.", _labelled(here, "of", memory)),
        series_of(
            "regrow_hydrated_bytes_total",
            "State received from peers.",
            [(here, float(worker_states.hydrated))],
            "counter",
        ),
        refusals_of(refused, here),
    ]


def _labelled(
    here: Mapping[str, str], label: str, numbers: Mapping[str, float]
) -> list[tuple[Mapping[str, str], float]]:
    return [({**here, label: name}, number) for name, number in numbers.items()]
