"""Rules about workers' output lines: reads them from a file, and counts matches. Pure, except for reading the file."""

import re
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from regrow.core.config import duration
from regrow.core.errors import UsageError
from regrow.core.ids import Instant, Seconds, WorkerId
from regrow.core.messages.log_rules import LogRule
from regrow.core.verdicts import Action, Severity

MOST_RULES = 64
LONGEST_PATTERN = 500
MOST_COUNTED = 10_000
_KEYS = ("name", "pattern", "at_most", "at_least", "within", "first_within", "severity", "action")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EXAMPLE = "an entry is [[rule]] with name and pattern"


def load_rules(path: Path) -> list[LogRule]:
    """Read the rules of a file. Raises `UsageError`, which names the file, the rule, and what to write instead."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--log-rules {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--log-rules {path} is not text: {error}", hint="it is TOML, in UTF-8") from error
    return parse_rules(text, source=f"--log-rules {path}")


def parse_rules(text: str, *, source: str = "--log-rules") -> list[LogRule]:
    """Read rules as `load_rules` does, from a text. `source` names the text in errors."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not TOML: {error}", hint=f"{_EXAMPLE}; patterns in '…'") from error
    if unknown := [key for key in document if key != "rule"]:
        raise UsageError(f"{source}: unknown key {unknown[0]!r}", hint=_EXAMPLE)
    tables = document.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{source}: 'rule' is not a list of tables", hint="write [[rule]] with double brackets")
    if not 0 < len(tables) <= MOST_RULES:
        raise UsageError(f"{source} has {len(tables)} rules", hint=f"give 1 to {MOST_RULES}; {_EXAMPLE}")
    rules = [_Entry(source, number, table).rule() for number, table in enumerate(tables, 1)]
    names = [rule.name for rule in rules]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{source} has two rules called {twice!r}", hint="give each a name of its own")
    return rules


class _Entry:
    """One table of the file, with its location for error messages."""

    def __init__(self, source: str, number: int, table: Mapping[str, object]) -> None:
        name = table.get("name")
        self._where = f"{source}, rule {number}" + (f" ({name!r})" if isinstance(name, str) else "")
        self._table = table

    def rule(self) -> LogRule:
        if unknown := [key for key in self._table if key not in _KEYS]:
            raise self._fail(f"unknown key {unknown[0]!r}", f"known are {', '.join(_KEYS)}")
        name = self._text("name")
        if _NAME.fullmatch(name) is None:
            raise self._fail(f"name = {name!r} cannot name a rule", "use letters, digits, '.', '_' and '-'")
        at_most, at_least = self._number("at_most", 0), self._number("at_least", 1)
        within, first_within = self._time("within"), self._time("first_within")
        if at_most is not None and at_least is not None:
            raise self._fail("at_most and at_least exclude each other", "make two rules of it")
        if at_least is not None and within is None:
            raise self._fail("at_least needs to know in how much time", 'add within = "60s"')
        if first_within is not None and at_least is None:
            raise self._fail("first_within is for lines that must come", "add at_least = 1, or leave it out")
        return LogRule(
            name=name,
            pattern=self._pattern(),
            at_most=0 if at_least is None and at_most is None else at_most,
            at_least=at_least,
            within=within,
            first_within=first_within,
            severity=Severity(self._choice("severity", Severity.SUSPECT, list(Severity)[1:])),
            action=Action(self._choice("action", Action.NONE, list(Action))),
        )

    def _fail(self, cause: str, hint: str = "") -> UsageError:
        return UsageError(f"{self._where}: {cause}", hint=hint)

    def _text(self, key: str) -> str:
        value = self._table.get(key)
        if not isinstance(value, str) or not value:
            missing = f"{key} is missing" if key not in self._table else f"{key} = {value!r} is no text"
            raise self._fail(missing, f"add {key} = '…'")
        return value

    def _pattern(self) -> str:
        pattern = self._text("pattern")
        if len(pattern) > LONGEST_PATTERN:
            raise self._fail(
                f"pattern has {len(pattern)} characters", f"at most {LONGEST_PATTERN}; make two rules of it"
            )
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise self._fail(
                f"pattern = {pattern!r} is no regular expression: {error}", "as of Python's re; in TOML write it in '…'"
            ) from error
        if compiled.search(""):
            raise self._fail(
                f"pattern = {pattern!r} fits every line", "an empty line fits it too; write what must be there"
            )
        return pattern

    def _number(self, key: str, least: int) -> int | None:
        value = self._table.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_COUNTED:
            raise self._fail(f"{key} = {value!r} is no number of lines", f"give {least} to {MOST_COUNTED}")
        return value

    def _time(self, key: str) -> Seconds | None:
        value = self._table.get(key)
        if value is None:
            return None
        try:
            seconds = duration(value) if isinstance(value, str) else 0.0
        except UsageError as error:
            raise self._fail(f"{key}: {error.cause}", error.hint) from None
        if seconds <= 0:
            raise self._fail(f"{key} = {value!r} is no time", f'for example {key} = "10min"')
        return seconds

    def _choice(self, key: str, default: str, among: Sequence[str]) -> str:
        value = self._table.get(key, default)
        if value not in among:
            raise self._fail(f"{key} = {value!r} is not known", f"it is one of {', '.join(among)}")
        return str(value)


@dataclass(frozen=True)
class RuleNews:
    """A worker has broken a rule, or conforms to it again.

    `line`: the last match; `missing`: seconds without a match; `never`: no match since the worker got its rank.
    """

    rule: LogRule
    worker: WorkerId
    broken: bool
    line: str = ""
    missing: Seconds | None = None
    never: bool = False


@dataclass
class _Count:
    first: Instant
    """Time of the first match; until then, the time from which it is expected."""
    times: deque[Instant]
    """Times of the newest matches, in the number that the rule needs."""
    broken: bool = False


@dataclass
class ActiveRules:
    """Counts matches for each worker and rule, in memory proportional to the number of workers times rules."""

    rules: list[LogRule]
    _counts: dict[WorkerId, dict[str, _Count]] = field(default_factory=dict)

    def began(self, worker: WorkerId, now: Instant) -> None:
        """Note that the worker has its rank from now on, which starts the time of rules with `first_within`."""
        counts = self._counts.setdefault(worker, {})
        for rule in self.rules:
            if rule.at_least is not None and rule.first_within is not None:
                counts.setdefault(rule.name, _Count(now, deque(maxlen=rule.at_least)))

    def matched(self, rule: LogRule, worker: WorkerId, line: str, now: Instant) -> RuleNews | None:
        """Count a line of the worker that matches the rule; returns a change, if any."""
        kept = (rule.at_most or 0) + 1 if rule.at_least is None else rule.at_least
        known = self._counts.setdefault(worker, {}).setdefault(rule.name, _Count(now, deque(maxlen=kept)))
        if not known.times:
            known.first = now
        known.times.append(now)
        if rule.at_least is None:
            was, known.broken = known.broken, len(self._recent(rule, known, now)) == kept
            return RuleNews(rule, worker, broken=True, line=line) if known.broken and not was else None
        if known.broken and self._kept_until(rule, known) > now:
            known.broken = False
            return RuleNews(rule, worker, broken=False, line=line)
        return None

    def late(self, now: Instant) -> list[RuleNews]:
        """Report workers that have by now not printed the lines that a rule requires."""
        found = []
        for worker, counts in self._counts.items():
            for rule in self.rules:
                known = counts.get(rule.name)
                if rule.at_least is None or known is None or known.broken or now < self._kept_until(rule, known):
                    continue
                known.broken = True
                missing = now - (known.times or [known.first])[-1]
                found.append(RuleNews(rule, worker, broken=True, missing=missing, never=not known.times))
        return found

    def next_deadline(self) -> Instant | None:
        """Latest time for the next call of `late`; None if there is none."""
        return min(
            (
                self._kept_until(rule, counts[rule.name])
                for counts in self._counts.values()
                for rule in self.rules
                if rule.at_least is not None and rule.name in counts and not counts[rule.name].broken
            ),
            default=None,
        )

    def ended(self, worker: WorkerId) -> None:
        """Forget a worker that has ended."""
        self._counts.pop(worker, None)

    def _recent(self, rule: LogRule, known: _Count, now: Instant) -> list[Instant]:
        return [at for at in known.times if rule.within is None or at > now - rule.within]

    def _kept_until(self, rule: LogRule, known: _Count) -> Instant:
        """Time at which an `at_least` rule breaks if no further line matches."""
        if not known.times:
            return known.first + (rule.first_within or 0.0)
        enough = len(known.times) == known.times.maxlen
        return (known.times[0] if enough else known.first) + (rule.within or 0.0)
