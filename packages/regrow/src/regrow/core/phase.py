"""The activity of a worker, as its progress page shows it."""

from enum import IntEnum


class Phase(IntEnum):
    """Activity of a worker, in as much detail as its agent needs."""

    BUILDING = 0
    OUTSIDE = 1
    DATA = 2
    COMPUTING = 3
    UPDATING = 4
    RECOVERING = 5
    WAITING = 6
    REGION = 7
    """The worker is in a restartable function between two steps."""


IN_BODY = (Phase.COMPUTING, Phase.UPDATING)
"""Phases in a step's body or its update."""
