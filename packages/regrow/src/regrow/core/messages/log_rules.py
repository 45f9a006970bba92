"""Rules for the lines that workers print (`--log-rules`), and messages about their findings."""

import msgspec

from regrow.core.ids import NodeId, Rank, Seconds, WorkerId
from regrow.core.verdicts import Action, Severity

LONGEST_LINE = 2000
"""Bytes of a line that rules are applied to; they ignore the rest."""


class LogRule(msgspec.Struct, frozen=True):
    """A pattern, and how often a worker's lines may, or must, match it.

    `at_most`: more matches within `within` (None: since the worker's start) break the rule. `at_least`: fewer within
    `within` break it, once there was a first match. Exactly one of the two is given. `first_within`: for `at_least`,
    the longest time from when the worker has its rank to the first match; None: unlimited.
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
        """True if a worker that breaks the rule is replaced."""
        return self.action is Action.REPLACE


class LogRuleNews(msgspec.Struct, frozen=True, tag=True):
    """A worker's lines have broken a rule of `--log-rules`; with the severity `ok`: they conform again.

    `rank`: the worker's rank when it printed them. `source`: the rule.
    """

    node: NodeId
    worker: WorkerId
    rank: Rank
    source: str
    severity: Severity
    action: Action
    evidence: str


class LogRulesNoted(msgspec.Struct, frozen=True, tag=True):
    """A note for people about the rules themselves; it has no consequence."""

    node: NodeId
    text: str


class LogRuleOrder(msgspec.Struct, frozen=True):
    """First message of an agent to the process that applies the rules."""

    node: NodeId
    rules: list[LogRule]


LogSaid = LogRuleNews | LogRulesNoted
"""Answers of that process, each a line of JSON."""
