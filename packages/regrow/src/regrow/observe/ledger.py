"""Sums up a job's records: every committed number once, and the cost of the faults.

Pure: a ledger is a fold over records, in any order of ranks; it reads no clock and no file.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from statistics import median

from regrow.core.ids import Generation, Instant, Rank, Seconds, StepNo
from regrow.core.messages.replacements import replaceability
from regrow.core.records import (
    PLANNED,
    FaultInjected,
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    Record,
    ReplacementJudged,
    ReplicaCorrupted,
    ReplicasDiverged,
    StepCommitted,
)
from regrow.observe.tail import read_records

__all__ = ["Ledger", "read_records", "time_lost"]


class Ledger:
    """The sums of one job's records.

    Args:
        records: initial records; more can be added one by one.
        world: world size of the job; None: taken from `JobStarted`, and before that from the ranks that committed.
    """

    def __init__(self, records: Iterable[Record] = (), *, world: int | None = None) -> None:
        self._world = world
        self.started: JobStarted | None = None
        self.ended: JobEnded | None = None
        self.generations: list[GenerationFormed] = []
        self.incidents: list[IncidentClosed] = []
        self.open_incidents: dict[int, IncidentOpened] = {}
        self.injected: list[FaultInjected] = []
        self.corruptions: list[ReplicaCorrupted] = []
        self.divergences: list[ReplicasDiverged] = []
        self.proven: dict[Rank, ReplacementJudged] = {}
        """For each rank, the newest proof that a newcomer computes the same."""
        self.refuted: list[ReplacementJudged] = []
        self.commits: dict[StepNo, dict[Rank, StepCommitted]] = {}
        """For each step and rank, the commit that counts: the last one that the rank computed itself."""
        self.history: dict[tuple[StepNo, Rank], list[StepCommitted]] = {}
        """For each step and rank, all commits, oldest first; several if the step was adopted or redone."""
        self._ranks: set[Rank] = set()
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add a record. Adding it twice changes nothing."""
        match record:
            case StepCommitted():
                self._add_commit(record)
            case JobStarted():
                self.started = record
            case JobEnded():
                self.ended = record
            case GenerationFormed():
                self.generations.append(record)
            case IncidentOpened():
                self.open_incidents[record.incident] = record
            case IncidentClosed():
                self.open_incidents.pop(record.incident, None)
                self.incidents.append(record)
            case FaultInjected():
                self.injected.append(record)
            case ReplicaCorrupted():
                self.corruptions.append(record)
            case ReplicasDiverged():
                self.divergences.append(record)
            case ReplacementJudged() if record.reason:
                self.refuted.append(record)
            case ReplacementJudged():
                self.proven[record.rank] = record
            case _:
                pass

    def _add_commit(self, commit: StepCommitted) -> None:
        history = self.history.setdefault((commit.step, commit.rank), [])
        if commit in history:
            return
        history.append(commit)
        history.sort(key=lambda c: c.at)
        computed = [c for c in history if not c.adopted]
        self.commits.setdefault(commit.step, {})[commit.rank] = (computed or history)[-1]
        self._ranks.add(commit.rank)

    @property
    def replaceable(self) -> str:
        """A sentence on the proofs that newcomers compute the same as the ranks that they replace."""
        reason = self.refuted[0].reason if self.refuted else ""
        return replaceability(reason, (each.step for each in self.proven.values()))

    # --- what was computed ----------------------------------------------------------------------------------------

    @property
    def world(self) -> int:
        """World size of the job."""
        if self._world is not None:
            return self._world
        return self.started.world if self.started is not None else len(self._ranks)

    @property
    def numbers(self) -> dict[tuple[StepNo, Rank], Mapping[str, float]]:
        """The metrics of each committed step of each rank."""
        return {(step, rank): c.metrics for step, ranks in self.commits.items() for rank, c in ranks.items()}

    def curve(self, metric: str = "loss") -> list[tuple[StepNo, float]]:
        """Pairs of a step and the mean of `metric` over the ranks that committed it, in order of steps."""
        points = []
        for step in sorted(self.commits):
            values = [c.metrics[metric] for c in self.commits[step].values() if metric in c.metrics]
            if values:
                points.append((step, sum(values) / len(values)))
        return points

    @property
    def last_step(self) -> StepNo | None:
        """The newest step that any rank has committed."""
        return max(self.commits, default=None)

    def world_commits(self, *, newest: int | None = None) -> list[tuple[StepNo, Instant]]:
        """The steps that every rank committed, each with the time of its last commit; `newest`: at most this number."""
        world = self.world
        steps = (step for step in sorted(self.commits, reverse=True) if len(self.commits[step]) == world > 0)
        found = [(step, max(c.at for c in self.commits[step].values())) for step in islice(steps, newest)]
        return found[::-1]

    @property
    def samples(self) -> int:
        """Number of samples of all commits that count."""
        return sum(c.samples for ranks in self.commits.values() for c in ranks.values())

    # --- what the faults cost -------------------------------------------------------------------------------------

    @property
    def steps_redone(self) -> int:
        """Number of repeated computations of committed steps: of each step, the maximum over the ranks."""
        again: dict[StepNo, int] = {}
        for (step, _), history in self.history.items():
            computed = sum(not commit.adopted for commit in history)
            again[step] = max(again.get(step, 0), computed - 1)
        return sum(again.values())

    @property
    def steps_lost(self) -> int:
        """Number of committed steps that were rolled back, by the records of incidents."""
        return sum(incident.steps_lost for incident in self.incidents)

    @property
    def recovery_median(self) -> Seconds | None:
        """Median over the closed incidents with a fault of the time from the fault to the next committed step."""
        times = [each.total for each in self.incidents if each.kind not in PLANNED or each.faults]
        return median(times) if times else None

    @property
    def step_median(self) -> Seconds | None:
        """Median time from one commit of the whole world to the next, within one generation."""
        gaps = list(self.step_gaps())
        return median(gaps) if gaps else None

    def step_gaps(self) -> Iterable[Seconds]:
        """Times between the world's commits of consecutive steps within one generation."""
        previous: tuple[StepNo, Instant, set[Generation]] | None = None
        for step, at in self.world_commits():
            generations = {c.generation for c in self.commits[step].values()}
            if previous is not None and (previous[0] + 1, previous[2]) == (step, generations) and len(generations) == 1:
                yield at - previous[1]
            previous = (step, at, generations)

    @property
    def wall(self) -> Seconds:
        """Time from the start of the first step that committed to the last commit."""
        commits = [c for ranks in self.commits.values() for c in ranks.values()]
        if not commits:
            return 0.0
        first = min(self.commits)
        start = min(c.at - c.seconds for c in self.commits[first].values())
        return max(c.at for c in commits) - min(start, min(c.at for c in commits))

    @property
    def productive(self) -> Seconds:
        """Time spent in the last attempts of committed steps.

        Each step counts from the latest of three times to its last computed commit: the first rank's start of that
        attempt, the forming of the generation that committed it, and the last commit of the step before. So no moment
        counts twice, a repeated step counts once, and interrupted attempts, recovery, and time between steps do not
        count.
        """
        formed = {g.generation: g.at for g in self.generations}
        total, covered = 0.0, float("-inf")
        for step in sorted(self.commits):
            computed = [c for c in self.commits[step].values() if not c.adopted]
            if not computed:
                continue
            end = max(c.at for c in computed)
            start = min(max(c.at - c.seconds, formed.get(c.generation, float("-inf"))) for c in computed)
            total += max(0.0, end - max(start, covered))
            covered = max(covered, end)
        return total

    @property
    def goodput(self) -> float:
        """`productive / wall`, from 0 to 1; 1 if nothing has run yet. `goodput.py` counts rank-seconds instead."""
        wall = self.wall
        return min(1.0, self.productive / wall) if wall > 0 else 1.0


def time_lost(ledger: Ledger, *, killed_at: Instant, ended: Generation, step_median: Seconds) -> Seconds | None:
    """Cost of one kill, in seconds; None until the step that determines the cost is committed.

    The cost is the time from the kill until every rank has committed the step after the last committed one, minus a
    median step.

    Args:
        ledger: ledger of the job; its generations may be regrow's or torchrun's restart count.
        killed_at: time at which the signal was sent.
        ended: the generation that the kill ended. Its survivors may still commit after the kill, so the awaited step
            is the one after those commits.
        step_median: duration of an undisturbed step of the same job.
    """
    target = StepNo(last_committed(ledger, ended) + 1)
    reached = []
    for (step, _), history in ledger.history.items():
        after = [c.at for c in history if c.generation > ended]
        if step == target and after:
            reached.append(after[0])
    if not 0 < ledger.world <= len(reached):
        return None
    return max(reached) - killed_at - step_median


def last_committed(ledger: Ledger, until: Generation) -> StepNo:
    """The newest step that any rank computed in the generations up to `until`; -1 if there is none."""
    commits = (c for history in ledger.history.values() for c in history if not c.adopted)
    return max((c.step for c in commits if c.generation <= until), default=StepNo(-1))
