"""Message with an agent's findings about its node."""

import msgspec

from regrow.core.ids import NodeId, Seconds
from regrow.core.verdicts import HealthVerdict


class NodeExamined(msgspec.Struct, frozen=True, tag=True):
    """An agent has examined its node. `verdicts`: all but `ok`. `occasion`: reason for it. `seconds`: duration."""

    node: NodeId
    occasion: str
    verdicts: list[HealthVerdict]
    seconds: Seconds
