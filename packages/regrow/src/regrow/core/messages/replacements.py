"""Evidence that a newcomer computes exactly what the rank computes that it would replace.

ProveReplacement → ReplacementProven | ReplacementRefuted | ReplacementUnproven
"""

from collections.abc import Iterable

import msgspec

from regrow.core.ids import Generation, Rank, Seconds, StepNo, WorkerId


class ProveReplacement(msgspec.Struct, frozen=True, tag=True):
    """Run a step in the shadow of `rank`, and report whether all results are the same.

    `endpoint`: address at which the worker that holds the rank offers its state and results. `world`: present number of
    ranks; 0: as many as when this worker was started. `own`: plain variables whose values differ between ranks: a
    worker that takes the rank would not get them.
    """

    worker: WorkerId
    generation: Generation
    rank: Rank
    local_rank: int
    endpoint: str
    world: int = 0
    own: list[str] = []


class ReplacementProven(msgspec.Struct, frozen=True, tag=True):
    """A newcomer has computed, bit for bit, the same as `rank` at `step`.

    `held`: time by which the comparison delayed the rank. `seconds`: processor time of the newcomer on its node.
    """

    worker: WorkerId
    generation: Generation
    rank: Rank
    step: StepNo
    held: Seconds = 0.0
    seconds: Seconds = 0.0


class ReplacementRefuted(msgspec.Struct, frozen=True, tag=True):
    """A newcomer for `rank` computed something else: from now on no worker is replaced in this job.

    `step`: the step of the comparison. `reason`: place and cause, for people. `alone`: ranks have state that no other
    rank has, so that a copy of a replica's state would not be their state either.
    """

    worker: WorkerId
    generation: Generation
    rank: Rank
    step: StepNo
    reason: str
    alone: bool = False


class ReplacementUnproven(msgspec.Struct, frozen=True, tag=True):
    """A newcomer for `rank` could not be compared with it, so nothing is known for or against its equality.

    `reason`: for people. `permanent`: no comparison is possible in this job; else a later one may be possible.
    """

    worker: WorkerId
    generation: Generation
    rank: Rank
    reason: str
    permanent: bool = msgspec.field(default=False, name="lasting")


ReplacementFact = ReplacementProven | ReplacementRefuted | ReplacementUnproven


def replaceability(refuted: str, proven: Iterable[StepNo], unproven: str = "") -> str:
    """All that is known about newcomers, in one line for people.

    Args:
        refuted: why no newcomer equals the rank that it would replace; empty: no difference is known.
        proven: steps at which a newcomer was proven equal.
        unproven: why no newcomer could be compared.
    """
    if refuted:
        return f"not replaceable by newcomers: {refuted}"
    newest = max(proven, default=None)
    if newest is not None:
        return f"replaceable: last proven at step {newest:,}"
    return "replaceable: not proven" + (f", because {unproven}" if unproven else " yet")


def not_proven(reason: str, rank: Rank | None = None) -> str:
    """Message that a newcomer could not be compared with `rank`, which it would replace; None: with any rank."""
    what = "what the rank does that it would replace" if rank is None else f"what rank {rank} does"
    return f"whether a newcomer computes {what} was not proven: {reason}"
