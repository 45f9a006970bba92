"""A worker's activity, as its progress page shows it."""

from enum import IntEnum


class Phase(IntEnum):
    """A worker's activity, as far as its agent needs to know."""

    BUILDING = 0
    OUTSIDE = 1
    DATA = 2
    COMPUTING = 3
    UPDATING = 4
    RECOVERING = 5
    WAITING = 6
    REGION = 7
    """In a restartable function between two steps."""


IN_BODY = (Phase.COMPUTING, Phase.UPDATING)
"""In a step's body, or in its update."""
