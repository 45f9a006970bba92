"""Trainings of a script that has several: those that all ranks have finished. See decision 0105."""

from collections.abc import Sequence

import msgspec

from regrow.core.ids import StepNo


class FinishedTraining(msgspec.Struct, frozen=True):
    """One of several trainings of a script, which all ranks have run to its end.

    `result`: as `hydration.codec` writes it; `until`: the step of the job with which the next training begins.
    """

    name: str
    result: bytes
    until: StepNo


def steps_before(finished: Sequence[FinishedTraining]) -> StepNo:
    """Steps of the job before the present training, which is its step 0."""
    return finished[-1].until if finished else StepNo(0)
