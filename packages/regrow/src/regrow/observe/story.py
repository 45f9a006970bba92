"""A job's records as sentences, for plain terminals and logs."""

from collections.abc import Iterable

from regrow.core.ids import Rank, Seconds
from regrow.core.records import (
    PLANNED,
    FaultInjected,
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    NodeJudged,
    NodeQuarantined,
    Noted,
    Record,
    ReplacementJudged,
    ReplicaCorrupted,
    ReplicasDiverged,
    WorkerGone,
)

_MOST_NAMES = 4


def describe(record: Record) -> str | None:
    """Describe a record in one line; None for records that only contribute to figures."""
    match record:
        case JobStarted():
            standbys = f", {count(record.standbys, 'standby')}" if record.standbys else ""
            nodes = count(record.nodes, "node")
            return f"job {record.job}: {count(record.world, 'rank')} on {nodes}{standbys}"
        case FaultInjected():
            place = f"rank {record.rank}" if record.rank is not None else f"worker {record.worker}"
            return f"fault {record.fault}: {record.how} strikes {place} in step {record.step}, stage {record.stage}"
        case IncidentOpened():
            what = "change" if record.kind in PLANNED else "incident"
            return f"{what} {record.incident} in step {record.step}: {first_line(record.cause)}"
        case IncidentClosed():
            return _mended(record)
        case GenerationFormed():
            of = count(len(record.workers), "rank")
            return f"generation {record.generation} is at step {record.step} with {of}"
        case ReplicaCorrupted():
            where = f", in {', '.join(record.tensors)}" if record.tensors else ""
            times = count(record.on_node, "corruption")
            return (
                f"the state of rank {record.rank} was wrong before step {record.step}{where}: worker {record.worker}, "
                f"{times} on {record.node} so far"
            )
        case ReplicasDiverged() | NodeQuarantined():
            return record.text
        case ReplacementJudged() if record.reason:
            return (
                f"rank {record.rank} is not replaceable by a newcomer, so from now on all start again instead: "
                f"{record.reason}"
            )
        case ReplacementJudged():
            return f"rank {record.rank} is replaceable: proven at step {record.step:,}"
        case NodeJudged():
            device = f" {record.device}" if record.device else ""
            return f"{record.node} is {record.severity}: {record.source}{device}: {record.evidence}"
        case WorkerGone() if record.code != 0:
            place = f" (rank {record.rank})" if record.rank is not None else ""
            return f"worker {record.worker}{place} is gone: {record.reason or f'exit code {record.code}'}"
        case Noted():
            return f"{record.worker}: {record.text}" if record.worker else record.text
        case JobEnded():
            return f"job ended with code {record.code}" + (f": {record.diagnosis}" if record.diagnosis else "")
        case _:
            return None


_RUNGS = {
    "retry": "the same step runs again",
    "standby": "a standby took its place",
    "fork": "a new worker took its place",
    "node": "another node took its place",
    "shrink": "the others go on without it",
    "all": "all workers started again with the state that was in memory",
    "restart": "all workers started again",
}


def mended(incident: IncidentClosed) -> str:
    """Describe the end of an incident in one sentence, for people who watch the job."""
    pause = f"pause {seconds(incident.total)}"
    if not incident.faults:
        if incident.before and incident.before != incident.after:
            way = "grown" if incident.after > incident.before else "shrunk"
            size = f"{way} from {incident.before} to {count(incident.after, 'replica')}"
            return f"{size} at step {incident.step} ({first_line(incident.cause)}); {pause}"
        in_vain = incident.kind in ("move", "grow", "shrink") and not incident.before
        done = "stood, and nothing has changed," if in_vain else "moved"
        return f"{done} at step {incident.step} ({first_line(incident.cause)}); {pause}"
    how = _RUNGS.get(incident.rung, f"mended by {incident.rung}")
    if incident.before > incident.after:
        how = f"{how}, {incident.before} to {count(incident.after, 'replica')}"
    lost = f"{count(incident.steps_lost, 'step')} lost" if incident.steps_lost else "no step lost"
    return f"{_causes(incident)}: {how}; step {incident.step} goes on after {seconds(incident.total)}, {lost}"


def not_kept(incidents: Iterable[IncidentClosed]) -> str:
    """A warning about variables in which ranks have lost their own values, with the remedy; empty: there are none."""
    lost = {(name, rank) for incident in incidents for name, which in incident.not_kept.items() for rank in which}
    names = [f"`{name}`" for name in sorted({name for name, _ in lost})]
    shown = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")
    if not lost:
        return ""
    return (
        f"{ranks(sorted({rank for _, rank in lost}))} may have another's values in {shown}, or begins "
        "them anew; where they count for the result, protect an object that has them, and where ranks differ in them, "
        'all_reduce them in each step, or give part=f"rank{session.rank}" and start with --buddy-every 1'
    )


def _causes(incident: IncidentClosed) -> str:
    """The cause of an incident, and the number of faults if others happened before the first was recovered."""
    cause = first_line(incident.cause)
    if incident.faults == 1:
        return cause
    which = f": {ranks(incident.ranks)}" if incident.ranks else ""
    return f"{cause} ({incident.faults} faults mended together{which})"


def stages(incident: IncidentClosed) -> str:
    """Duration of each stage of an incident."""
    names = ("detect", "abort", "regroup", "hydrate", "redo")
    return ", ".join(f"{name} {seconds(getattr(incident, name))}" for name in names)


def _mended(incident: IncidentClosed) -> str:
    number, lost = incident.incident, count(incident.steps_lost, "step")
    done = f"incident {number}: mended by {incident.rung}" if incident.faults else f"change {number}"
    most = f"; {longest_stage(incident)}" if incident.stages else ""
    return f"{done} in {seconds(incident.total)} ({stages(incident)}), {lost} lost{most}"


def longest_stage(incident: IncidentClosed) -> str:
    """The longest stage of the slowest replacement; the incident must have one."""
    stage = max(incident.stages, key=lambda each: incident.stages[each])
    return f"most of the replacement: {stage} {seconds(incident.stages[stage])}"


def first_line(text: str) -> str:
    """The first line of a text that may have several."""
    return text.partition("\n")[0]


def ranks(which: list[Rank]) -> str:
    """`rank 2`, `ranks 0, 3`, or `no rank`."""
    if not which:
        return "no rank"
    return f"{'rank' if len(which) == 1 else 'ranks'} {', '.join(map(str, sorted(which)))}"


def seconds(value: Seconds) -> str:
    """A duration in a suitable unit: `3 ms`, `0.41 s`, `12.5 s`, `4:07 min`."""
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 99.95:
        return f"{value:.1f} s"
    return f"{int(value) // 60}:{int(value) % 60:02d} min"


def tally(incidents: int, changes: int) -> str:
    """`2 incidents`, and planned changes of the world, if there were any."""
    return count(incidents, "incident") + (f", {count(changes, 'planned change')}" if changes else "")


def count(number: int, one: str, many: str = "") -> str:
    """A number with its noun: `1 rank`, `3 ranks`; `many`: the plural, by default with an `s`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
