"""Rules for the lines that workers print (`--log-rules`), and messages about their findings."""

import msgspec

from regrow.core.ids import NodeId, Rank, Seconds, WorkerId
from regrow.core.verdicts import Action, Severity

LONGEST_LINE = 2000
"""Bytes of a line that rules see; the rest of it they do not."""


class LogRule(msgspec.Struct, frozen=True):
    """A pattern and how often a worker's lines may, or must, have it.

    `at_most`: more matches within `within` (None: since the worker was started) break the rule. `at_least`: fewer
    within `within` do, once the worker has had a first one. One of the two is given. `first_within`: time after the
    worker has its rank within which the first one must come for an `at_least` rule; None: it is not missed.
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
        """True if a worker that breaks it is replaced."""
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
    """First message of an agent to the process that applies the rules."""

    node: NodeId
    rules: list[LogRule]


LogSaid = LogRuleNews | LogRulesNoted
"""Answers of that process, a line of JSON each."""
