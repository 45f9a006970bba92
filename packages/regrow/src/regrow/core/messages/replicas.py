"""Messages about silent corruption of workers' state, which is found when replicas compare digests."""

import msgspec

from regrow.core.ids import Generation, Rank, StepNo, WorkerId


class ReplicasDiffer(msgspec.Struct, frozen=True, tag=True):
    """At the boundary before `step`, ranks that should have the same state differ. No rank runs the step.

    `ranks`: those whose state is wrong. `undecided`: ranks of which one is wrong; only a second run of the steps will
    show which. `tensors`: the first few names of tensors that differ.
    """

    worker: WorkerId
    generation: Generation
    step: StepNo
    ranks: list[Rank]
    undecided: list[Rank] = []
    tensors: list[str] = []


class CorruptionNamed(msgspec.Struct, frozen=True, tag=True):
    """The steps before `step` were run again, and now all agree: the first time, the state of `ranks` was wrong."""

    worker: WorkerId
    generation: Generation
    step: StepNo
    ranks: list[Rank]


class OwnValues(msgspec.Struct, frozen=True, array_like=True):
    """One rank's own values of the plain variables that differ between ranks, as it began `step`.

    `values`: by place, encoded. `sure`: False: taken at the update before; the script may have changed them since.
    """

    step: StepNo
    values: bytes
    sure: bool = True


class StateSampled(msgspec.Struct, frozen=True, tag=True):
    """Digests of parts of a worker's state before `step`, by name; equal on all workers with the same state.

    `whole`: digest of all state, or, after a recovery, of the part whose turn it is; else of a sample that the step
    chooses. `made`: of what updates have created since the last sample (the state of optimizers); then `tensors` are a
    sample of the earlier state. None: not requested. `variables`: of the script's own plain variables, some of which
    may differ between ranks.
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
