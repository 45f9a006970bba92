"""Types of names and numbers. An id is a type of its own, and its text is never parsed."""

from typing import NewType

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
WorkerId = NewType("WorkerId", str)
Rank = NewType("Rank", int)
Generation = NewType("Generation", int)
StepNo = NewType("StepNo", int)

Seconds = float
Instant = float
"""Seconds on the monotonic clock; comparable between processes of one machine."""

NO_STATE = StepNo(-1)
"""`state_at` of a worker without usable state: a newcomer, or a worker whose update was torn."""
