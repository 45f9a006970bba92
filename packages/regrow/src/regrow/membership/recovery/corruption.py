"""Replicas that differ: finds the ranks whose state was wrong, their nodes, and the state to go back to."""

from collections.abc import Sequence

from regrow.core import records as record
from regrow.core.exit_codes import RUN_AGAIN, SCRIPT_ERROR
from regrow.core.ids import Generation, Instant, Rank, StepNo
from regrow.core.messages.replicas import CorruptionNamed, ReplicaFact, ReplicasDiffer
from regrow.membership import diagnosis as say
from regrow.membership.incident import CORRUPTION
from regrow.membership.job import Job
from regrow.membership.recovery.doubts import Doubt, Doubts
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.recovery.quarantine import Quarantine
from regrow.membership.recovery.suspects import Suspects
from regrow.membership.roster import WorkerRecord

MOST_TIMES = 3
"""Failures of the comparison before one step after which the job ends, as it would only fail again."""


class Corruption:
    """Takes workers' reports of replicas that differ.

    Args:
        job: the job of the workers.
        ladder: replaces workers whose state is wrong.
        doubts: doubts about the newest state.
        quarantine: counts the failures of a node.
    """

    def __init__(self, job: Job, ladder: Ladder, doubts: Doubts, quarantine: Quarantine) -> None:
        self._job, self._ladder, self._doubts, self._quarantine = job, ladder, doubts, quarantine
        self.suspects = Suspects(job, ladder, quarantine)
        """Nodes that may be at fault, without proof."""
        self._received: Generation | None = None
        self._step: StepNo | None = None
        self._times = 0
        self._undecided: StepNo | None = None

    def apply(self, fact: ReplicaFact, now: Instant) -> None:
        """Take a worker's report. All ranks send the same report, so only the first one counts."""
        match fact:
            case ReplicasDiffer() if fact.generation != self._received:
                self._received = fact.generation
                self._differ(fact, now)
            case CorruptionNamed() if fact.step == self._undecided:
                self._undecided = None
                for worker in self._workers(fact.ranks):
                    self._blame(worker, fact.step, [], now)
            case _:
                pass

    def _differ(self, fact: ReplicasDiffer, now: Instant) -> None:
        self._times = self._times + 1 if fact.step == self._step else 1
        self._step = fact.step
        wrong, undecided = self._workers(fact.ranks), self._workers(fact.undecided)
        cause = say.replicas_differ(fact.step, wrong, undecided, fact.tensors)
        for worker in wrong:
            self._blame(worker, fact.step, fact.tensors, now)
        if undecided and fact.step == self._undecided:
            self._job.end(SCRIPT_ERROR, say.replicas_differ_again(cause), now)
            return
        if self._times >= MOST_TIMES:
            bad = f"{cause}: {self._times} times at this step; look for bad memory on that node, or leave it out"
            self._job.end(RUN_AGAIN, bad, now)
            return
        self._undecided = fact.step if undecided else None
        self._doubts.open = Doubt(fact.step, frozenset(fact.ranks))
        struck = self._job.plan.when(wrong[0].worker, now) if wrong else now
        self._job.step = max(self._job.step, fact.step)
        self._ladder.mend(CORRUPTION, wrong, cause, now, struck)

    def _workers(self, ranks: Sequence[Rank]) -> list[WorkerRecord]:
        roster = self._job.roster
        return [roster.workers[roster.places[rank]] for rank in ranks if rank in roster.places]

    def _blame(self, worker: WorkerRecord, step: StepNo, tensors: list[str], now: Instant) -> None:
        node = self._job.roster.nodes[worker.node]
        node.corruptions += 1
        rank = worker.rank if worker.rank is not None else Rank(-1)
        self._job.orders.write(
            record.ReplicaCorrupted(
                at=now,
                step=step,
                rank=rank,
                worker=worker.worker,
                node=worker.node,
                tensors=tensors,
                on_node=node.corruptions,
            )
        )
        self._quarantine.failed(node.node, say.rank_corrupted(rank, step), now)
