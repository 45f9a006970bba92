"""What is looked for in the lines that workers print (`--log-rules`), and what is said of it."""

import msgspec

from regrow.core.ids import NodeId, Rank, Seconds, WorkerId
from regrow.core.verdicts import Action, Severity

LONGEST_LINE = 2000
"""Bytes of a line that rules see; the rest of it they do not."""


class LogRule(msgspec.Struct, frozen=True):
    """A pattern and how often a worker's lines may, or must, have it.

    `at_most`: more matches within `within` (None: since the worker was started) break the rule. `at_least`: fewer
    within `within` do, once the worker has had a first one. One of the two is given. `first_within`: so long after the
    worker has its rank the first one breaks an `at_least` rule if it has not come; None: it is not missed.
    """

    name: str
    pattern: str
    at_most: int | None = None
    at_least: int | None = None
    within: Seconds | None = None
    first_within: Seconds | None = None
    severity: Severity = Severity.SUSPECT
    action: Action = Action.NONE

    @property
    def replaces(self) -> bool:
        """Whether a worker that breaks it is replaced."""
        return self.action is Action.REPLACE


class LogRuleNews(msgspec.Struct, frozen=True, tag=True):
    """A worker's lines have broken a rule of `--log-rules`; with the severity `ok`: they keep it again.

    `rank`: its own when it printed them. `source`: the rule.
    """

    node: NodeId
    worker: WorkerId
    rank: Rank
    source: str
    severity: Severity
    action: Action
    evidence: str


class LogRulesNoted(msgspec.Struct, frozen=True, tag=True):
    """Something about the rules themselves that people should know; nothing follows from it."""

    node: NodeId
    text: str


class LogRuleOrder(msgspec.Struct, frozen=True):
    """What an agent tells the process that applies the rules, before all lines."""

    node: NodeId
    rules: list[LogRule]


LogSaid = LogRuleNews | LogRulesNoted
"""What that process answers, a line of JSON each."""
