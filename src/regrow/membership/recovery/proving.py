"""Who shows in a rank's shadow that it could take its place, and when: before anybody needs it. Pure.

One rank of each holding is proven in the first steps, after each change of the world, and again at a rate that follows
from what the last round has cost.
"""

from collections.abc import Callable
from dataclasses import dataclass

from regrow.core.ids import Generation, Instant, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.replacements import (
    ProveReplacement,
    ReplacementFact,
    ReplacementProven,
    ReplacementUnproven,
)
from regrow.membership.job import Job
from regrow.membership.roster import Stage, WorkerRecord

FIRST_STEP = StepNo(3)
"""A counter or a cache shows only when steps have been committed."""
_SHARE = 0.005
"""What proofs may take of the time."""
_LEAST_S: Seconds = 60.0
"""Between two rounds, however cheap they are."""
_LATE_S: Seconds = 600.0
_AGAIN_S: Seconds = 2.0
_MOST_AGAIN_S: Seconds = 600.0
_LOOK_S: Seconds = 0.5

CanTake = Callable[[WorkerRecord, Rank, int], bool]


@dataclass(frozen=True)
class _Open:
    """A proof under way."""

    prover: WorkerId
    holding: str
    until: Instant


class Proofs:
    """Orders them one after the other.

    Args:
        job: whose newcomers are looked at.
        can_take: whether a standby can take a rank, in that slot.
    """

    def __init__(self, job: Job, can_take: CanTake) -> None:
        self._job, self._roster, self._can_take = job, job.roster, can_take
        self._open: _Open | None = None
        self._generation = Generation(0)
        self._first = FIRST_STEP
        self._done: set[str] = set()
        self._due: Instant = 0.0
        self._cost: Seconds = 0.0
        self._again = _AGAIN_S
        self._over = not job.spec.proof

    def advance(self, now: Instant) -> None:
        """Steps are being run and nothing is mended: order what is due."""
        if self._over or now < self._due or self._job.replacements.refuted:
            return
        if self._job.generation != self._generation:
            self._enter(now)
        if self._open is not None and not self._given_up(self._open, now):
            self._due = now + _LOOK_S
            return
        if self._job.step < self._first:
            return
        self._due = now + _LOOK_S
        holdings = {each.holding: None for each in self._roster.seated(Stage.MEMBER)}
        if holdings and self._done.issuperset(holdings):
            self._due = now + between_rounds(self._cost)
            self._done.clear()
            self._cost = 0.0
            return
        for holding in holdings:
            if holding not in self._done and self._order(holding, now):
                return

    def _enter(self, now: Instant) -> None:
        """Another generation: what was proven of the one before says nothing of this."""
        if self._generation > 0:
            self._first = StepNo(max(FIRST_STEP, self._job.step + 1))
        self._generation, self._open = self._job.generation, None
        self._done.clear()
        self._again = _AGAIN_S

    def _given_up(self, proof: _Open, now: Instant) -> bool:
        """Whether a proof that was ordered will not come any more; then nothing is open."""
        prover = self._roster.workers.get(proof.prover)
        if prover is not None and prover.spare and now < proof.until:
            return False
        self._open = None
        return True

    def _order(self, holding: str, now: Instant) -> bool:
        """Let the best standby prove the best rank with this holding; False: there is none that could."""
        ranks = [
            each for each in self._roster.seated(Stage.MEMBER) if each.holding == holding and each.rank is not None
        ]
        standbys = [each for each in self._roster.standbys() if each.stage is Stage.READY and each.holding == holding]
        pairs = [
            (standby, each)
            for standby in standbys
            for each in ranks
            if self._can_take(standby, _rank(each), each.local_rank)
        ]
        if not pairs:
            self._job.replacements.unproven = "no standby is there that could be compared"
            return False
        prover, witness = min(pairs, key=_preference)
        self._open = _Open(prover.worker, holding, now + _LATE_S)
        rank, local_rank, job = _rank(witness), witness.local_rank, self._job
        order = ProveReplacement(prover.worker, job.generation, rank, local_rank, witness.endpoint, job.world)
        job.orders.add(order)
        return True

    def told(self, fact: ReplacementFact, now: Instant) -> None:
        """What came of a proof."""
        proof = self._open
        if proof is None or fact.worker != proof.prover or fact.generation != self._generation:
            return
        self._open, replacements = None, self._job.replacements
        self._due = now
        if isinstance(fact, ReplacementProven):
            self._done.add(proof.holding)
            self._cost += fact.held + fact.seconds
            self._again, replacements.unproven = _AGAIN_S, ""
        elif isinstance(fact, ReplacementUnproven):
            replacements.unproven = fact.reason
            self._over = fact.lasting
            self._due, self._again = now + self._again, min(2 * self._again, _MOST_AGAIN_S)


def between_rounds(cost: Seconds) -> Seconds:
    """How long nothing is proven after a round that has cost so much."""
    return max(_LEAST_S, cost / _SHARE)


def unproven(fact: ReplacementUnproven) -> str:
    """A newcomer could not be compared with the rank that it would replace, for people."""
    return f"whether a newcomer computes what rank {fact.rank} does was not proven: {fact.reason}"


def _rank(worker: WorkerRecord) -> Rank:
    return worker.rank if worker.rank is not None else Rank(-1)


def _preference(pair: tuple[WorkerRecord, WorkerRecord]) -> tuple[bool, bool, bool, int]:
    """The least first: not rank 0, which may do more than all others; another than the standby was built under."""
    standby, witness = pair
    same = standby.built_for == witness.rank
    return witness.rank == 0, standby.node != witness.node, same, _rank(witness)
