"""`regrow doctor`, and the checks that users bring along."""

import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest

from regrow import cli
from regrow.core.ids import NodeId
from regrow.core.verdicts import Action, HealthVerdict, Severity
from regrow.health import examination
from regrow.health.plugin import run_check
from regrow.health.readings import NotApplicable, ProbeResult, ProductReading

NODE = NodeId("node7")


def check(tmp_path: Path, text: str, name: str = "check.sh") -> str:
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def outcome(tmp_path: Path, text: str, within: float = 20.0) -> list[HealthVerdict]:
    return run_check(check(tmp_path, text), NODE, os.environ, within=within)


def test_an_exit_code_is_enough(tmp_path: Path) -> None:
    (well,) = outcome(tmp_path, "exit 0")
    assert (well.node, well.source, well.severity) == (NODE, "check:check.sh", Severity.OK)
    (sick,) = outcome(tmp_path, "echo link of ib0 is down >&2; exit 1")
    assert (sick.severity, sick.action, sick.evidence) == (Severity.LEAVE, Action.NONE, "link of ib0 is down")


@pytest.mark.parametrize("code", [0, 1])
def test_its_json_says_more_than_its_exit_code(code: int, tmp_path: Path) -> None:
    text = '{"severity": "fatal", "action": "replace", "device": "ib0", "evidence": "no link on $REGROW_NODE"}'
    (verdict,) = outcome(tmp_path, f"cat <<END\n{text}\nEND\nexit {code}")
    assert verdict == HealthVerdict(NODE, "ib0", Severity.FATAL, Action.REPLACE, "check:check.sh", "no link on node7")


def test_it_may_tell_of_several_devices(tmp_path: Path) -> None:
    text = '[{"severity": "ok", "device": "ib0"}, {"severity": "suspect", "device": "ib1"}]'
    found = outcome(tmp_path, f"echo '{text}'")
    assert [(each.device, each.severity) for each in found] == [("ib0", Severity.OK), ("ib1", Severity.SUSPECT)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo hello", "'hello' is not the JSON of a verdict"),
        ("""echo '{"severity": "bad"}'""", "Invalid enum value 'bad'"),
        ("""echo '{"severity": "ok", "extra": 1}'""", "unknown field `extra`"),
        ("""echo '{"action": "reset"}'""", "missing required field `severity`"),
        ("echo no such tool >&2; exit 127", "exited with code 127; 0 is healthy and 1 is not; it said: no such tool"),
        ("kill -SEGV $$", "was ended by SIGSEGV"),
        ("head -c 2000000 /dev/zero", "printed more than 1 MiB"),
    ],
)
def test_a_check_that_fails_itself_is_told_so_and_harms_nobody(text: str, said: str, tmp_path: Path) -> None:
    (verdict,) = outcome(tmp_path, text)
    assert (verdict.severity, verdict.action) == (Severity.SUSPECT, Action.NONE)
    assert verdict.evidence.startswith("the check itself failed: ")
    assert said in verdict.evidence


def test_a_check_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    start = time.monotonic()
    (verdict,) = outcome(tmp_path, "sleep 3600 & echo $! > $0.pid; sleep 3600", within=1.0)
    assert time.monotonic() - start < 300
    assert "no end within 1 s (--check-timeout gives it more)" in verdict.evidence
    child = Path(tmp_path / "check.sh.pid").read_text().strip()
    deadline = time.monotonic() + 60
    with suppress(FileNotFoundError, ProcessLookupError):  # it has gone while it was looked at
        while " Z " not in Path("/proc", child, "stat").read_text():
            assert time.monotonic() < deadline, "what the check has started is alive"
            time.sleep(0.01)


def test_a_check_that_is_not_there_is_told(tmp_path: Path) -> None:
    (verdict,) = run_check(str(tmp_path / "none"), NODE, os.environ, within=1.0)
    assert verdict.evidence.endswith("none cannot be started: No such file or directory")
    (tmp_path / "text").write_text("no program\n")
    (tmp_path / "text").chmod(0o755)
    (verdict,) = run_check(str(tmp_path / "text"), NODE, os.environ, within=1.0)
    assert "is its first line #! and an interpreter?" in verdict.evidence


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGROW_HOME", str(tmp_path / "home"))


def test_doctor_prints_json_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sick = check(tmp_path, """echo '{"severity": "leave", "action": "reboot", "evidence": "a cable"}'""")
    line = ["doctor", "--quick", "--json", "--node", "node7", "--check", sick, "--check", check(tmp_path, "", "fine")]
    assert cli.main(line) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["node"], found["worst"]) == ("node7", "leave")
    by_source = {each["source"]: each for each in found["verdicts"]}
    assert by_source["check:check.sh"] == {
        "node": "node7",
        "device": "",
        "severity": "leave",
        "action": "reboot",
        "source": "check:check.sh",
        "evidence": "a cable",
    }
    assert {"check:fine", "processor", "disk", "network", "memory-bandwidth"} <= set(by_source)
    assert "clock" in {each["source"] for each in found["not_applicable"]}


@pytest.mark.parametrize(("wrong", "code"), [(0, 0), (2, 1)])
def test_doctors_table_names_every_check_and_its_exit_code_says_whether_to_leave(
    wrong: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Runner:
        def __init__(self, *_: object) -> None:
            pass

        def run(self, probes: list[str]) -> list[ProbeResult]:
            product = ProductReading("cuda0", "float32", 8, wrong, "element (0, 0) is [1] instead of 2")
            return [ProbeResult("accelerator", product), ProbeResult("nvml", NotApplicable("no driver"))]

    monkeypatch.setattr(examination, "ProbeRunner", Runner)
    assert cli.main(["doctor", "--node", "node7"]) == code
    shown = capsys.readouterr().out
    for word in ("node7", "CHECK", "accelerator", "cuda0", "nvml", "no driver", "fatal" if wrong else "exact"):
        assert word in shown
    assert ("[1]" in shown) == bool(wrong)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("doctor --peer nowhere", "--peer 'nowhere' is no address"),
        ("doctor --peer host:0", "write HOST:PORT"),
        ("doctor --check-timeout 0s", "--check-timeout '0s' is no time at all"),
    ],
)
def test_what_cannot_be_meant_is_refused(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert said in capsys.readouterr().err
