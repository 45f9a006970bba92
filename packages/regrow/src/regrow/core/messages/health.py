"""Findings of an agent on its node."""

import msgspec

from regrow.core.ids import NodeId, Seconds
from regrow.core.verdicts import HealthVerdict


class NodeExamined(msgspec.Struct, frozen=True, tag=True):
    """An agent has examined its node. `verdicts`: what is not `ok`. `occasion`: why it looked. `seconds`: it took."""

    node: NodeId
    occasion: str
    verdicts: list[HealthVerdict]
    seconds: Seconds
