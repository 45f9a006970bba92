"""Replicas that differ: whose state was wrong, on which node, and what the world goes back to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regrow.core import records as record
from regrow.core.ids import Generation, Instant, Rank, StepNo
from regrow.core.messages.replicas import CorruptionNamed, ReplicaFact, ReplicasDiffer
from regrow.membership import diagnosis as say
from regrow.membership import recovery_point
from regrow.membership.incident import CORRUPTION
from regrow.membership.roster import WorkerRecord

if TYPE_CHECKING:
    from regrow.membership.recovery.ladder import Ladder

SCRIPT_ERROR, RUN_AGAIN = 1, 75
MOST_TIMES = 3
"""How often the comparison before one step may fail: what has gone wrong so often will again."""


@dataclass(frozen=True)
class Doubt:
    """The states at `step` are not to be trusted. `wrong`: the ranks that are known to be wrong, others may be too."""

    step: StepNo
    wrong: frozenset[Rank]


@dataclass
class Doubts:
    """Whether the survivors' newest state counts."""

    open: Doubt | None = None

    def start(self, standings: Sequence[recovery_point.SurvivorState]) -> recovery_point.Start | None:
        """Where to start while there is a doubt; None where no trusted state is left."""
        if self.open is None:
            return None
        agreed = recovery_point.go_back(standings, self.open.step)
        if agreed is not None or any(each.verified >= 0 for each in standings):
            return agreed
        # Before there is any agreement only a majority can be followed.
        right = frozenset(e.rank for e in standings if e.state_at == self.open.step and e.rank not in self.open.wrong)
        if self.open.wrong and {e.holding for e in standings if e.rank in right} == {e.holding for e in standings}:
            return recovery_point.Start(self.open.step, right)
        return None


class Corruption:
    """Takes in what workers say about one another's state.

    Args:
        ladder: the job's state.
    """

    def __init__(self, ladder: "Ladder") -> None:
        self._ladder = ladder
        self._heard: Generation | None = None
        self._step: StepNo | None = None
        self._times = 0
        self._undecided: StepNo | None = None

    def tell(self, fact: ReplicaFact, now: Instant) -> None:
        """All ranks say the same; the first is enough."""
        match fact:
            case ReplicasDiffer() if fact.generation != self._heard:
                self._heard = fact.generation
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
            self._ladder.end(SCRIPT_ERROR, say.replicas_differ_again(cause), now)
            return
        if self._times >= MOST_TIMES:
            self._ladder.end(RUN_AGAIN, say.replicas_differ_ever(self._times, cause), now)
            return
        self._undecided = fact.step if undecided else None
        self._ladder.doubts.open = Doubt(fact.step, frozenset(fact.ranks))
        struck = self._ladder.plan.when(wrong[0].worker, now) if wrong else now
        self._ladder.step = max(self._ladder.step, fact.step)
        self._ladder.mend(CORRUPTION, wrong, cause, now, struck)

    def _workers(self, ranks: Sequence[Rank]) -> list[WorkerRecord]:
        roster = self._ladder.roster
        return [roster.workers[roster.places[rank]] for rank in ranks if rank in roster.places]

    def _blame(self, worker: WorkerRecord, step: StepNo, tensors: list[str], now: Instant) -> None:
        node = self._ladder.roster.nodes[worker.node]
        node.corruptions += 1
        rank = worker.rank if worker.rank is not None else Rank(-1)
        self._ladder.orders.write(
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
