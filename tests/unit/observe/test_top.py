"""`regrow top` shows a job of this machine until it has ended, and takes a tenth of a processor at most."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tests.unit.observe.observe_records import FakeJob

from regrow.core.records import Record
from regrow.observe.live import PlainView, follow


class SlowView(PlainView):
    """A picture of a job that has become long."""

    def feed(self, records: Sequence[Record]) -> None:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass


def test_looking_takes_a_tenth_of_a_processor_however_long_the_job_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("regrow.observe.live.time.sleep", slept.append)
    left = iter([True, True, False])
    (tmp_path / "events.jsonl").write_bytes(
        b"".join(msgspec.json.encode(record) + b"\n" for record in FakeJob().run(3, kills={}))
    )
    follow(tmp_path, SlowView(Console()), running=lambda: next(left), every=0.001)
    assert len(slept) == 2
    assert min(slept) >= 9 * 0.01
