"""Rules for the lines that workers print (`--log-rules`), and messages about lines that break them."""

import msgspec

from regrow.core.ids import NodeId, Rank, Seconds, WorkerId
from regrow.core.verdicts import Action, Severity

LONGEST_LINE = 2000
"""Number of bytes at the start of a line to which rules apply; they ignore the rest of it."""


class LogRule(msgspec.Struct, frozen=True):
    """A pattern, and limits on how often a worker's lines match it.

    `at_most`: more matches within `within` (None: since the worker's start) break the rule. `at_least`: fewer within
    `within` break it, once there was a first match. Exactly one of the two is given. `first_within`: for `at_least`,
    the longest time to the first match after the worker has got its rank; None: unlimited.
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
    """A worker's lines have broken a rule of `--log-rules`; with the severity `ok`, they conform to it again.

    `rank`: the worker's rank when it printed the lines. `source`: the rule.
    """

    node: NodeId
    worker: WorkerId
    rank: Rank
    source: str
    severity: Severity
    action: Action
    evidence: str


class LogRulesNoted(msgspec.Struct, frozen=True, tag=True):
    """A note about the rules themselves, for people; it has no consequence."""

    node: NodeId
    text: str


class LogRuleOrder(msgspec.Struct, frozen=True):
    """First message of an agent to the process that applies the rules."""

    node: NodeId
    rules: list[LogRule]


LogSaid = LogRuleNews | LogRulesNoted
"""Answers of the process that applies the rules, each a line of JSON."""
