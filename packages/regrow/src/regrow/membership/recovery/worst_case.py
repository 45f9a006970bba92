"""Longest duration of each rung of recovery, as a sum of the deadlines on the way. Pure.

A duration is the time from the detection of a fault to the next step that all have committed, or to the job's end.
Another fault on the way, such as a missed deadline, begins a new sum. `docs/protocol.md` has the table;
`sim/time_limits.py` checks every incident of every simulated schedule against it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from regrow.core.ids import Seconds
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import Warmth
from regrow.membership.checkpoints import SNAPSHOT_S, WRITE_S
from regrow.membership.deadlines import AGAIN, ARRIVE_S, KEEP_S, SWITCH_S
from regrow.membership.recovery.hangs import BETWEEN, Bounds
from regrow.membership.recovery.proof_of_life import PROOF_S
from regrow.membership.recovery.standstill import FRESH_S

ELECTED_S: Seconds = 20.0
"""Longest election of another coordinator if a majority of the voters is connected."""
_LOOKS = 2
"""Number of observations after which a worker is judged to hang."""
_TICKS = 3
"""Quarters of the halt's patience that pass from lateness to the verdict: two observations, then the verdict."""


class Wait(StrEnum):
    """Kind of wait, by its letter in the formulas."""

    HALT = "H"
    """Survivors report their steps; a worker that does not report in time hangs and is ended."""
    PROOF = "P"
    """A standby that is given a rank answers."""
    BUILD = "B"
    """A newcomer reaches the next stage of its start: its process exists, or its script is at its loop."""
    NODE = "N"
    """A lost node comes back."""
    FORM = "F"
    """All workers have joined the new generation, and newcomers have the state."""
    COMMIT = "C"
    """The first step is committed; a rank that stands still in it for this long hangs."""
    SWITCH = "S"
    """All ranks stop before the agreed step of a planned change, or are halted at once."""
    END = "E"
    """All workers end."""
    WRITE = "W"
    """The checkpoint that is being written is on disk or given up."""
    KEEP = "K"
    """Survivors leave their state in the memory of their nodes."""
    SAVE = "D"
    """The state of halted ranks is on disk or given up."""
    ELECTION = "V"
    """Another coordinator is elected; agents have connected and reported, and one has sent the newest table."""
    REPORTS = "R"
    """All agents have reported, and one has sent the newest table."""


Formula = tuple[tuple[tuple[int, Wait], ...], ...]
"""A sum of groups of simultaneous waits; the longest wait of each group counts."""


@dataclass(frozen=True)
class WorstCase:
    """Longest duration of a rung. `formula`: in letters of `Wait`. `total`: in seconds, with the job's settings."""

    formula: str
    total: Seconds


def hang_bound(spec: JobSpec, *, factor: float, patience: float = 1.0) -> Seconds:
    """Longest standstill of a worker that `hangs` allows: `factor` times the bound.

    Args:
        spec: the job's settings. Its longest step is taken as shorter than a tenth of the bound.
        factor: 1 for a blocked worker; `hangs.COMPUTING`, unless the user set the bound; or `hangs.BETWEEN`.
        patience: factor on the bound after ranks were replaced in vain.
    """
    bounds = Bounds.of(spec.hang_timeout, spec.hang_floor, 0.0, patience)
    return bounds.base * (1.0 if bounds.ordered and factor < BETWEEN else factor)


def unnoticed(spec: JobSpec, *, factor: float, patience: float = 1.0) -> Seconds:
    """Longest time until a standstill in a step is detected, including the others' wait for that rank."""
    others = hang_bound(spec, factor=1.0, patience=patience)
    return others + hang_bound(spec, factor=factor, patience=patience) + _LOOKS * FRESH_S


def waits(spec: JobSpec, *, factor: float, patience: float = 1.0) -> dict[Wait, Seconds]:
    """Each deadline, by the wait that it ends; arguments as for `hang_bound`."""
    bound = hang_bound(spec, factor=factor, patience=patience)
    ticks = _TICKS * spec.halt_patience / 4
    saves = spec.checkpoint_every > 0
    return {
        Wait.HALT: max(spec.halt_deadline, bound) + _LOOKS * FRESH_S + ticks,
        Wait.PROOF: PROOF_S,
        Wait.BUILD: spec.build_deadline,
        Wait.NODE: spec.node_deadline,
        Wait.FORM: spec.form_deadline,
        Wait.COMMIT: unnoticed(spec, factor=factor, patience=patience),
        Wait.SWITCH: SWITCH_S,
        Wait.END: spec.halt_deadline,
        Wait.WRITE: 2 * WRITE_S if saves else 0.0,
        Wait.KEEP: KEEP_S,
        Wait.SAVE: SNAPSHOT_S + 2 * WRITE_S if saves else 0.0,
        Wait.ELECTION: ELECTED_S + 3 * ARRIVE_S,
        Wait.REPORTS: spec.node_deadline + ARRIVE_S,
    }


def formulas(warmth: Warmth) -> Mapping[str, Formula]:
    """The sum for each rung. `warmth`: of the standbys; a standby that waits before its script has one more stage."""
    halt, proof = (1, Wait.HALT), (1, Wait.PROOF)
    newcomer = (3 if warmth is Warmth.IMPORTS else 2, Wait.BUILD)
    on: Formula = (((1, Wait.FORM),), ((1, Wait.COMMIT),))
    node, switch = (1, Wait.NODE), (1, Wait.SWITCH)
    again = ((1 + AGAIN, Wait.BUILD),)
    return {
        "retry": ((halt,), *on),
        "standby": ((halt, proof), *on),
        "fork": ((halt, newcomer), *on),
        "node": ((halt, node), (newcomer,), *on),
        "shrink": ((halt, newcomer), *on),
        "grow": ((switch,), (halt,), *on),
        "preempt": ((switch,), (halt, node), (newcomer,), *on),
        "all": (
            (halt, newcomer, node),
            ((1, Wait.KEEP), (1, Wait.SAVE)),
            ((1, Wait.END),),
            ((1, Wait.WRITE), node),
            again,
            *on,
        ),
        "restart": ((halt, newcomer, node), ((1, Wait.END),), ((1, Wait.WRITE), node), again, *on),
        "end": ((halt, newcomer, node), ((1, Wait.SAVE),)),
        "coordinator": (((1, Wait.ELECTION),), (halt, node), (newcomer,), *on),
        "defect": (((1, Wait.REPORTS),), (halt,), *on),
    }


def worst_cases(spec: JobSpec, *, factor: float, patience: float = 1.0) -> dict[str, WorstCase]:
    """Longest duration of each rung with these settings; arguments as for `hang_bound`."""
    each = waits(spec, factor=factor, patience=patience)
    return {
        rung: WorstCase(written(formula), sum(max(times * each[what] for times, what in stage) for stage in formula))
        for rung, formula in formulas(spec.warmth).items()
    }


def written(formula: Formula) -> str:
    """The formula as text."""
    stages = [[f"{times} {what}" if times > 1 else str(what) for times, what in stage] for stage in formula]
    return " + ".join(stage[0] if len(stage) == 1 else f"max({', '.join(stage)})" for stage in stages)
