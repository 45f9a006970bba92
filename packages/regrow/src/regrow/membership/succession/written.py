"""A coordinator's knowledge, as encoded for its successors. Times are of its own clock. Pure."""

from collections.abc import Callable, Iterable

import msgspec

from regrow.core.ids import NO_STATE, Instant, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.tables import GenerationTable
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.messages.vocabulary import FaultSpec, WorldChange
from regrow.membership.elastic.moving import RankMove
from regrow.membership.fault_plan import FaultPlan, ScriptErrors
from regrow.membership.incident import Incident, Incidents
from regrow.membership.job import KeptState
from regrow.membership.recovery.doubts import Doubt
from regrow.membership.scaling import Change
from regrow.membership.succession.memory import GivenBack, JobMemory


class WrittenMemory(msgspec.Struct, frozen=True):
    """Fields of `JobMemory` as plain values. `nodes`: the nodes whose agents are connected.

    The script's errors are not included, so that a recurring error counts as new.
    """

    pending: list[FaultSpec]
    struck: list[str]
    incidents: int
    pauses: dict[str, Seconds]
    incident: Incident | None
    table: GenerationTable | None
    step: StepNo
    restarts: int
    resumes: bool
    wanted: int
    wanted_by: str
    change: tuple[str, int, str, Instant | None] | None
    announced: WorldChange | None = msgspec.field(name="telling")
    spent: list[Instant]
    doubt: tuple[StepNo, list[Rank]] | None
    quarantined: dict[NodeId, str]
    given_back: list[tuple[NodeId, Instant, str, str]]
    gone: list[WorkerId]
    named: dict[NodeId, int]
    checkpoints: int
    first_build: Seconds | None
    nodes: list[NodeId]
    changes: int = 0
    refuted: str = ""
    alone: bool = False
    own: dict[str, list[str]] = {}
    unproven: str = ""
    newcomers: bool = False
    kept: tuple[StepNo, bool] | None = None
    finished: list[FinishedTraining] = []
    stopping: str = ""
    stop_by: Instant | None = None
    move: RankMove | None = None


class MemoryWriter:
    """Encodes the memory when it has changed.

    Args:
        look: returns the memory and the nodes.
    """

    def __init__(self, look: Callable[[], tuple[JobMemory, Iterable[NodeId]]]) -> None:
        self._look = look
        self._known = b""
        self._encoded = b""

    def write(self) -> bytes:
        """The encoded memory; unchanged if only the step has changed, which agents know themselves."""
        written = _written(*self._look())
        known = msgspec.msgpack.encode(msgspec.structs.replace(written, step=NO_STATE))
        if known != self._known:
            self._known, self._encoded = known, msgspec.msgpack.encode(written)
        return self._encoded


def _written(memory: JobMemory, nodes: Iterable[NodeId]) -> WrittenMemory:
    change, doubt = memory.change, memory.doubt
    return WrittenMemory(
        pending=memory.plan.pending,
        struck=memory.plan.struck,
        incidents=memory.incidents.count,
        changes=memory.incidents.changes,
        pauses=memory.incidents.pauses,
        incident=memory.incidents.open,
        table=memory.table,
        step=memory.step,
        restarts=memory.restarts,
        resumes=memory.resumes,
        wanted=memory.wanted,
        wanted_by=memory.wanted_by,
        change=None if change is None else (change.kind, change.before, change.reason, change.by),
        announced=memory.announced,
        spent=memory.spent,
        doubt=None if doubt is None else (doubt.step, sorted(doubt.wrong)),
        quarantined=memory.quarantined,
        given_back=[(each.node, each.leave_by, each.reason, each.store) for each in memory.given_back],
        gone=sorted(memory.gone),
        named=memory.named,
        checkpoints=memory.checkpoints,
        first_build=memory.first_build,
        nodes=sorted(nodes),
        refuted=memory.replacements.refuted,
        alone=memory.replacements.alone,
        own={holding: sorted(names) for holding, names in memory.replacements.own.items()},
        unproven=memory.belief.doubt,
        newcomers=memory.belief.newcomers,
        kept=None if memory.kept is None else (memory.kept.step, memory.kept.as_committed),
        finished=memory.finished,
        stopping=memory.stopping,
        stop_by=memory.stop_by,
        move=memory.move,
    )


def read(encoded: bytes, ahead: Seconds) -> tuple[JobMemory, list[NodeId]]:
    """Decode the memory and the nodes. Raises `msgspec.MsgspecError`.

    `ahead`: lead of this process's clock over the writer's.
    """
    written = msgspec.msgpack.decode(encoded, type=WrittenMemory)
    incidents = Incidents()
    incidents.count, incidents.changes, incidents.pauses = written.incidents, written.changes, written.pauses
    incidents.open = None if written.incident is None else _moved(written.incident, ahead)
    if incidents.open is not None and incidents.open.planned:  # An older regrow wrote no number of changes.
        incidents.changes = max(incidents.changes, 1)
    change = None
    if written.change is not None:
        kind, before, reason, by = written.change
        change = Change(kind, before, reason, None if by is None else by + ahead)
    memory = JobMemory(
        plan=FaultPlan(written.pending, written.struck),
        incidents=incidents,
        errors=ScriptErrors(),
        table=written.table,
        step=written.step,
        restarts=written.restarts,
        resumes=written.resumes,
        wanted=written.wanted,
        wanted_by=written.wanted_by,
        change=change,
        announced=written.announced,
        spent=[at + ahead for at in written.spent],
        doubt=None if written.doubt is None else Doubt(written.doubt[0], frozenset(written.doubt[1])),
        quarantined=written.quarantined,
        given_back=[GivenBack(node, by + ahead, why, store) for node, by, why, store in written.given_back],
        gone=set(written.gone),
        named=written.named,
        checkpoints=written.checkpoints,
        first_build=written.first_build,
        kept=None if written.kept is None else KeptState(*written.kept),
        finished=written.finished,
        stopping=written.stopping,
        stop_by=None if written.stop_by is None else written.stop_by + ahead,
        move=written.move,
    )
    if written.refuted:
        memory.replacements.refutes(written.refuted, alone=written.alone)
    memory.replacements.own = {holding: frozenset(names) for holding, names in written.own.items()}
    if written.unproven:
        memory.belief.doubts(written.unproven)
    memory.belief.newcomers = written.newcomers
    return memory, written.nodes


def _moved(incident: Incident, ahead: Seconds) -> Incident:
    for name in ("opened_at", "fault_at", "halted_at", "ordered_at", "resumed_at"):
        if (at := getattr(incident, name)) is not None:
            setattr(incident, name, at + ahead)
    return incident
