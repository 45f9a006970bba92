"""Messages of workers about one another's state: silent corruption, seen when replicas compare digests."""

import msgspec

from regrow.core.ids import Generation, Rank, StepNo, WorkerId


class ReplicasDiffer(msgspec.Struct, frozen=True, tag=True):
    """At the boundary before `step` ranks that should have the same state have not. Nobody runs the step.

    `ranks`: whose state is wrong. `undecided`: of whom one is wrong, and only another run of the steps will tell who.
    `tensors`: where they differ, the first few names.
    """

    worker: WorkerId
    generation: Generation
    step: StepNo
    ranks: list[Rank]
    undecided: list[Rank] = []
    tensors: list[str] = []


class CorruptionNamed(msgspec.Struct, frozen=True, tag=True):
    """The steps before `step` were run again, and now all agree: the state of `ranks` had been wrong the first time."""

    worker: WorkerId
    generation: Generation
    step: StepNo
    ranks: list[Rank]


class OwnValues(msgspec.Struct, frozen=True, array_like=True):
    """Plain variables of which ranks have different values, as one rank began `step`. `values`: by place, encoded.

    `sure`: False: as it came to the update of the step before, behind which its script may have changed them.
    """

    step: StepNo
    values: bytes
    sure: bool = True


class StateSampled(msgspec.Struct, frozen=True, tag=True):
    """Digests of parts of a worker's state before `step`, by name; the same on all that hold the same.

    `whole`: of all of it, or of the part whose turn it is after a recovery; else of a sample that the step chooses.
    `made`: of what updates have made since the last look at it (the state of optimizers); then `tensors` are a sample
    of all that was there before. None: that is not asked. `variables`: of the script's own plain variables, of which a
    rank may have some of its own.
    """

    worker: WorkerId
    generation: Generation
    step: StepNo
    tensors: dict[str, int]
    python: dict[str, int]
    whole: bool = False
    made: dict[str, int] | None = None
    variables: dict[str, int] = {}


ReplicaFact = ReplicasDiffer | CorruptionNamed
