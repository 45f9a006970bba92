"""The table of `benchmarks/peers.py`, whatever a side comes to."""

import json
import math
import sys
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from peer_sides import SIDES
from peer_training import FINAL
from targets import missed
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
    monkeypatch.setattr(sys, "argv", ["peers.py", "--quick", "--sides", "torchrun", "--json", str(figures)])
    assert peers.main() == 0
    assert "0 of 3" in capsys.readouterr().out
    told = json.loads(figures.read_text())
    assert "without_step_s_torchrun" not in str(told) and "survived_torchrun" in str(told)


@pytest.mark.parametrize("every", [1, 2, 20, 300])
def test_the_faults_of_a_plan_are_as_far_apart_as_was_asked(every: int) -> None:
    steps, faults = peers.plan(every, seed=1)
    assert steps == 4 * every and peers.plan(every, seed=1)[1] == faults
    apart = [b - a for a, b in pairwise([0, *(fault.step for fault in faults), steps])]
    assert all(0.75 * every <= each <= 1.25 * every for each in apart), apart


def test_a_word_chooses_all_sides_that_begin_with_it() -> None:
    assert peers.chosen(["torchrun", "regrow"]) == ["torchrun", "regrow-standby", "regrow-fork"]
    assert peers.chosen(["regrow-fork"]) == ["regrow-fork"] and peers.chosen([]) == list(SIDES)
    assert not peers.chosen(["horovod"])


def test_sides_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "torch":
            raise PackageNotFoundError(name)
        return "2.14.1"

    monkeypatch.setattr(peers, "version", version)
    assert peers.versions() == "torch 2.14.1"


def test_only_the_same_bits_are_no_difference(tmp_path: Path) -> None:
    def run(name: str, *numbers: float) -> Path:
        (tmp_path / name).mkdir()
        torch.save({"weight": torch.tensor(numbers)}, tmp_path / name / FINAL)
        return tmp_path / name

    calm = run("calm", 1.0, 0.0)
    assert peers.difference(run("same", 1.0, 0.0), calm) == 0.0
    assert peers.difference(run("other", 1.5, 0.0), calm) == 0.5
    assert 0.0 < peers.difference(run("sign", 1.0, -0.0), calm) < 1e-300
    assert math.isinf(peers.difference(run("no number", math.nan, 0.0), calm))
    assert math.isinf(peers.difference(tmp_path / "without an end", calm))


def test_time_under_the_plan_is_held_to_the_bound_and_to_each_peer() -> None:
    assert not list(missed("peers", {"time_regrow_standby": 1.04, "time_torchrun": 1.2}))
    assert len(list(missed("peers", {"time_regrow_standby": 1.06, "time_torchft": 1.05}))) == 2


def test_seconds_without_a_step_end_with_the_first_step_beyond_all_finished_ones() -> None:
    outcome = peers.Outcome()
    for rank in range(WORLD):
        outcome.lines[rank] = {step: [(float(step), rank)] for step in range(4)}
    outcome.lines[0][4], outcome.lines[1][3] = [(9.0, 0)], [(3.0, 1), (7.0, 5)]  # run again: no news
    assert outcome.lost(3.5, step=1.0) == (4.5, math.inf)
    for rank in range(1, WORLD):
        outcome.lines[rank][4] = [(9.0 + rank, rank)]
    assert outcome.lost(3.5, step=1.0) == (4.5, 7.5)
    assert outcome.again() == 1 and outcome.dropped(5) == 0 and outcome.duration() == 12.0
