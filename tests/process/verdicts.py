"""The law to which every job of the suites is held: with a fault and exit code 0 its numbers are the undisturbed run's.

Here is what a job's own records show, and how two runs are compared. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from regrow.core.ids import Generation, Instant, Rank, StepNo
from regrow.core.records import PLANNED, IncidentClosed, IncidentOpened, StepCommitted
from regrow.observe.ledger import Ledger

Numbers = dict[str, str]
"""`STEP/RANK/NAME` to what was committed, in all digits."""
_NEWCOMERS = ("standby", "fork", "node")
_SHOWN = 3
_LEAST_STEPS = 2
"""Steps before the first fault that show which numbers all ranks have alike."""


def succeeded(ledger: Ledger) -> bool:
    """True if the job ended with 0."""
    return ledger.ended is not None and ledger.ended.code == 0


def faulted(ledger: Ledger) -> bool:
    """True if it had a fault that was repaired."""
    return bool(ledger.injected) or any(each.kind not in PLANNED for each in _incidents(ledger))


def of_one_size(ledger: Ledger) -> bool:
    """True if it had as many ranks in all generations: else one rank's numbers are of another share."""
    return len({len(each.workers) for each in ledger.generations}) == 1


def numbers(ledger: Ledger) -> Numbers:
    """Every committed number."""
    return {
        f"{step}/{rank}/{name}": repr(value)
        for (step, rank), metrics in ledger.numbers.items()
        for name, value in metrics.items()
    }


def differences(mine: Numbers, undisturbed: Numbers) -> list[str]:
    """Numbers that another run has otherwise, and steps that it has and nobody committed here."""
    other = [at for at, value in mine.items() if at in undisturbed and undisturbed[at] != value]
    told = [f"step/rank/name {at}: {mine[at]}, undisturbed {undisturbed[at]}" for at in other[:_SHOWN]]
    if len(other) > _SHOWN:
        told.append(f"and {len(other) - _SHOWN} more of {len(mine)}")
    missing = sorted({_step(at) for at in undisturbed} - {_step(at) for at in mine})
    return told + ([f"nobody has committed the steps {missing}"] if missing else [])


def complaints(ledger: Ledger) -> list[str]:
    """Signs, without another run, that the numbers of a job with faults are not to be believed; empty: none."""
    return [*_left_open(ledger), *_in_doubt(ledger), *_committed_twice(ledger), *_not_alike(ledger)]


# --- parts of it -----------------------------------------------------------------------------------------------------


def _step(at: str) -> int:
    return int(at.partition("/")[0])


def _incidents(ledger: Ledger) -> list[IncidentOpened | IncidentClosed]:
    return [*ledger.open_incidents.values(), *ledger.incidents]


def _left_open(ledger: Ledger) -> Iterator[str]:
    for incident in ledger.open_incidents.values():
        yield f"incident {incident.incident} was never closed: {incident.cause}"


def _in_doubt(ledger: Ledger) -> Iterator[str]:
    """Replicas that differ, and newcomers that are refuted when they have trained."""
    newcomers = [each for each in ledger.incidents if each.rung in _NEWCOMERS]
    if ledger.divergences and newcomers:
        yield f"replicas differ and a rank was replaced: {ledger.divergences[0].text}"
    for refuted in ledger.refuted:
        if any(each.at < refuted.at for each in newcomers):
            yield f"a newcomer had trained before newcomers were refuted: {refuted.reason}"
    if ledger.corruptions and not ledger.incidents:
        yield f"the state of rank {ledger.corruptions[0].rank} was corrupted, and nothing was run again"


def _committed_twice(ledger: Ledger) -> Iterator[str]:
    """A step that a rank computes again has the numbers that it had, in a world of the same size."""
    sizes = {each.generation: len(each.workers) for each in ledger.generations}
    found = list(_recommitted(ledger.history, sizes, [each.at for each in ledger.corruptions]))
    yield from found[:_SHOWN]
    if len(found) > _SHOWN:
        yield f"and {len(found) - _SHOWN} more were committed twice with other numbers"


def _recommitted(
    history: Mapping[tuple[StepNo, Rank], Sequence[StepCommitted]],
    sizes: Mapping[Generation, int],
    corrupted: Sequence[Instant],
) -> Iterator[str]:
    for (step, rank), commits in sorted(history.items()):
        for first, again in pairwise([each for each in commits if not each.adopted]):
            # What was corrupt is otherwise, and rightly; whose state it was is told when its steps have run again.
            if any(first.at <= at for at in corrupted) or sizes.get(first.generation) != sizes.get(again.generation):
                continue
            for name in sorted(first.metrics.keys() & again.metrics.keys()):
                if repr(first.metrics[name]) != repr(again.metrics[name]):
                    values = f"{first.metrics[name]!r} and {again.metrics[name]!r}"
                    yield f"step {step} of rank {rank} was committed twice, with {name} {values}"


def _not_alike(ledger: Ledger) -> Iterator[str]:
    """Numbers that all ranks logged alike before the first fault, and not alike after it."""
    begun = [each.at for each in ledger.injected] + [each.opened_at for each in ledger.incidents]
    first = min(begun, default=0.0)
    whole = list(_whole_steps(ledger))
    before = [ranks for _, ranks in whole if all(each.at < first for each in ranks)]
    names = {name for ranks in before for each in ranks for name in each.metrics}
    alike = {name for name in names if len(before) >= _LEAST_STEPS and all(_same(ranks, name) for ranks in before)}
    for step, ranks in whole:
        for name in sorted(alike):
            if all(name in each.metrics for each in ranks) and not _same(ranks, name):
                values = ", ".join(repr(each.metrics[name]) for each in ranks)
                yield f"all ranks had the same {name} before the first fault, and at step {step} {values}"
                return


def _whole_steps(ledger: Ledger) -> Iterator[tuple[StepNo, list[StepCommitted]]]:
    """Steps that all ranks of one generation have committed, of more than one."""
    sizes = {each.generation: len(each.workers) for each in ledger.generations}
    for step, commits in sorted(ledger.commits.items()):
        ranks = [commits[rank] for rank in sorted(commits)]
        generations = {each.generation for each in ranks}
        if len(generations) == 1 and len(ranks) == sizes.get(generations.pop(), 0) > 1:
            yield step, ranks


def _same(ranks: Sequence[StepCommitted], name: str) -> bool:
    return len({repr(each.metrics.get(name)) for each in ranks}) == 1
