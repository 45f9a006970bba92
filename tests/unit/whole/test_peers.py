"""The table of `benchmarks/peers.py`, whatever a side comes to."""

import json
import sys
from pathlib import Path
from typing import Any

import peers
import pytest
from workload import WORLD


def test_a_side_that_ends_before_the_first_fault_is_told_as_one_that_has_survived_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: str, __: Any, ___: Path, steps: int, faults: list[Any]) -> peers.Outcome:
        outcome = peers.Outcome(code=1 if faults else 0)
        for rank in range(WORLD):
            outcome.lines[rank] = {step: [(0.5 * step, rank)] for step in range(1 if faults else steps)}
        return outcome

    figures = tmp_path / "figures.json"
    monkeypatch.setattr(peers, "run", run)
    monkeypatch.setattr(peers, "warn_if_busy", lambda: None)
    monkeypatch.setattr(peers, "version", lambda _: "1.0")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["peers.py", "--quick", "--side", "torchrun", "--json", str(figures)])
    assert peers.main() == 0
    assert "0 of 3" in capsys.readouterr().out
    told = json.loads(figures.read_text())
    assert "without_step_s_torchrun" not in str(told) and "survived_torchrun" in str(told)
