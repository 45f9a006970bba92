"""Kills of a training of four ranks over 34 steps, the same for the processor's groups and for a device's."""

from tests.process.training import Fault

WORLD, STEPS = 4, 34
STAGES = ("data", "forward", "backward", "reduce", "vote", "update", "commit")
EVERY_STAGE_AND_RANK = [Fault((at * 3) % WORLD, 2 + 4 * at, stage) for at, stage in enumerate(STAGES)]
"""All stages, and all ranks: some twice in a row."""
AGAIN = [
    Fault(1, 4, "backward"),
    Fault(1, 5, "reduce"),
    Fault(0, 12, "reduce"),
    Fault(0, 12, "form"),
    Fault(3, 20, "forward"),
    Fault(3, 20, "hydrate"),
    Fault(0, 28, "update"),
    Fault(3, 28, "form"),  # replicas of each other in none of the modes
]
"""Twice in a row, and during a recovery."""
ROLL = [
    Fault(1, 6, "vote", "pause"),
    Fault(3, 6, "commit"),
    Fault(0, 16, "vote", "pause"),
    Fault(0, 16, "roll"),
    Fault(3, 16, "commit"),
]
"""One rank is held up with the vote's result in hand while another commits and dies: the step has happened."""
