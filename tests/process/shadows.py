"""Waiting until a standby has shown in a rank's shadow what it would compute."""

import time

from tests.process.launching import PATIENCE, Running, Site

from regrow.core.records import Noted, Record, ReplacementJudged
from regrow.observe.ledger import read_records


def judgements(here: Site, name: str) -> list[Record]:
    """Judgements on newcomers, and the reasons for missing ones."""
    folder = here.home / "jobs" / name
    found = read_records(folder) if (folder / "events.jsonl").exists() else ()
    return [each for each in found if isinstance(each, ReplacementJudged) or _not_proven(each)]


def _not_proven(record: Record) -> bool:
    return isinstance(record, Noted) and "was not proven" in record.text


def proven(here: Site, name: str, running: Running, ranks: int) -> list[Record]:
    """Wait until newcomers for `ranks` ranks were compared, or could not be."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        running.drain()
        found = judgements(here, name)
        if len({each.rank for each in found if isinstance(each, ReplacementJudged)}) >= ranks or any(
            _not_proven(each) or (isinstance(each, ReplacementJudged) and each.reason) for each in found
        ):
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing was found of newcomers: {running.output}")


def assert_proven(found: list[Record]) -> None:
    assert [each for each in found if not isinstance(each, ReplacementJudged) or each.reason] == []
