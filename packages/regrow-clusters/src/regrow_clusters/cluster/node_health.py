"""Verdicts on a node: a configurable table maps the cluster's facts to them. Pure, except `read_table`.

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
"""Largest share of a cluster's nodes that may be out of use: above it regrow takes no more out of use."""
_KINDS: Final = ("cordon", "taint", "condition", "label", "state", "reason")


class NodeFact(msgspec.Struct, frozen=True):
    """One fact that the cluster reports of a node. `text`: the cluster's own message, for people."""

    what: str
    key: str
    value: str
    text: str = ""


class HealthRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule: patterns that select facts of one kind, and the verdict on them."""

    what: str
    severity: Severity
    key: str = "*"
    value: str = "*"
    action: Action = Action.NONE

    def fits(self, fact: NodeFact) -> bool:
        """True if the rule applies to this fact."""
        return self.what == fact.what and _like(fact.key, self.key) and _like(fact.value, self.value)


class HealthTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All rules, in the order in which they are tried."""

    rule: list[HealthRule] = []

    def verdicts(self, node: str, facts: Iterable[NodeFact]) -> list[HealthVerdict]:
        """Verdicts on a node's facts, the worst first; facts that are `ok` or match no rule give none."""
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
    """Read the table in a file, or regrow's own. Raises `UsageError`, which names the file, the rule and the cure."""
    where = path or "node_health.toml"
    try:
        own = resources.files("regrow_clusters.cluster").joinpath("node_health.toml")
        text = Path(path).read_text(encoding="utf-8") if path else own.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the table of node health {where} cannot be read: {error}") from error
    return parse_table(text, where)


def parse_table(text: str, where: str) -> HealthTable:
    """Parse a table's TOML text; `where` is its name in errors. Raises `UsageError`."""
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
    """Slurm's facts about a node; the reason comes first, because it is more specific than the state."""
    return [*([NodeFact("reason", "slurm", reason)] if reason else []), NodeFact("state", "slurm", state)]


def may_mark(out: int, every: int) -> bool:
    """True if regrow may take one more node out of use: at most a tenth of all (by whomever), but always the first.

    Args:
        out: nodes that are out of use already.
        every: all nodes.
    """
    return out + 1 <= max(1.0, every * MOST_MARKED)


def _like(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text.lower(), pattern.lower())
