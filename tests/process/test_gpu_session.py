"""A session with a GPU, of parts made for the purpose: what a part has started ends with it, and its line is told."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SESSION = """
import json, os, sys
from gpu_session import Part, hold, teller
parts = [Part(at, name, limit, ("-c", code)) for at, (name, limit, code) in enumerate(json.loads(sys.argv[1]), 1)]
with open(sys.argv[2], "w") as out:
    good = hold(parts, budget=float(sys.argv[3]), device="cuda", tell=teller(out), environment=dict(os.environ))
sys.exit(not good)
"""
FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
sleeper = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\\\n'); time.sleep(600)"
command = f"[sys.executable, '-c', {sleeper!r}, sys.argv[1]]"
middle = f"import subprocess, sys; subprocess.Popen({command}, start_new_session=True)"
subprocess.run([sys.executable, "-c", middle, PIDS], check=True)  # a grandchild, of a session of its own, now an orphan
subprocess.Popen([sys.executable, "-c", sleeper, PIDS])
while len(Path(PIDS).read_text().split() if Path(PIDS).exists() else ()) < 2:
    time.sleep(0.01)
print('{"begun": true}', flush=True)
"""
STAYS = "\ntime.sleep(600)\n"
ENDS = "print('{\"fine\": 1}')"


def family(pids: Path, rest: str) -> str:
    return f"PIDS = {str(pids)!r}\n{FAMILY}{rest}"


def session(tmp_path: Path, parts: list[tuple[str, float, str]], budget: float = 300.0) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SESSION, json.dumps(parts), str(tmp_path / "out"), str(budget)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def told(process: "subprocess.Popen[str]", tmp_path: Path) -> list[dict[str, Any]]:
    output, _ = process.communicate(timeout=120)
    lines = [json.loads(line) for line in output.splitlines()]
    assert [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()] == lines
    return lines


def assert_gone(pids: Path, count: int = 2) -> None:
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == count
    assert [pid for pid in found if psutil.pid_exists(pid)] == []


def test_a_part_at_its_limit_ends_with_all_that_it_started_and_the_next_one_runs(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = session(tmp_path, [("stays", 10.0, family(pids, STAYS)), ("ends", 60.0, ENDS)])
    first, second = told(process, tmp_path)
    assert process.returncode == 1
    assert (first["name"], first["result"], first["figures"]) == ("stays", "killed", [{"begun": True}])
    assert first["seconds"] >= 10.0
    assert (second["name"], second["result"], second["figures"]) == ("ends", "passed", [{"fine": 1}])
    assert_gone(pids)


def test_what_outlives_a_part_that_ended_well_is_ended_and_told(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = session(tmp_path, [("leaves", 60.0, family(pids, ""))])
    (line,) = told(process, tmp_path)
    assert process.returncode == 1
    assert (line["result"], line["left_behind"]) == ("failed", 2)
    assert_gone(pids)


def test_a_part_that_does_not_fit_into_the_budget_is_skipped_and_a_shorter_one_runs(tmp_path: Path) -> None:
    home = "import os; print('{\"home\": \"' + os.environ['REGROW_HOME'] + '\"}')"
    process = session(tmp_path, [("long", 500.0, ENDS), ("short", 20.0, home)], budget=30.0)
    long, short = told(process, tmp_path)
    assert (process.returncode, long["result"], short["result"]) == (0, "skipped", "passed")
    assert long["why"] == "needs 500 s of the budget"
    assert not Path(short["figures"][0]["home"]).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_session_that_is_ended_takes_its_part_with_it_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    pids = tmp_path / "pids"
    process = session(tmp_path, [("stays", 300.0, family(pids, STAYS)), ("ends", 60.0, ENDS)])
    until = time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    (line,) = told(process, tmp_path)
    assert (process.returncode, line["result"], line["why"]) == (1, "interrupted", number.name)
    assert_gone(pids)
