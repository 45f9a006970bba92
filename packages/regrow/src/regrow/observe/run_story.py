"""Describes a whole run in plain words: events in order of time, the cost of each incident, and sums. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from regrow.core.ids import Instant, NodeId, Seconds, StepNo, WorkerId
from regrow.core.messages.state_ways import StateWay
from regrow.core.process.stage_times import STAGES
from regrow.core.records import (
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
    ScaleRefused,
    WorkerGone,
    WorkerSpawned,
    WorldChanged,
)
from regrow.observe.ledger import Ledger
from regrow.observe.story import count, describe, first_line, longest_stage, not_kept, ranks, seconds, stages

Place = Callable[[StepNo], str]
_INDENT = " " * 10
_BELIEVED = ("standby", "fork")
"""Recovery methods in which a newcomer takes a lost rank's place."""
_CHANGES = {
    "grow": "the world grows",
    "shrink": "the world shrinks",
    "preempt": "a node is given back",
    "move": "ranks move to another node",
    "fault": "nothing can fill a lost rank",
    "restart": "all start again",
    "start": "the world starts in another size",
}


def run_lines(records: Sequence[Record], *, live: bool) -> list[str]:
    """Describe a run in lines of text.

    Args:
        records: all records of the coordinator and the agents.
        live: True if the run is still going on.
    """
    ledger = Ledger(records)
    began = min((record.at for record in records), default=0.0)
    lines = []
    place = places(ledger.generations)
    for record in sorted(_described(records, ledger), key=lambda record: record.at):
        first, *more = _lines(record, place)
        lines += [f"{_clock(record.at - began)}  {first}", *(f"{_INDENT}{line}" for line in more)]
    if ledger.ended is None:
        lines.append(f"{_INDENT}it still goes on" if live else f"{_INDENT}its end was not written down")
    return [*lines, "", *_sums(ledger, records)]


def _described(records: Iterable[Record], ledger: Ledger) -> Iterator[Record]:
    """The records of interest; each incident appears once, by its end, or by its start if it has not ended."""
    for record in records:
        match record:
            case IncidentOpened() if record.incident in ledger.open_incidents:
                yield record
            case JobStarted() | JobEnded() | IncidentClosed() | FaultInjected() | WorldChanged() | ScaleRefused():
                yield record
            case ReplicaCorrupted() | ReplicasDiverged() | NodeJudged() | NodeQuarantined() | Noted():
                yield record
            case ReplacementJudged() if record.reason or ledger.proven[record.rank] is record:
                yield record
            case _:
                pass


def places(generations: Iterable[GenerationFormed]) -> Place:
    """A function that names a job's steps in text; with several trainings in the script, relative to each training."""
    began = sorted({(each.began, each.training) for each in generations if each.training})

    def place(step: StepNo) -> str:
        found = [each for each in began if each[0] <= step]
        return f"step {step - found[-1][0]} of {found[-1][1]}" if found else f"step {step}"

    return place


def _lines(record: Record, place: Place) -> list[str]:
    match record:
        case JobStarted():
            return [describe(record) or "", " ".join(record.command)]
        case IncidentClosed():
            spent = f"{seconds(record.total)} ({stages(record)})"
            lines = [f"{place(record.step)}: {first_line(record.cause)}", f"the other ranks pause for {spent}"]
            if record.faults:
                lost = f"{_steps(record.steps_lost)} lost{_received(record.hydrated_bytes)}"
                lines = [_fault(record, place), f"mended by {record.rung} in {spent}", lost]
            return [*lines, *_replacement(record), *_ways(record.ways), *filter(None, [not_kept([record])])]
        case IncidentOpened():
            return [_fault(record, place), "not mended"]
        case WorldChanged():
            what = _CHANGES.get(record.kind, record.kind)
            return [
                f"{place(record.step)}: {what}, {record.before} → {count(record.after, 'replica')}: {record.reason}"
            ]
        case ScaleRefused():
            were = "was" if record.replicas == 1 else "were"
            return [f"{count(record.replicas, 'replica')} {were} asked for and refused: {record.reason}"]
        case _:
            return (describe(record) or type(record).__name__).split("\n")


def _fault(record: IncidentOpened | IncidentClosed, place: Place) -> str:
    cause = first_line(record.cause)
    who = f"{ranks(record.ranks)}: " if record.ranks and not cause.startswith("rank") else ""
    return f"{place(record.step)}: {who}{cause}"


def _replacement(incident: IncidentClosed) -> Iterator[str]:
    """Stages of the slowest replacement, if there was one."""
    parts = [f"{stage} {seconds(incident.stages[stage])}" for stage in STAGES if stage in incident.stages]
    if parts:
        yield f"{longest_stage(incident)} (worker {incident.slowest}: {', '.join(parts)})"


def _steps(number: int) -> str:
    return count(number, "committed step") if number else "no committed step"


def _received(nbytes: int) -> str:
    if not nbytes:
        return ""
    size = f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:,.1f} kB"
    return f", {size} of state received"


def _ways(ways: Sequence[StateWay]) -> Iterator[str]:
    """Addresses over which state was received, and failures."""
    for way in ways:
        rate = f" ({count(way.flows, 'flow')}, {way.gbps:.2f} GB/s)" if way.flows else ""
        failed = f", not all: {way.failure}" if way.failure else ""
        failed += f", not by {way.fallback}" if way.fallback else ""
        within = "memory of the node" if way.by == "memory" else "sockets of the node"
        by = " by NIXL" if way.by == "nixl" else ""
        yield f"state over {way.address or within}{by}{rate}{failed}"


def _sums(ledger: Ledger, records: Iterable[Record]) -> list[str]:
    faults = [incident for incident in ledger.incidents if incident.faults]
    changes = [incident for incident in ledger.incidents if not incident.faults]
    lines = [
        f"{count(len(ledger.commits), 'step')} committed in {seconds(ledger.wall)}, "
        f"goodput {ledger.goodput:.1%} from the first step on"
    ]
    if faults:
        rungs = Counter(incident.rung for incident in faults)
        lines.append(
            f"{count(len(faults), 'incident')} cost {_cost(faults)}: "
            f"{', '.join(f'{number} by {rung}' for rung, number in rungs.most_common())}; "
            f"{_steps(ledger.steps_lost)} lost, {ledger.steps_redone} computed again"
        )
        if not (ledger.proven or ledger.refuted) and any(incident.rung in _BELIEVED for incident in faults):
            lines.append("no replacement was compared with its rank before it took over")
    elif not ledger.open_incidents:
        lines.append("no incident")
    if changes:
        lines.append(f"{count(len(changes), 'planned change')} cost {_cost(changes)}")
    lost = lost_workers(records)
    if lost and ledger.started is not None and ledger.started.nodes > 1:
        lines.append("lost workers by node: " + ", ".join(f"{node} {number}" for node, number in lost.most_common()))
    return lines


def _cost(incidents: list[IncidentClosed]) -> str:
    total = sum(incident.total for incident in incidents)
    if len(incidents) == 1:
        return seconds(total)
    return f"{seconds(total)} in all, {seconds(median(incident.total for incident in incidents))} each (median)"


def lost_workers(records: Iterable[Record]) -> Counter[NodeId]:
    """Number of workers of each node that failed while they were ranks."""
    places: dict[WorkerId, NodeId] = {}
    lost: Counter[NodeId] = Counter()
    for record in records:
        if isinstance(record, WorkerSpawned):
            places[record.worker] = record.node
        elif isinstance(record, WorkerGone) and record.code and record.rank is not None and record.worker in places:
            lost[places[record.worker]] += 1
    return lost


def _clock(since: Instant | Seconds) -> str:
    whole = int(since)
    return f"+{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
