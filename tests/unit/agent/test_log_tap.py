"""Lines on their way to the rules: whole, cut, of workers with a rank, and never waited for."""

import asyncio
from types import SimpleNamespace
from typing import Any

from regrow.agent.log_tap import LogTap
from regrow.core.ids import NodeId, Rank, WorkerId
from regrow.core.messages.log_rules import LONGEST_LINE, LogRule, LogRuleNews, LogRulesNoted, LogSaid

W = WorkerId("w1")
PATIENCE = 60.0


def config(*rules: LogRule) -> Any:
    return SimpleNamespace(node=NodeId("n0"), spec=SimpleNamespace(log_rules=list(rules)))


class Heard:
    """Reports of a tap, from a loop that can be waited in."""

    def __init__(self, *rules: LogRule) -> None:
        self.said: list[LogSaid] = []
        self.news = asyncio.Event()
        self.tap = LogTap(config(*rules), report=self.tell)

    def tell(self, said: LogSaid) -> None:
        self.said.append(said)
        self.news.set()

    async def wait_for(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.said) < number:
                self.tap.flush()
                self.news.clear()
                await self.news.wait()


def test_lines_in_parts_are_put_together_and_long_ones_cut() -> None:
    async def run() -> None:
        rule, long = LogRule("whole", "^one two$", at_most=0), LogRule("long", "x{1900}", at_most=0)
        heard = Heard(rule, long, LogRule("end", "^the end", at_most=0), LogRule("cut", "x end", at_most=0))
        heard.tap.start()
        try:
            heard.tap.feed(W, Rank(2), 1, b"one t")
            heard.tap.feed(W, Rank(2), 2, b"another stream\n")
            heard.tap.feed(W, Rank(2), 1, b"wo\n" + b"x" * 5 * LONGEST_LINE)
            heard.tap.feed(W, Rank(2), 1, b" end\n")
            heard.tap.feed(W, None, 1, b"one two\n")
            heard.tap.feed(W, Rank(2), 1, b"the end\n")
            await heard.wait_for(3)
        finally:
            heard.tap.close()
        sources = [(each.source, each.rank) for each in heard.said if isinstance(each, LogRuleNews)]
        assert sources == [("log:whole", 2), ("log:long", 2), ("log:end", 2)]
        assert heard.tap.pid is None

    asyncio.run(run())


def test_a_process_that_takes_nothing_or_has_ended_is_told_once_and_holds_nobody_up() -> None:
    async def run() -> None:
        heard = Heard(LogRule("a", "b", at_most=0))
        heard.tap.start()
        pid = heard.tap.pid
        assert pid is not None
        try:
            import os
            import signal

            os.kill(pid, signal.SIGSTOP)
            for _ in range(3000):
                heard.tap.feed(W, Rank(0), 1, b"x" * 1000 + b"\n")
            await heard.wait_for(1)
            os.kill(pid, signal.SIGKILL)
            await heard.wait_for(2)
            heard.tap.feed(W, Rank(0), 1, b"more\n")
        finally:
            heard.tap.close()
        faster, gone = (each.text for each in heard.said if isinstance(each, LogRulesNoted))
        assert "print faster than the log rules are applied" in faster and "has ended" in gone

    asyncio.run(run())


def test_without_rules_there_is_no_process() -> None:
    async def run() -> None:
        heard = Heard()
        heard.tap.start()
        heard.tap.feed(W, Rank(0), 1, b"line\n")
        heard.tap.ended(W)
        assert heard.tap.pid is None
        heard.tap.close()

    asyncio.run(run())
