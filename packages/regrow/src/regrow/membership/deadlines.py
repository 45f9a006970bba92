"""Deadlines of each state: the worker stages that it waits for, its time limit, and the workers that are late."""

from collections.abc import Iterator, Sequence

from regrow.core.ids import Instant, Seconds
from regrow.core.job import JobSpec
from regrow.membership.roster import BUILDING, Roster, Stage, WorkerRecord
from regrow.membership.states import (
    Building,
    Closing,
    Forming,
    Mending,
    Releasing,
    Restarting,
    Retaining,
    Saving,
    State,
    Switching,
    Training,
    Waiting,
)

LAST_ACTS_S: Seconds = 86400.0
"""Longest wait for a rank that still exports or uploads when all others have ended."""
SWITCH_S: Seconds = 300.0
"""Longest wait for the agreed step at which the world changes, if the change has no deadline of its own."""
ARRIVE_S: Seconds = 10.0
"""Time for the agents to find a new coordinator, and again for each of them to answer it.

An agent that is later counts as lost, and then as a node that has come back.
"""
KEEP_S: Seconds = 120.0
"""Time for survivors to copy their state into the memory of their own machines."""
AGAIN = 2
"""Factor on the build deadline (or on the time of the first build, if longer) when all workers are started again."""


def earliest(state: State, roster: Roster, spec: JobSpec) -> Instant | None:
    """The first instant at which a worker would be late; None: the state waits for nothing."""
    return min(_waits(state, roster, spec), default=None)


def late(state: State, roster: Roster, spec: JobSpec, now: Instant) -> list[WorkerRecord]:
    """Workers that have missed the deadline of the present state."""
    match state:
        case Building():
            ready = roster.oldest(Stage.READY)
            if ready and now >= ready.since + spec.build_deadline:
                return list(roster.placed(*BUILDING))
            ordered = [w for w in roster.placed(Stage.ORDERED) if now >= w.since + spec.build_deadline]
            return ordered or [w for w in roster.placed(*_again(roster)) if now >= w.since + _again_by(roster, spec)]
        case Forming(deadline=at):
            return list(roster.placed(Stage.JOINING)) if now >= at else []
        case Training():
            return [
                standby
                for standby in roster.standbys()
                if standby.stage in (Stage.ORDERED, Stage.STARTING) and now >= standby.since + spec.build_deadline
            ]
        case Releasing():
            gone = roster.newest(Stage.GONE)
            return list(roster.placed(Stage.RELEASED)) if gone is not None and now >= gone.since + LAST_ACTS_S else []
        case Mending():
            return [w for w in roster.placed(*BUILDING) if now >= w.since + spec.build_deadline]
        case _:
            return []


def _waits(state: State, roster: Roster, spec: JobSpec) -> Iterator[Instant]:
    match state:
        case Building(verdict_at=at):
            if at is not None:
                yield at
            if roster.count(*BUILDING):
                yield from _built_by(roster, spec, Stage.ORDERED, Stage.READY)
                yield from (each.since + _again_by(roster, spec) for each in _oldest(roster, _again(roster)))
        case Forming(deadline=at) | Switching(deadline=at) | Waiting(deadline=at) | Retaining(deadline=at):
            yield at
        case Closing(again_at=at) | Releasing(again_at=at):
            yield at
        case Saving(halt_by=at):
            if roster.count(Stage.HALTING):
                yield at
        case Restarting(deadline=at):
            if roster.present():
                yield at
        case Training(deadline=at):
            if at is not None:
                yield at
            yield from _built_by(roster, spec, Stage.ORDERED, Stage.STARTING, placed=False)
        case Mending(halt_deadline=at):
            if roster.count(Stage.HALTING) or roster.away:
                yield at
            yield from list(roster.unproven.values())[:1]
            yield from _built_by(roster, spec, *BUILDING)
        case _:
            pass


def _again(roster: Roster) -> tuple[Stage, ...]:
    """Stages that can be late although no worker is ready: none at first, as a first build may take any time."""
    return (Stage.STARTING, Stage.IDLE) if roster.first_build is not None else ()


def _again_by(roster: Roster, spec: JobSpec) -> Seconds:
    """Longest build of a restarted script, which also reads a checkpoint, perhaps from a slow disk."""
    return AGAIN * max(spec.build_deadline, roster.first_build or 0.0)


def _oldest(roster: Roster, stages: Sequence[Stage], *, placed: bool = True) -> Iterator[WorkerRecord]:
    for stage in stages:
        oldest = roster.oldest(stage, placed=placed)
        if oldest is not None:
            yield oldest


def _built_by(roster: Roster, spec: JobSpec, *stages: Stage, placed: bool = True) -> Iterator[Instant]:
    return (each.since + spec.build_deadline for each in _oldest(roster, stages, placed=placed))
