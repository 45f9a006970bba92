"""Reaction to replicas that differ: the difference is reported and recorded, and a newcomer is hydrated again.

If they differ before any worker was replaced, the script is the reason, and no newcomer is to blame.
"""

from collections import defaultdict

from regrow.core import records as record
from regrow.core.exit_codes import SCRIPT_ERROR
from regrow.core.ids import Instant, Rank
from regrow.core.messages.facts import WorkerResumed
from regrow.core.messages.orders import KeepOwn
from regrow.core.messages.replicas import StateSampled
from regrow.core.messages.vocabulary import Role
from regrow.membership import diagnosis as say
from regrow.membership.incident import CORRUPTION
from regrow.membership.job import Job
from regrow.membership.recovery.ladder import Ladder
from regrow.membership.replica_digests import Divergence, Samples, compare
from regrow.membership.roster import Stage, WorkerRecord
from regrow.membership.states import RUNNING

_MOST_OWN = 64
"""Most variables whose values a rank saves in each step; each takes about 10 µs."""


class Auditor:
    """Takes workers' digests of their state.

    Args:
        job: the job of the workers.
        ladder: replaces workers that must be hydrated again.
    """

    def __init__(self, job: Job, ladder: Ladder) -> None:
        self._job, self._ladder = job, ladder
        self._samples = Samples()
        self._hydrated_again: set[Rank] = set()
        self._unlike_from_start = False
        """True if ranks have built different values, so that later differences come from the script."""
        self._ranks_own = False
        """True if ranks were seen to differ before any worker was replaced."""

    def started(self, now: Instant) -> None:
        """Compare the initial state that the ranks have built."""
        looks: defaultdict[str, dict[Rank, dict[str, int]]] = defaultdict(dict)
        for worker in self._job.roster.placed():
            if worker.rank is not None and worker.parts:
                looks[worker.holding][worker.rank] = worker.parts
            worker.parts = {}
        for look in looks.values():
            found = compare(self._job.trainings.began, look)
            if found is not None:
                text = say.replicas_start_unlike(found)
                if self._samples.news(found):
                    self._say(found, text, now)
                self._unlike_from_start = True
                self._latent(text, now)

    def sampled(self, worker: WorkerRecord, fact: StateSampled, now: Instant) -> None:
        """Compare a worker's digests of its state before a step with those of others, and react to a difference."""
        if worker.rank is None:
            return
        replicas = sum(each.holding == worker.holding for each in self._job.roster.placed())
        found = self._samples.apply(fact, worker.rank, worker.holding, replicas=replicas)
        known = self._job.replacements.own
        before = frozenset(known.get(worker.holding, ()))
        if self._samples.own[worker.holding] - before:
            self._job.replacements.own = {**known, worker.holding: before.union(self._samples.own[worker.holding])}
            for each in self._job.roster.workers.values():
                if each.living and each.holding == worker.holding:
                    self.keep_own(each)
        if found is None:
            return
        if found.own:
            self._job.end(SCRIPT_ERROR, _each_has_a_part(found), now)
            return
        if found.in_tensors and all(each.role is Role.RANK for each in self._job.roster.placed()):
            self._ranks_own = True
        again = self._newcomers(found)
        text = say.replicas_diverge(found, [each.rank for each in again if each.rank is not None])
        if self._samples.news(found):
            self._say(found, text, now)
        if found.in_tensors and not self._unlike_from_start:
            self._job.doubted(say.replicas_unlike(found), now)
        else:
            self._latent(say.replicas_unlike(found), now)
        for each in again:
            self._job.orders.fence(each, "its state is not that of its replicas", now)
        if again and isinstance(self._job.state, RUNNING):
            self._ladder.mend(CORRUPTION, again, say.replicas_diverge(found, []), now, now)

    def keep_own(self, worker: WorkerRecord) -> None:
        """Have a worker save its rank's own values in each step, for the worker that may replace it."""
        if own := self._job.replacements.own.get(worker.holding):
            self._job.orders.add(KeepOwn(worker.worker, sorted(each for each in own if each[:1] != "\t")[:_MOST_OWN]))

    def resumed(self, worker: WorkerRecord, fact: WorkerResumed) -> None:
        """Record which values that belong to its own rank a worker now has from another rank, after it has joined."""
        if fact.unlike is not None and worker.rank is not None:
            own = {*fact.unlike, *self._job.replacements.own.get(worker.holding, ())} - {*fact.kept}
            self._job.incidents.not_kept(worker.rank, map(_variable, sorted(own)))

    def _newcomers(self, found: Divergence) -> list[WorkerRecord]:
        """Newcomers of this generation whose state differs from that of all other ranks; each rank only once."""
        # Differences in Python state alone may be intended.
        if not found.whole or not found.in_tensors or self._ranks_own:
            return []
        roster = self._job.roster
        groups = [[roster.workers[roster.places[rank]] for rank in ranks] for ranks in found.alike]
        fresh = [group for group in groups if all(self._fresh(worker) for worker in group)]
        if len(groups) - len(fresh) != 1:
            return []
        again = [worker for group in fresh for worker in group if worker.rank not in self._hydrated_again]
        self._hydrated_again.update(worker.rank for worker in again if worker.rank is not None)
        return again

    def _latent(self, text: str, now: Instant) -> None:
        """Note a possibly intended difference, which is harmless until a rank receives another's state."""
        if doubt := self._job.belief.unlike(text):
            self._job.doubted(doubt, now)

    def _fresh(self, worker: WorkerRecord) -> bool:
        came = worker.role is not Role.RANK and worker.entered == self._job.generation
        return came and worker.stage is Stage.MEMBER

    def _say(self, found: Divergence, text: str, now: Instant) -> None:
        alike, parts = [list(ranks) for ranks in found.alike], list(found.parts)
        self._job.orders.write(record.ReplicasDiverged(at=now, step=found.step, alike=alike, parts=parts, text=text))


def _variable(place: str) -> str:
    """Readable name of a plain variable, from the place that workers report."""
    space, _, key = place.lstrip("\t").partition("\n")
    if space.startswith(("object ", "module ")):
        return f"{space[7:].partition(':')[0]}.{key}".removeprefix("__main__.")
    return f"{key} in {space.split()[0]}()"


def _each_has_a_part(found: Divergence) -> str:
    """Message that the optimizer shards its state, so that no rank has another's part."""
    return (
        f"each rank has a part of {', '.join(found.parts)}, though all have the same parameters: an optimizer keeps "
        "its state in parts, and a rank that is replaced would get another's. Say so: session.protect(model), and "
        'session.protect(optimizer=optimizer, part=f"rank{session.rank}"); a part that no other rank has survives its '
        "rank by --buddy-every K (on two nodes or more) or in --checkpoint-dir. --no-audit trains on without this look"
    )
