"""Records are lines that can be followed, and a full disk costs records only."""

import errno
import json
import os
from pathlib import Path

import pytest

from regrow.core.records import JobEnded, Noted
from regrow.observe.record import EventWriter


def test_each_record_is_a_line_with_its_type_and_the_wall_clock(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events.jsonl", complain=pytest.fail) as writer:
        writer.write(Noted(at=1.0, text="hello"))
        first = json.loads((tmp_path / "events.jsonl").read_text())
        writer.write(JobEnded(at=2.0, code=0, diagnosis=""))
    assert (first["type"], first["at"], first["text"]) == ("Noted", 1.0, "hello")
    assert first["time"] > 1e9
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_a_full_disk_is_said_once_and_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    real = os.write
    path = tmp_path / "events.jsonl"
    with EventWriter(path, complain=said.append) as writer:
        writer.write(Noted(at=1.0, text="before"))
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
        writer.write(Noted(at=2.0, text="torn"))

        def full(fd: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        writer.write(Noted(at=3.0, text="lost"))
        assert len(said) == 1
        assert "the training goes on" in said[0]
        monkeypatch.setattr(os, "write", real)
        writer.write(Noted(at=4.0, text="after"))
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["before", "after"]
    assert "2 are missing" in said[1]
