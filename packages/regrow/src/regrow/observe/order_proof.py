"""Proof that a training has read every sample exactly once, from its records alone. Pure.

Every step must be present, read by each share of one world; a step that was committed again must have read the same;
the digest of each share's sample addresses must match its order; and the addresses of each epoch must be all of its
samples, each once. A gap in the records is not a finding: it makes the proof incomplete, with a reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import msgspec

from regrow.core.errors import UsageError
from regrow.core.ids import Rank, StepNo
from regrow.core.messages.data import BatchRecord, OrderSpec, SourceSpec
from regrow.core.records import GenerationFormed, StepCommitted
from regrow.data.order import MIXTURE, ORDERED, Address, dealt, order_of, samples_digest
from regrow.observe.proof import Finding, Proof, Verdict, WorldSpan, spans
from regrow.observe.reads import History, RunGeneration, RunRecords, StepReads
from regrow.observe.sample_counts import SampleCounts


def prove(runs: Sequence[RunRecords], *, against: Sequence[RunRecords] = ()) -> Proof:
    """Check a chain of runs, each resumed from the one before it.

    Args:
        runs: one run, or several in the order in which they ran.
        against: another chain of runs, whose steps must have read the same samples.
    """
    one = _Prover(runs)
    one.go()
    if against:
        other = _Prover(against)
        other.go()
        _compare(one, other)
    one.proof.decide()
    return one.proof


@dataclass
class _Step:
    """The reads of a step, as far as the records show them.

    `followed`: every share has read the samples that the order selects.
    """

    reads: StepReads
    shares: int
    records: dict[int, BatchRecord] = field(default_factory=dict)
    order: OrderSpec | None = None
    followed: bool = False

    @property
    def effective(self) -> OrderSpec | None:
        """The order in a form that is equal for equal global batches, whether they are given per share or in total."""
        if self.order is None:
            return None
        batch = self.order.global_batch or self.order.batch_size * self.shares
        return msgspec.structs.replace(self.order, batch_size=0, global_batch=batch)

    def share_of(self, rank: Rank) -> int | None:
        """The share that a rank has read; None if it has not read exactly one."""
        commit = self.reads.counted.get(rank)
        return commit.reads[0].share if commit is not None and len(commit.reads) == 1 else None


class _Prover:
    """Checks the steps of a chain, and collects the results in `proof`."""

    def __init__(self, runs: Sequence[RunRecords]) -> None:
        self.proof, self._runs = Proof([run.name for run in runs]), runs
        self.determined: dict[StepNo, _Step] = {}
        self._history = History(runs)
        self._doubts: dict[str, list[StepNo]] = {}
        self._counts: SampleCounts | None = None
        self._former: _Step | None = None

    def go(self) -> None:
        """Check all steps. Call it once."""
        history, proof = self._history, self.proof
        proof.first, proof.steps, proof.unfinished = history.first, len(history.steps), history.unfinished
        if not history.steps:
            proof.reasons.append("the records contain no step that all ranks have committed")
        if history.first > 0:
            proof.reasons.append(f"{spans(range(history.first))}: not in these records; name the jobs before them too")
        if not history.reported:
            proof.reasons.append("there is no events.jsonl, or it does not list the job's workers")
        if any(isinstance(each, GenerationFormed) and each.training for run in self._runs for each in run.records):
            proof.reasons.append("the script has several trainings, each with an order of its own, which is not proven")
            return proof.decide()
        for reads in history.steps:
            self._look_at(reads)
        self._end_counts()
        for reason, steps in self._doubts.items():
            proof.reasons.append(f"{spans(steps)}: {reason}")
        proof.decide()

    # --- one step -------------------------------------------------------------------------------------------------

    def _look_at(self, reads: StepReads) -> None:
        self._look_for_ranks(reads)
        step = self._find_shares(reads)
        self._look_at_times_before(reads)
        order = self._order(reads)
        if step is not None:
            step.order = order
            self._look_at_change(step)
        self._follow(reads, step, order)
        if step is not None:
            self.determined[reads.step] = self._former = step

    def _look_for_ranks(self, reads: StepReads) -> None:
        """Check that every rank of the world that determines this step has a record of the step."""
        if not reads.counted:
            excuses = sorted({missing.excuse for missing in reads.missing})
            if "" in excuses or (not excuses and self._history.reported):
                self.find(reads, "step skipped", "no rank has a record of it, though later steps were committed")
            else:
                self._doubt(reads, "; ".join(["no rank has a record of it", *excuses]))
            return
        for missing in reads.missing:
            text = f"rank {missing.rank} has no record of it, and others have"
            if missing.excuse:
                self._doubt(reads, f"{text}: {missing.excuse}")
            else:
                share = self._former.share_of(missing.rank) if self._former is not None else None
                self.find(reads, "share missing", text, share=share, rank=missing.rank)

    def _find_shares(self, reads: StepReads) -> _Step | None:
        """Determine the shares that were read; None if that is impossible."""
        reported = {rank: commit.reads for rank, commit in reads.counted.items() if commit.reads}
        for rank in sorted(reads.counted.keys() - reported.keys()):
            self._doubt(reads, f"the record of rank {rank} does not list what was read")
        worlds = sorted({data.shares for each in reported.values() for data in each})
        if len(worlds) > 1:
            text = f"its batch was cut into {' and into '.join(map(str, worlds))} shares"
            self.find(reads, "two worlds in one step", text)
        if len(worlds) != 1:
            return None
        (shares,) = worlds
        seen = self.proof.worlds
        if seen and seen[-1].shares == shares:
            seen[-1] = WorldSpan(shares, seen[-1].first, reads.step)
        else:
            seen.append(WorldSpan(shares, reads.step, reads.step))
        step = _Step(reads, shares, self._by_share(reads, reported, shares))
        if not reads.missing and len(reported) == len(reads.counted):
            for share in sorted(set(range(shares)) - step.records.keys()):
                self.find(reads, "share missing", f"no rank has read share {share} of {shares}", share=share)
        return step

    def _by_share(
        self, reads: StepReads, reported: dict[Rank, list[BatchRecord]], shares: int
    ) -> dict[int, BatchRecord]:
        found: dict[int, BatchRecord] = {}
        readers: dict[int, list[Rank]] = {}
        for rank, data in ((rank, data) for rank, each in sorted(reported.items()) for data in each):
            if not 0 <= data.share < shares:
                text = f"there is no share {data.share} of {shares}"
                self.find(reads, "share out of range", text, share=data.share, rank=rank)
                continue
            same = found.setdefault(data.share, data)
            readers.setdefault(data.share, []).append(rank)
            if difference := _difference(same, data):
                text = f"rank {readers[data.share][0]} has read the same share, with other {difference}"
                self.find(reads, "share read differently", text, share=data.share, rank=rank)
        numbers = [len(ranks) for ranks in readers.values()]
        if not reads.missing and len(readers) == shares and len(set(numbers)) > 1:
            share, ranks = max(sorted(readers.items()), key=lambda item: len(item[1]))
            text = f"{len(ranks)} ranks have read it, and {min(numbers)} another share"
            self.find(reads, "share repeated", text, share=share, rank=ranks[-1])
        return found

    def _look_at_times_before(self, reads: StepReads) -> None:
        """Compare the reads of a step that was committed, rolled back and committed again: they must be equal."""
        equal = different = 0
        for place, commit in reads.earlier:
            self._look_at_time_before(reads, place, commit)
            for rank, now in sorted(reads.counted.items()):
                for before, after in _same_shares(commit, now):
                    difference = _difference(before, after)
                    if not difference:
                        equal += 1
                        continue
                    different += 1
                    text = f"rank {commit.rank} had read other {difference} for it in {self._where(place)}"
                    self.find(reads, "changed the second time", text, share=after.share, rank=rank)
        self.proof.agreed += equal > 0 and not different

    def _look_at_time_before(self, reads: StepReads, place: RunGeneration, commit: StepCommitted) -> None:
        """Check that a commit that was rolled back has read the samples of the order too."""
        order = self._history.order_of(place, commit)
        if not _can_recompute(order):
            return
        for data in commit.reads:
            if not data.samples or not 0 <= data.share < data.shares:
                continue
            whole = self._addresses(reads, order, data.shares)
            if whole is not None and data.samples != samples_digest(_part(order, whole, data)):
                text = f"those that rank {commit.rank} read in {self._where(place)} are others"
                self.find(reads, "not the order's samples", text, share=data.share, rank=commit.rank)

    # --- its samples ----------------------------------------------------------------------------------------------

    def _order(self, reads: StepReads) -> OrderSpec | None:
        """The order by which a step was read; several orders among the step's ranks are a finding."""
        found: list[OrderSpec] = []
        for rank, commit in sorted(reads.counted.items()):
            order = self._history.order_of(reads.place, commit)
            if order is None or order in found:
                continue
            found.append(order)
            if len(found) > 1:
                self.find(reads, "two orders in one step", _change(found[0], order), rank=rank)
        self.proof.orders.extend(order for order in found if order not in self.proof.orders)
        if found:
            return found[0]
        return self._former.order if self._former is not None and not reads.counted else None

    def _look_at_change(self, step: _Step) -> None:
        former = self._former.effective if self._former is not None else None
        now = step.effective
        if former is None or now is None or former == now:
            return
        self.find(step.reads, "order changed", _change(former, now))
        if former.sources != now.sources:
            self._end_counts()  # counts of the former sources do not apply to the new ones

    def _follow(self, reads: StepReads, step: _Step | None, order: OrderSpec | None) -> None:
        """Compare the samples that each share read with the order, and count them."""
        if not _can_recompute(order):
            self._unknown("no record contains the order" if order is None else "the loader has an order of its own")
            return
        shares = step.shares if step is not None else self._former.shares if self._former is not None else 0
        whole = self._addresses(reads, order, shares) if shares else None
        if whole is None:
            return
        known: list[Address] = []
        unknown: list[Address] = []
        for share in range(shares):
            record = step.records.get(share) if step is not None else None
            addresses = _part(order, whole, BatchRecord(share, shares))
            if record is not None and record.samples == samples_digest(addresses):
                known += addresses
                continue
            unknown += addresses
            if record is not None and not record.samples:
                self._unknown("records do not name the samples")
            elif record is not None:
                self.find(reads, "not the order's samples", "those that were read are others", share=share)
        if self._counts is None:
            self._counts = SampleCounts(order, shares, whole=reads.step == 0)
        self._counts.go_on(order, shares)
        for cause, text, count in self._counts.add(known, unknown):
            self._complain(reads, cause, text, count)
        if step is not None:
            step.followed = not unknown

    def _addresses(self, reads: StepReads, order: OrderSpec, shares: int) -> list[Address] | None:
        """The global batch of a step; None, with a finding, if the order is impossible."""
        try:
            return order_of(order, shares).addresses(reads.step)
        except UsageError as error:
            self.find(reads, "impossible order", str(error))
            return None

    def _end_counts(self) -> None:
        counts, self._counts = self._counts, None
        if counts is None or self._former is None:
            return
        for cause, text, count in counts.end():
            self._complain(self._former.reads, cause, text, count)
        proof = self.proof
        proof.epochs += counts.epochs
        proof.read += counts.read
        proof.padding += counts.padding
        proof.dropped += counts.dropped

    # --- findings -------------------------------------------------------------------------------------------------

    def _complain(self, reads: StepReads, cause: str, text: str, count: int) -> None:
        if cause == SampleCounts.REPEATED:
            self.proof.repeated += count
        else:
            self.proof.skipped += count
        self.find(reads, cause, text)

    def find(
        self, reads: StepReads, cause: str, text: str, *, share: int | None = None, rank: Rank | None = None
    ) -> None:
        """Add a finding about a step."""
        place = reads.place
        self.proof.find(Finding(cause, text, reads.step, self._history.name(place), share, rank, place.generation))

    def _doubt(self, reads: StepReads, reason: str) -> None:
        self._doubts.setdefault(reason, []).append(reads.step)

    def _unknown(self, why: str) -> None:
        self.proof.samples_known = False
        self.proof.reasons.extend([why] if why not in self.proof.reasons else [])

    def _where(self, place: RunGeneration) -> str:
        job = f" of {self._history.name(place)}" if len(self.proof.runs) > 1 else ""
        return f"generation {place.generation}{job}"


def _compare(one: _Prover, other: _Prover) -> None:
    """Add the differences between the reads of `one` and `other` to the proof of `one`."""
    proof, theirs = one.proof, other.proof
    proof.against = theirs.runs
    name = " then ".join(theirs.runs)
    if theirs.verdict is not Verdict.PROVEN:
        proof.reasons.append(f"{name}, with which it is compared, is itself {theirs.verdict}")
    for mine, others, where in ((one, other, "these runs"), (other, one, name)):
        alone = sorted(mine.determined.keys() - others.determined.keys())
        if alone:
            proof.reasons.append(f"{spans(alone)}: only in {where}")
    blind = []
    for number in sorted(one.determined.keys() & other.determined.keys()):
        before = sum(proof.causes.values())
        if not _compare_step(one, one.determined[number], other.determined[number], name):
            blind.append(number)
        elif sum(proof.causes.values()) == before:
            proof.compared += 1
    if blind:
        proof.reasons.append(f"{spans(blind)}: what was read cannot be compared with {name}")


def _compare_step(one: _Prover, mine: _Step, theirs: _Step, name: str) -> bool:
    """Compare one step of two chains; False if the records do not suffice."""
    followed = mine.followed and theirs.followed
    if followed and mine.effective != theirs.effective:
        here, there = (set(_all(step)) for step in (mine, theirs))
        if here != there:
            text = f"{len(here - there)} samples are not in {name}, {len(there - here)} only there"
            one.find(mine.reads, "other samples than compared", text)
    if mine.shares != theirs.shares:
        return followed
    both = sorted(mine.records.keys() & theirs.records.keys())
    for share in both:
        if difference := _difference(mine.records[share], theirs.records[share]):
            one.find(mine.reads, "other content than compared", f"{name} has read other {difference}", share=share)
    return followed or (len(both) == mine.shares and all(mine.records[share].digest for share in both))


def _can_recompute(order: OrderSpec | None) -> TypeGuard[OrderSpec]:
    return order is not None and order.kind in (ORDERED, MIXTURE)


def _part(order: OrderSpec, whole: Sequence[Address], data: BatchRecord) -> list[Address]:
    """The addresses in a global batch that one share reads."""
    return dealt(whole, data.share, data.shares, constant=order.global_batch > 0)


def _all(step: _Step) -> list[Address]:
    """The global batch of a step whose order is known."""
    return order_of(step.order, step.shares).addresses(step.reads.step) if step.order is not None else []


def _same_shares(one: StepCommitted, other: StepCommitted) -> list[tuple[BatchRecord, BatchRecord]]:
    """Pairs of records for each share that was read in both commits."""
    theirs = {(data.share, data.shares): data for data in other.reads}
    return [(data, theirs[key]) for data in one.reads if (key := (data.share, data.shares)) in theirs]


def _difference(one: BatchRecord, other: BatchRecord) -> str:
    """The difference of two records of the same share; empty if there is none, or if it is unknown."""
    if one.samples and other.samples and one.samples != other.samples:
        return "samples"
    if one.digest and other.digest and one.digest != other.digest:
        return "content"
    return ""


def _change(before: OrderSpec, after: OrderSpec) -> str:
    """Describe the change between two orders."""
    fields = [name for name in OrderSpec.__struct_fields__ if getattr(before, name) != getattr(after, name)]
    said = [f"{name} {_short(getattr(before, name))} became {_short(getattr(after, name))}" for name in fields]
    return "; ".join(said)


def _short(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(
            f"{each.name or 'data set'} of {each.size}" if isinstance(each, SourceSpec) else str(each) for each in value
        )
    return str(value)
