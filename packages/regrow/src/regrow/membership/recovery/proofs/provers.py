"""A newcomer that is made for a proof where no standby could make one, and ended behind it. Pure.

It is forked as a replacement would be, for a rank of the holding that is to be looked at, and never holds a rank.
Nothing waits for it: where it cannot be built, that is why nothing is proven; where it is in the way, it is ended.
"""

from collections.abc import Sequence

from regrow.core.exit_codes import exit_text
from regrow.core.ids import Instant, Rank, Seconds, WorkerId
from regrow.core.messages.replacements import ReplacementUnproven, not_proven
from regrow.core.messages.vocabulary import Role
from regrow.membership.job import Job
from regrow.membership.roster import RankSlot, Stage, WorkerRecord

QUIET_S: Seconds = 10.0
"""Time of steps, besides the time of building, before a prover is made: short jobs have none."""
AGAIN_S: Seconds = 600.0
"""From the end of one round with it to the next in the same world, at least."""
CHANGED_S: Seconds = 60.0
"""From one to the next where the world has changed in between, at least."""
SHARE = 0.005
"""Share of the time that proofs may take."""
_CHANGED_SHARE = 0.05
"""Share for proofs that follow changes of the world, as long as changes follow one another."""
_ATTEMPTS = 3
"""Proofs in a row that have shown nothing after which another prover is made, later."""


class Prover:
    """The one that there is, if any.

    Args:
        job: whose newcomers are looked at.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._roster = job, job.roster
        self._name: WorkerId | None = None
        self._begun: Instant = 0.0
        self._not_before: Instant = 0.0
        self._cost: Seconds = 0.0
        self._pause: Seconds = AGAIN_S
        self._tries = 0
        self._shown = False
        self._reported = ""
        """Why it could not be made, as its agent has said."""

    @property
    def worker(self) -> WorkerRecord | None:
        """The one that is there; None: none is."""
        found = None if self._name is None else self._roster.workers.get(self._name)
        return found if found is not None and found.living else None

    def is_it(self, worker: WorkerId) -> bool:
        """True if that is the present prover, or the last one."""
        return worker == self._name

    def changed(self, now: Instant) -> None:
        """Another generation stands: what it showed is to be shown again, when steps have been run for a while."""
        self.end("the world is another one", now)
        quiet = max(QUIET_S, self._roster.first_build or 0.0)
        paid = self._begun + max(CHANGED_S, self._cost / _CHANGED_SHARE) if self._begun else now
        failed = self._not_before if self._pause > AGAIN_S else now
        self._not_before = max(now + quiet, paid, failed)

    def make(self, ranks: Sequence[WorkerRecord], now: Instant) -> str:
        """Have one made for the best of these ranks, which are alike; returns why not, for people; empty: it will be.

        Never for rank 0, beside which a script would write once more what it writes on rank 0.
        """
        if not ranks:
            return ""
        if ranks[0].unprovable:
            return ranks[0].unprovable
        others = [each for each in ranks if each.rank]
        if not others:
            return (
                "rank 0 has what no other rank has, and what a script does on rank 0 alone is not done twice for a "
                "proof (--standby 1 has one made)"
            )
        if now < self._not_before or self._roster.candidates:
            return ""
        nodes = self._roster.nodes
        fit = [each for each in others if nodes[each.node].usable and not nodes[each.node].quarantined]
        if not fit:
            return "no worker is made on a node that is given back, or in quarantine"
        witness = fit[-1]
        self._begun, self._not_before, self._tries = now, now + self._pause, 0
        self._shown, self._reported = False, ""
        slot = RankSlot(witness.node, witness.rank or Rank(0), witness.local_rank)
        self._name = self._job.spawn(slot, Role.PROVER, now)
        return ""

    def look(self, now: Instant) -> None:
        """End one that takes too long to build, or is on a node that is given back."""
        worker = self.worker
        if worker is None:
            return
        if not self._roster.nodes[worker.node].usable:
            self.end("its node is given back", now)
        elif worker.stage is not Stage.READY and now >= worker.since + self._job.spec.build_deadline:
            self._failed(f"a newcomer was not built within {self._job.spec.build_deadline:.0f} s", now)

    def end(self, reason: str, now: Instant) -> None:
        """It is not needed any more, or in the way."""
        worker = self.worker
        if worker is not None and worker.stage is not Stage.FENCED:
            self._cost = max(self._cost, now - self._begun) if worker.stage is not Stage.READY else self._cost
            self._job.orders.fence(worker, reason, now)

    def next(self, now: Instant) -> None:
        """It has shown what it could: the next one may be made, for another holding."""
        if self._shown:
            self.end("it has shown what it could", now)
            self._not_before = now
        else:
            self._failed("a newcomer has built another part of the state than the rank has", now)

    def showed(self) -> None:
        """A proof of it came to its end."""
        self._shown = True

    def done(self, cost: Seconds, now: Instant) -> None:
        """All is shown, for `cost` of computing; the next one is made when that is paid for."""
        if self._name is None or self._begun == 0.0:
            return
        self.end("it has shown what it was made for", now)
        self._cost, self._pause = cost, AGAIN_S
        self._not_before = now + max(AGAIN_S, cost / SHARE)

    def showed_nothing(self, reason: str, now: Instant) -> None:
        """A proof of it came to nothing; after some it is given up."""
        self._tries += 1
        if self._tries >= _ATTEMPTS:
            self._failed(reason, now)

    def refused(self, fact: ReplacementUnproven) -> None:
        """Its agent says why it is not made."""
        self._reported = fact.reason

    def lost(self, worker: WorkerRecord, code: int, now: Instant) -> None:
        """It has ended by itself."""
        error = self._job.errors.of(worker.worker)
        if self._reported:
            why = self._reported
        elif error is not None:
            why = f"a newcomer's script fails before its first step: {error[0].type}: {error[0].message}"
        else:
            why = f"a newcomer's script ends before its first step: it {exit_text(code)}"
        self._failed(why, now)

    def unfit(self, text: str, now: Instant) -> None:
        """Count the prover as failed: it has built something else than the ranks."""
        self._failed(text, now)

    def _failed(self, reason: str, now: Instant) -> None:
        self.end("nothing can be shown with it", now)
        self._cost = max(self._cost, now - self._begun)
        self._not_before = now + max(self._pause, self._cost / SHARE)
        self._pause *= 2
        replacements = self._job.replacements
        replacements.unproven = reason
        if replacements.doubts(reason):
            self._job.orders.note(not_proven(reason), now)
