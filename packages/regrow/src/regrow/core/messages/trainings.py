"""Trainings of a script that has several. See decision 0105."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from regrow.core.ids import StepNo


class FinishedTraining(msgspec.Struct, frozen=True):
    """A training that all ranks have finished. `result`: encoded by `hydration.codec`; `until`: the job's next step."""

    name: str
    result: bytes
    until: StepNo


@dataclass
class TrainingPlace:
    """Place of a training among those of its script. `name`: empty for the only one; `alone`: why it must be alone."""

    finished: Sequence[FinishedTraining] = ()
    name: str = ""
    alone: str = ""

    @property
    def began(self) -> StepNo:
        """The step of the job that is step 0 of this training."""
        return self.finished[-1].until if self.finished else StepNo(0)
