"""Findings of an agent about its node."""

import msgspec

from regrow.core.ids import NodeId, Seconds
from regrow.core.verdicts import HealthVerdict


class NodeExamined(msgspec.Struct, frozen=True, tag=True):
    """An agent has examined its node. `verdicts`: all but `ok`. `occasion`: why it did. `seconds`: duration."""

    node: NodeId
    occasion: str
    verdicts: list[HealthVerdict]
    seconds: Seconds
