"""Schedule of proofs that a newcomer could take a rank's place, made in the rank's shadow before it is needed. Pure.

One rank of each holding is proven in the first steps, after each change of the world, and again at a rate that follows
from the cost of the last round, each time another rank. Rank 0, which often does more than the others, has a proof of
its own in the first round. If no standby can make a proof, a newcomer is forked for it (see `provers.py`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from regrow.core.early_reads import PlaceInWorld
from regrow.core.ids import Generation, Instant, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.replacements import ProveReplacement, ReplacementFact, ReplacementProven, ReplacementUnproven
from regrow.core.messages.vocabulary import Role, Warmth
from regrow.membership.diagnosis import READS_EARLY
from regrow.membership.job import Job
from regrow.membership.recovery.proofs.provers import SHARE, Prover
from regrow.membership.roster import BUILDING, Roster, Stage, WorkerRecord
from regrow.membership.states import Training

FIRST_STEP = StepNo(3)
"""First step of a proof: some differences, as by a counter or a cache, show only after steps were committed."""
_LEAST_S: Seconds = 60.0
"""Least pause between two rounds, however cheap they are."""
_LATE_S: Seconds = 600.0
_AGAIN_S: Seconds = 2.0
_MOST_AGAIN_S: Seconds = 600.0
_LOOK_S: Seconds = 0.5

CanTake = Callable[[WorkerRecord, Rank, int], bool]


@dataclass(frozen=True)
class _Open:
    """A proof under way."""

    prover: WorkerId
    rank: Rank
    holding: str
    until: Instant


class Proofs:
    """Orders proofs one after the other.

    Args:
        job: the job whose newcomers are proven.
        can_take: True if a standby can take a rank in that slot.
    """

    def __init__(self, job: Job, can_take: CanTake) -> None:
        self._job, self._roster, self._can_take = job, job.roster, can_take
        self._made = Prover(job)
        self._open: _Open | None = None
        self._generation = Generation(0)
        self._first = FIRST_STEP
        self._done: set[str] = set()
        self._turns: dict[Rank, int] = {}
        """Number of the newest proof of each rank, in the order in which proofs were made."""
        self._rank_0_due = True
        self._due: Instant = 0.0
        self._cost: Seconds = 0.0
        self._again = _AGAIN_S
        self._over = not job.spec.proof

    def advance(self, now: Instant) -> None:
        """Order a proof if one is due; pause if the job does not train. Called while nothing is repaired."""
        if self._roster.count(Stage.FINISHED) or not isinstance(self._job.state, Training):
            self.pause(now)
            return
        self._made.look(now)
        if self._over or self._job.replacements.refuted:
            return
        if self._job.generation != self._generation:
            self._enter(now)
        if now < self._due:
            return
        if self._open is not None and not self._given_up(self._open, now):
            self._due = now + _LOOK_S
            return
        if self._job.step < self._first:
            return
        self._due = now + _LOOK_S
        holdings = {each.holding: None for each in self._roster.placed(Stage.MEMBER)}
        missing = [each for each in holdings if each not in self._done]
        if holdings and not missing and self._order_rank_0(now):
            return
        if holdings and not missing:
            self._made.done(self._cost, now)
            self._due = now + between_rounds(self._cost)
            self._done.clear()
            self._cost = 0.0
        elif not any(self._order(holding, now) for holding in missing):
            self._make(missing, now)

    def pause(self, now: Instant) -> None:
        """End a newcomer that was forked for a proof, because a fault is being repaired or the job ends."""
        self._made.end("nothing is proven now", now)

    def _enter(self, now: Instant) -> None:
        """Begin anew in a new generation, for which earlier proofs do not hold."""
        if self._generation > 0:
            self._first = StepNo(max(FIRST_STEP, self._job.step + 1))
        self._generation, self._open = self._job.generation, None
        self._done.clear()
        self._turns.clear()
        self._rank_0_due = True
        self._due, self._again = now, _AGAIN_S
        self._made.changed(now)

    def _given_up(self, proof: _Open, now: Instant) -> bool:
        """Give up the open proof if it can no longer be made; returns True if it was given up."""
        prover = self._roster.workers.get(proof.prover)
        made = prover is not None and prover is self._made.worker
        if prover is not None and (prover.spare or made) and now < proof.until:
            return False
        self._open = None
        if made:
            self._made.showed_nothing(f"a newcomer has shown nothing within {_LATE_S:.0f} s", now)
        return True

    def _alike(self, holding: str) -> list[WorkerRecord]:
        return [each for each in self._roster.placed(Stage.MEMBER) if each.holding == holding and each.rank is not None]

    def _order_rank_0(self, now: Instant) -> bool:
        """Once in each world, let a standby prove rank 0 if that was not proven yet; False: nothing was ordered."""
        due, self._rank_0_due = self._rank_0_due and Rank(0) not in self._turns, False
        holding = next((each.holding for each in self._roster.placed(Stage.MEMBER) if each.rank == 0), None)
        return due and holding is not None and self._order(holding, now, of=[Rank(0)])

    def _order(self, holding: str, now: Instant, *, of: Collection[Rank] = ()) -> bool:
        """Let the best newcomer prove the best rank with this holding; False: no newcomer can.

        Args:
            holding: the part of the state.
            now: the time.
            of: ranks to choose from; empty: any.
        """
        newcomers = [*self._roster.standbys(), *([made] if (made := self._made.worker) is not None else [])]
        pairs = [
            (newcomer, each)
            for newcomer in newcomers
            if newcomer.stage is Stage.READY and newcomer.holding == holding
            for each in self._alike(holding)
            if not of or each.rank in of
            if newcomer.role is not Role.PROVER or newcomer.built_for == each.rank
            if self._can_take(newcomer, _rank(each), each.local_rank)
        ]
        if not pairs:
            return False
        prover, witness = min(pairs, key=lambda pair: (self._turn(pair[1]), _preference(pair)))
        rank, local_rank, job = _rank(witness), witness.local_rank, self._job
        self._open = _Open(prover.worker, rank, holding, now + _LATE_S)
        own = sorted(job.replacements.own.get(holding, ()))
        order = ProveReplacement(prover.worker, job.generation, rank, local_rank, witness.endpoint, job.world, own)
        job.orders.add(order)
        return True

    def _turn(self, worker: WorkerRecord) -> int:
        return self._turns.get(_rank(worker), 0)

    def _make(self, holdings: Sequence[str], now: Instant) -> None:
        """Fork a newcomer for one of these holdings, because none exists for any of them."""
        made = self._made.worker
        if made is not None and made.stage is Stage.READY:
            self._made.next(now)
        elif made is not None:
            return
        if any(self._coming(each) for each in self._roster.standbys()):
            self._job.replacements.unproven = "no standby is there yet that could be compared"
            return
        if not self._job.spec.proof_forks:
            self._job.replacements.unproven = _none_comparable(self._roster, self._job.spec.spares)
            return
        for holding in holdings:
            in_turn = sorted(self._alike(holding), key=lambda each: (-self._turn(each), _rank(each)))
            if why := self._made.make(in_turn, now):
                self._done.add(holding)
                self._job.replacements.unproven = why
            else:
                return

    def _coming(self, standby: WorkerRecord) -> bool:
        """True if a standby is still being built and could make a proof later."""
        early = self._roster.nodes[standby.node].early
        return standby.stage in BUILDING and self._job.spec.warmth is Warmth.BUILT and not early

    def lost(self, worker: WorkerRecord, fact: facts.WorkerExited, now: Instant) -> None:
        """Note the end of a newcomer that was forked for a proof and has ended by itself."""
        if self._made.is_it(worker.worker):
            self._open = None
            self._made.lost(worker, fact.code, now)

    def unfit(self, worker: WorkerRecord, text: str, now: Instant) -> None:
        """Note that a newcomer, forked for a proof, has built other state than the ranks."""
        if self._made.is_it(worker.worker):
            self._open = None
            self._made.unfit(text, now)

    def apply(self, fact: ReplacementFact, now: Instant) -> None:
        """Take the result of a proof."""
        proof, made = self._open, self._made.is_it(fact.worker)
        if made and proof is None and isinstance(fact, ReplacementUnproven):
            self._made.refused(fact)
            self._job.replacements.unproven = fact.reason
        if proof is None or fact.worker != proof.prover or fact.generation != self._generation:
            return
        self._open, replacements = None, self._job.replacements
        self._due = now
        if isinstance(fact, ReplacementProven):
            self._done.add(proof.holding)
            self._turns[proof.rank] = max(self._turns.values(), default=0) + 1
            self._cost += fact.held + fact.seconds
            self._again, replacements.unproven = _AGAIN_S, ""
            if made:
                self._made.showed()
        elif isinstance(fact, ReplacementUnproven):
            replacements.unproven = fact.reason
            self._over = fact.permanent
            self._due, self._again = now + self._again, min(2 * self._again, _MOST_AGAIN_S)
            if made and fact.permanent:
                self._made.end("nothing can be proven", now)
            elif made:
                self._made.showed_nothing(fact.reason, now)


def between_rounds(cost: Seconds) -> Seconds:
    """Pause before the next round, from the cost of the last one."""
    return max(_LEAST_S, cost / SHARE)


def _rank(worker: WorkerRecord) -> Rank:
    return worker.rank if worker.rank is not None else Rank(-1)


def _preference(pair: tuple[WorkerRecord, WorkerRecord]) -> tuple[bool, bool, bool, int]:
    """Sort key, best first: not rank 0, which may do more; on the same node; not the rank that it was built for."""
    newcomer, witness = pair
    return witness.rank == 0, newcomer.node != witness.node, newcomer.built_for == witness.rank, _rank(witness)


def _none_comparable(roster: Roster, spares: int) -> str:
    """Reason why no standby can be compared with a rank. `spares`: number of spare nodes, whose standbys count too."""
    standbys, places = roster.standbys(), (PlaceInWorld.RANK, PlaceInWorld.LOCAL_RANK)
    reads = [each.early[what] for each in standbys for what in places if what in each.early]
    if where := roster.early or next(iter(reads), ""):
        return f"{READS_EARLY} ({where}), so no standby can be compared (see --proof fork)"
    if not standbys:
        where = "no spare node has a standby now" if spares else "no standby is there"
        return f"{where} that could be compared (--standby 1, or --proof fork)"
    built = any(each.stage is Stage.READY for each in standbys)
    why = "no standby fits a rank that is to be" if built else "standbys wait before the script, so none can be"
    return f"{why} compared (see --proof fork)"
