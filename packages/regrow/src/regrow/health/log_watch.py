"""The process that applies `--log-rules`: `python -m regrow.health.log_watch`, one per node, controlled by its stdin.

Input: an order as a line of JSON, then lines of workers: `WORKER TAB RANK TAB text`, `WORKER TAB RANK` when it gets
this rank, or `WORKER` alone when it has ended. It answers on standard output. A regular expression may take very long
on some line, and blocks all threads of its process meanwhile, so the agent does not do this itself: here an alarm
interrupts the search, and the rule is switched off.
"""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from regrow.core.ids import Instant, Rank, Seconds, WorkerId
from regrow.core.messages.log_rules import LogRule, LogRuleNews, LogRuleOrder, LogRulesNoted, LogSaid
from regrow.core.process.priority import step_back
from regrow.core.verdicts import Action, Severity
from regrow.health.log_rules import ActiveRules, RuleNews

LONGEST_SEARCH_S: Seconds = 0.1
"""Most CPU time for one search; on a busy machine more wall time may pass."""
_NICE = 10
_SHOWN = 200
"""Most characters of a line that are reported."""
_BLOCK = 1 << 16


class SearchTooLong(Exception):
    """A pattern took too long on a line."""


class LogWatch:
    """Applies the rules to the lines that workers print.

    Args:
        order: the rules, and the node.
    """

    def __init__(self, order: LogRuleOrder) -> None:
        self._node = order.node
        self._active = ActiveRules(order.rules)
        self._patterns = [(rule, re.compile(rule.pattern)) for rule in order.rules]
        self._ranks: dict[WorkerId, Rank] = {}

    @property
    def next_deadline(self) -> Instant | None:
        """Latest time for the next call of `late`; None if there is none."""
        return self._active.next_deadline()

    def line(self, line: bytes, now: Instant) -> Iterator[LogSaid]:
        """Process an input line: a worker's output, its rank, or its end."""
        worker, tab, rest = line.decode(errors="replace").partition("\t")
        if not tab:
            self._active.ended(WorkerId(worker))
            self._ranks.pop(WorkerId(worker), None)
            return
        rank, tab, text = rest.partition("\t")
        self._ranks[WorkerId(worker)] = Rank(int(rank))
        if not tab:
            self._active.began(WorkerId(worker), now)
            return
        for rule, pattern in list(self._patterns):
            try:
                found = _search(pattern, text)
            except SearchTooLong:
                yield self._switched_off(rule)
                continue
            news = self._active.matched(rule, WorkerId(worker), text, now) if found else None
            if news is not None:
                yield self._described(news)

    def late(self, now: Instant) -> Iterator[LogSaid]:
        """Report the rules that are broken by now because lines are missing."""
        yield from map(self._described, self._active.late(now))

    def _switched_off(self, rule: LogRule) -> LogRulesNoted:
        self._patterns = [each for each in self._patterns if each[0] is not rule]
        self._active.rules = [each for each in self._active.rules if each is not rule]
        text = (
            f"{self._node} applies the log rule {rule.name} no more: its pattern has taken longer than "
            f"{LONGEST_SEARCH_S:g} s of a processor on a line (a repetition in a repetition, as in (a+)+, does that)"
        )
        return LogRulesNoted(self._node, text)

    def _described(self, news: RuleNews) -> LogRuleNews:
        rule, rank = news.rule, self._ranks.get(news.worker, Rank(-1))
        span = "" if rule.within is None else f" within {rule.within:g} s"
        if news.never:
            evidence = f"rank {rank} has printed nothing that fits since it began {news.missing or 0:.0f} s ago"
        elif news.missing is not None:
            evidence = (
                f"rank {rank} has printed nothing that fits for {news.missing:.0f} s, {rule.at_least}{span} are due"
            )
        elif not news.broken:
            evidence = f"rank {rank} prints it now: {_shown(news.line)}"
        elif rule.at_most:
            evidence = (
                f"rank {rank} has printed more than {rule.at_most} such lines{span}, the last: {_shown(news.line)}"
            )
        else:
            evidence = f"rank {rank} has printed: {_shown(news.line)}"
        return LogRuleNews(
            self._node,
            news.worker,
            rank,
            f"log:{rule.name}",
            rule.severity if news.broken else Severity.OK,
            rule.action if news.broken else Action.NONE,
            evidence,
        )


def _search(pattern: "re.Pattern[str]", text: str) -> bool:
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_SEARCH_S)
    try:
        return pattern.search(text) is not None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _shown(line: str) -> str:
    """The line, shortened and without control characters, which could move a terminal's cursor."""
    text = "".join(each if each.isprintable() else " " for each in line.strip())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _too_long(*_: object) -> None:
    raise SearchTooLong


def main() -> int:
    """Apply the ordered rules until the end of the input."""
    step_back(_NICE)
    signal.signal(signal.SIGVTALRM, _too_long)
    # The agent ends this process by closing its input.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)
        return _run(out)


def _run(out: BinaryIO) -> int:
    watch: LogWatch | None = None
    rest = b""
    while True:
        deadline = None if watch is None else watch.next_deadline
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([0], [], [], wait)
        block = os.read(0, _BLOCK) if readable else None
        if block == b"":
            return 0
        *lines, rest = (rest + (block or b"")).split(b"\n")
        if watch is None and lines:
            watch = LogWatch(msgspec.json.decode(lines.pop(0), type=LogRuleOrder))
        if watch is None:
            continue
        for line in lines:
            _say(out, watch.line(line, time.monotonic()))
        _say(out, watch.late(time.monotonic()))


def _say(out: BinaryIO, said: Iterator[LogSaid]) -> None:
    for each in said:
        out.write(msgspec.json.encode(each) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
