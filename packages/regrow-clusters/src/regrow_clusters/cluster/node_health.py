"""Verdicts on a node from the cluster's facts, by a table that is configuration. Pure, but for `read_table`.

The default table is `node_health.toml`, beside this file.
"""

import fnmatch
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec

from regrow.core.errors import UsageError
from regrow.core.ids import NodeId
from regrow.core.verdicts import Action, HealthVerdict, Severity

MOST_MARKED: Final = 0.1
"""Of a cluster's nodes: beyond that none is taken out of use by regrow."""
_KINDS: Final = ("cordon", "taint", "condition", "label", "state", "reason")


class NodeFact(msgspec.Struct, frozen=True):
    """One thing that the cluster says of a node. `text`: in its own words, for people."""

    what: str
    key: str
    value: str
    text: str = ""


class HealthRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Meaning of facts of one kind: patterns, and the verdict."""

    what: str
    severity: Severity
    key: str = "*"
    value: str = "*"
    action: Action = Action.NONE

    def fits(self, fact: NodeFact) -> bool:
        """True if it speaks of this fact."""
        return self.what == fact.what and _like(fact.key, self.key) and _like(fact.value, self.value)


class HealthTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All rules, in the order in which they are tried."""

    rule: list[HealthRule] = []

    def verdicts(self, node: str, facts: Iterable[NodeFact]) -> list[HealthVerdict]:
        """Verdicts on a node's facts, the worst first; none for facts that are `ok` or in no rule."""
        found = []
        for fact in facts:
            rule = next((each for each in self.rule if each.fits(fact)), None)
            if rule is not None and rule.severity is not Severity.OK:
                source = f"{fact.what} {fact.key}"
                said = f"{fact.value} ({fact.text})" if fact.text else fact.value
                found.append(HealthVerdict(NodeId(node), "", rule.severity, rule.action, source, said))
        return sorted(found, key=lambda each: -_SEVERITIES.index(each.severity))


_SEVERITIES = list(Severity)


def read_table(path: str = "") -> HealthTable:
    """The table in a file, or the one that comes with regrow. Raises `UsageError`: names the file, rule and cure."""
    where = path or "node_health.toml"
    try:
        own = resources.files("regrow_clusters.cluster").joinpath("node_health.toml")
        text = Path(path).read_text(encoding="utf-8") if path else own.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the table of node health {where} cannot be read: {error}") from error
    return parse_table(text, where)


def parse_table(text: str, where: str) -> HealthTable:
    """A table's text. Raises `UsageError`."""
    try:
        table = msgspec.convert(tomllib.loads(text), HealthTable)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        hint = "a rule has what, key, value, severity, action: docs/kubernetes.md"
        raise UsageError(f"the table of node health {where}: {error}", hint=hint) from error
    for number, rule in enumerate(table.rule, 1):
        if rule.what not in _KINDS:
            raise UsageError(
                f"the table of node health {where}: rule {number} is about {rule.what!r}",
                hint=f"give one of {', '.join(_KINDS)}",
            )
    return table


def slurm_facts(state: str, reason: str) -> list[NodeFact]:
    """Slurm's facts about a node; the reason first, for it says more."""
    return [*([NodeFact("reason", "slurm", reason)] if reason else []), NodeFact("state", "slurm", state)]


def may_mark(out: int, every: int) -> bool:
    """True if regrow may take one more node out of use: a tenth at most, whoever took them out; one always may.

    Args:
        out: nodes that are out of use already.
        every: all nodes.
    """
    return out + 1 <= max(1.0, every * MOST_MARKED)


def _like(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text.lower(), pattern.lower())
