"""A newcomer that is forked only for a proof, if no standby can make it, and ended afterwards. Pure.

It is forked like a replacement, for a rank of the holding in question, and never holds a rank. Nothing waits for it: if
it cannot be built, that is recorded as the reason why nothing is proven; if it is in the way, it is ended.
"""

from collections.abc import Sequence

from regrow.core.exit_codes import exit_text
from regrow.core.ids import Instant, Rank, Seconds, WorkerId
from regrow.core.messages.replacements import ReplacementUnproven, not_proven
from regrow.core.messages.vocabulary import Role
from regrow.membership.job import Job
from regrow.membership.roster import RankSlot, Stage, WorkerRecord

QUIET_S: Seconds = 10.0
"""Least time of training, or the build time if longer, before a prover is forked, so that short jobs have none."""
AGAIN_S: Seconds = 600.0
"""Least pause between two rounds with provers in the same world."""
CHANGED_S: Seconds = 60.0
"""Least pause between two rounds if the world has changed in between."""
SHARE = 0.005
"""Largest share of the training time that rounds with provers may take."""
_CHANGED_SHARE = 0.05
"""Largest share of the time for proofs that follow changes of the world, while such changes continue."""
_ATTEMPTS = 3
"""Inconclusive proofs in a row after which the prover is given up, and a new one is forked later."""


class Prover:
    """The present prover, if any; there is at most one.

    Args:
        job: the job whose newcomers are proven.
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
        """Reason from the prover's agent why it could not be forked."""

    @property
    def worker(self) -> WorkerRecord | None:
        """The living prover; None: there is none."""
        found = None if self._name is None else self._roster.workers.get(self._name)
        return found if found is not None and found.living else None

    def is_it(self, worker: WorkerId) -> bool:
        """True if this worker is the present prover or the last one."""
        return worker == self._name

    def changed(self, now: Instant) -> None:
        """End the prover, because a new generation has formed; proofs are repeated once it has trained for a while."""
        self.end("the world is another one", now)
        quiet = max(QUIET_S, self._roster.first_build or 0.0)
        paid = self._begun + max(CHANGED_S, self._cost / _CHANGED_SHARE) if self._begun else now
        failed = self._not_before if self._pause > AGAIN_S else now
        self._not_before = max(now + quiet, paid, failed)

    def make(self, ranks: Sequence[WorkerRecord], now: Instant) -> str:
        """Fork a prover for the best of these ranks, which share one holding; returns the reason if none can be forked.

        Rank 0 has no prover, as the script would write its outputs twice. Empty: one was forked, or will be later.
        """
        if not ranks:
            return ""
        if ranks[0].unprovable:
            return ranks[0].unprovable
        others = [each for each in ranks if each.rank]
        if not others:
            return (
                "rank 0 has what no other rank has, and a proof does not repeat the work of rank 0 alone "
                "(--standby 1 has one made)"
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
        """End a prover that takes too long to build or is on a node that is given back."""
        worker = self.worker
        if worker is None:
            return
        if not self._roster.nodes[worker.node].usable:
            self.end("its node is given back", now)
        elif worker.stage is not Stage.READY and now >= worker.since + self._job.spec.build_deadline:
            self._failed(f"a newcomer was not built within {self._job.spec.build_deadline:.0f} s", now)

    def end(self, reason: str, now: Instant) -> None:
        """End the prover because it is no longer needed or is in the way."""
        worker = self.worker
        if worker is not None and worker.stage is not Stage.FENCED:
            self._cost = max(self._cost, now - self._begun) if worker.stage is not Stage.READY else self._cost
            self._job.orders.fence(worker, reason, now)

    def next(self, now: Instant) -> None:
        """End the prover, which has made all proofs that it can; the next may be forked, for another holding."""
        if self._shown:
            self.end("its proof has ended", now)
            self._not_before = now
        else:
            self._failed("a newcomer has built another part of the state than the rank has", now)

    def showed(self) -> None:
        """Note that a proof by the prover has succeeded."""
        self._shown = True

    def done(self, cost: Seconds, now: Instant) -> None:
        """End the prover after a round that took `cost` of computing, and set the pause before the next by the cost."""
        if self._name is None or self._begun == 0.0:
            return
        self.end("the proof that it was made for has ended", now)
        self._cost, self._pause = cost, AGAIN_S
        self._not_before = now + max(AGAIN_S, cost / SHARE)

    def showed_nothing(self, reason: str, now: Instant) -> None:
        """Note that a proof by the prover was inconclusive; after `_ATTEMPTS` of these it is given up."""
        self._tries += 1
        if self._tries >= _ATTEMPTS:
            self._failed(reason, now)

    def refused(self, fact: ReplacementUnproven) -> None:
        """Note the agent's reason for not forking the prover."""
        self._reported = fact.reason

    def lost(self, worker: WorkerRecord, code: int, now: Instant) -> None:
        """Note why the prover has ended by itself."""
        error = self._job.errors.of(worker.worker)
        if self._reported:
            why = self._reported
        elif error is not None:
            why = f"a newcomer's script fails before its first step: {error[0].type}: {error[0].message}"
        else:
            why = f"a newcomer's script ends before its first step: it {exit_text(code)}"
        self._failed(why, now)

    def unfit(self, text: str, now: Instant) -> None:
        """Count the prover as failed, because it has built other state than the ranks."""
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
