"""Evidence about newcomers: whether a worker that takes a lost rank computes what that rank computed."""

import msgspec

from regrow.core.ids import Generation, Rank, StepNo, WorkerId


class ReplacementProven(msgspec.Struct, frozen=True, tag=True):
    """A newcomer has computed, bit for bit, what `rank` computes at `step`."""

    worker: WorkerId
    generation: Generation
    rank: Rank
    step: StepNo


class ReplacementRefuted(msgspec.Struct, frozen=True, tag=True):
    """A newcomer for `rank` would not be equal to it: no worker is replaced in this job from now on.

    `step`: at which that was seen. `reason`: place and cause, for people. `alone`: ranks have state that no other
    has, so that a replica's copy is not theirs either.
    """

    worker: WorkerId
    generation: Generation
    rank: Rank
    step: StepNo
    reason: str
    alone: bool = False


ReplacementFact = ReplacementProven | ReplacementRefuted
