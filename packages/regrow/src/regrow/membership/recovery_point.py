"""Start point of the next generation, and the source of each rank's state. Pure: facts in, a decision out.

A *holding* is the part of the state that a rank has; ranks with the same holding are replicas. All ranks must start at
the same step, the first of these that is possible:

1. the newest step that the survivors have, or can reach by applying an update that was voted for; ranks that lack it
   get it from a replica, or from a copy of exactly that step;
2. the newest step with a copy of every holding: all ranks go back to it;
3. none: some holding has no living copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from regrow.core.ids import NO_STATE, NodeId, Rank, StepNo
from regrow.core.messages import facts
from regrow.core.messages.copies import KeptCopy as KeptCopy
from regrow.membership.roster import WorkerRecord


@dataclass(frozen=True)
class SurvivorState:
    """State of one rank. `ready`: it can make the update of `state_at` by itself. `node`: the node that it runs on.

    `verified`: step of its own copy of a state on which all replicas agreed.
    """

    rank: Rank
    holding: str
    state_at: StepNo
    node: NodeId
    ready: bool = False
    verified: StepNo = NO_STATE


def survivor_state(worker: WorkerRecord) -> SurvivorState:
    """The state of a worker, with its step."""
    rank = worker.rank if worker.rank is not None else Rank(-1)
    return SurvivorState(rank, worker.holding, worker.state_at, worker.node, worker.ready, worker.verified)


@dataclass(frozen=True)
class CopyHolder:
    """A copy of the state of `rank`, and the node whose agent holds it."""

    node: NodeId
    rank: Rank
    step: StepNo


@dataclass(frozen=True)
class Start:
    """Decision to start with `state@step`. `holders` have it or reach it by themselves; `restored` read a copy.

    `rewind`: holders at another step go back to their own verified copy.
    """

    step: StepNo
    holders: frozenset[Rank]
    restored: Mapping[Rank, CopyHolder] = field(default_factory=dict)
    rewind: bool = False


@dataclass(frozen=True)
class Uncovered:
    """Decision that no step is complete. `ranks`: ranks whose state neither a living worker nor a copy has."""

    step: StepNo
    ranks: tuple[Rank, ...]


Copies = Mapping[NodeId, Sequence[KeptCopy]]


def newest(survivors: Iterable[SurvivorState]) -> tuple[StepNo, frozenset[Rank]]:
    """The newest step that survivors have or can reach, and those survivors. `NO_STATE` if none has any state.

    With several holdings, a rank that lacks the state after a step may find no rank to receive it from; therefore all
    ranks vote before such a step. If one survivor has made the update, the others are ready for it. If all are ready,
    the update is made, because a rank that has died may have made it.
    """
    alive = [each for each in survivors if each.state_at != NO_STATE]
    if not alive:
        return NO_STATE, frozenset()
    step = max(each.state_at for each in alive)
    if all(each.ready for each in alive if each.state_at == step):
        step = StepNo(step + 1)
    reached = frozenset(
        each.rank for each in alive if each.state_at == step or (each.ready and each.state_at == step - 1)
    )
    return step, reached


def decide(survivors: Sequence[SurvivorState], copies: Copies) -> Start | Uncovered:
    """Choose the step to start at, and the source of each rank's state."""
    step, reached = newest(survivors)
    if step == NO_STATE:
        return _go_back(survivors, copies, step)
    living = {each.holding for each in survivors if each.rank in reached}
    lacking = [each for each in survivors if each.holding not in living]
    sources = {each.rank: _source(each, copies, step) for each in lacking}
    if all(sources.values()):
        return Start(step, reached, {rank: source for rank, source in sources.items() if source is not None})
    return _go_back(survivors, copies, step)


def go_back(survivors: Sequence[SurvivorState], doubted: StepNo) -> Start | None:
    """The newest state on which replicas agreed and of which every holding is left; None: there is none.

    Args:
        doubted: after the last agreement and up to this step, a state is trusted only as a verified copy.
    """
    holdings = {each.holding for each in survivors}
    for step in sorted({each.verified for each in survivors if each.verified != NO_STATE}, reverse=True):
        # A rank at an earlier step got there by an earlier attempt to go back.
        have = [each for each in survivors if each.verified == step or each.state_at == step < doubted]
        if {each.holding for each in have} == holdings:
            return Start(step, frozenset(each.rank for each in have), rewind=True)
    return None


def needs_copies(survivors: Sequence[SurvivorState]) -> bool:
    """True if the living workers do not have the whole state, so that copies are needed."""
    step, reached = newest(survivors)
    living = {each.holding for each in survivors if each.rank in reached}
    return step == NO_STATE or any(each.holding not in living for each in survivors)


def _go_back(survivors: Sequence[SurvivorState], copies: Copies, step: StepNo) -> Start | Uncovered:
    steps = sorted({copy.step for held in copies.values() for copy in held}, reverse=True)
    for candidate in steps:
        if step != NO_STATE and candidate > step:
            continue
        stay = frozenset(each.rank for each in survivors if each.state_at == candidate)
        sources = {each.rank: _source(each, copies, candidate) for each in survivors if each.rank not in stay}
        if all(sources.values()):
            return Start(candidate, stay, {rank: source for rank, source in sources.items() if source is not None})
    living = {each.holding for each in survivors if each.state_at != NO_STATE}
    return Uncovered(step, tuple(each.rank for each in survivors if each.holding not in living))


def _source(survivor: SurvivorState, copies: Copies, step: StepNo) -> CopyHolder | None:
    """The best copy: of this rank rather than of a replica, and on the rank's own node rather than on another."""
    found = [
        (copy.rank != survivor.rank, node != survivor.node, node, copy.rank)
        for node, held in copies.items()
        for copy in held
        if copy.step == step and copy.holding == survivor.holding
    ]
    if not found:
        return None
    _, _, node, rank = min(found)
    return CopyHolder(node, rank, step)


def enter_ready(worker: WorkerRecord, fact: facts.WorkerReady) -> None:
    """Enter the report of a worker that is ready for its first step."""
    worker.has_session, worker.ready = True, False
    worker.state_at, worker.endpoint, worker.layout = fact.state_at, fact.endpoint, fact.layout
    worker.holding, worker.sharded, worker.whole_body = fact.holding, fact.sharded, fact.whole_body
    worker.microbatches, worker.fixed, worker.between = fact.microbatches, fact.fixed, fact.between
    worker.early, worker.parts, worker.unprovable = fact.early, fact.parts, fact.unprovable
    worker.training = fact.training


def enter_halted(worker: WorkerRecord, fact: facts.WorkerHalted) -> None:
    """Enter the report of a worker that has left its groups."""
    worker.state_at, worker.ready, worker.restart_index = fact.state_at, fact.ready, fact.restart_index
    worker.verified = fact.verified
    worker.whole_body = worker.whole_body or fact.whole_body
    worker.torn_at = fact.step if fact.state_at == NO_STATE and fact.step != NO_STATE else None
