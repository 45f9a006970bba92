"""`regrow doctor --train`: checks that are chosen, refused, interrupted, and how their parts are carried out."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from regrow import cli
from regrow.core.errors import UsageError
from regrow.drill import session, steady
from regrow.drill.__main__ import DOING
from regrow.drill.checks import CHECKS, DrillCheck, chosen, first_port
from regrow.drill.facts import driver_version
from regrow.drill.ground import DrillSettings, Ground
from regrow.drill.session import hold
from regrow.drill.verdict import CheckResult, CheckStatus
from regrow.launch.checks import writable

OK, FAILED = CheckStatus.OK, CheckStatus.FAILED


STOPS = """
import sys
side, asks, answers = sys.argv[1:]
lines, out = open(asks), open(answers, "w")
for _ in range(4 if side == STOPPED else 1000):
    lines.readline()
    out.write("1.0\\n")
    out.flush()
print(side, "is out of luck")
sys.exit(3)
"""
"""Answers as the training does, one side a few times only; those would be enough for a figure."""


@pytest.mark.parametrize(
    ("stopped", "name"), [("plain", "the training with torch alone"), ("regrow", "the training under regrow")]
)
def test_a_side_that_stops_amid_the_rounds_fails_with_its_last_words(
    stopped: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steady.py").write_text(STOPS.replace("STOPPED", repr(stopped)))
    settings = DrillSettings(str(tmp_path), str(tmp_path))
    ground = Ground(settings, "steady", first_port=0, until=time.monotonic() + 100.0, jobs_home=tmp_path)

    @contextlib.contextmanager
    def job(_: str, __: Sequence[str], words: Sequence[str], **___: object) -> Iterator["subprocess.Popen[bytes]"]:
        log = tmp_path / "job.log"
        with log.open("wb") as output, subprocess.Popen([sys.executable, *words], stdout=output) as process:
            yield process
            process.kill()
        ground.keep_output(log)

    monkeypatch.setattr(ground, "job", job)
    judged = steady.check(ground)
    assert (judged.status, judged.cause) == (FAILED, f"{name} ended with code 3")
    assert ground.output == f"{stopped} is out of luck\n"


@pytest.mark.parametrize(
    ("told", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  "
            "(dvs-builder@U16-I3-C19-4-1)  Thu Jan 23 22:50:36 UTC 2025\nGCC version:  gcc version 12.3.0",
            "570.86.15",
        ),
        ("another format", "another format"),
        ("", ""),
    ],
)
def test_the_drivers_version_is_found_whichever_module_says_it(told: str, version: str) -> None:
    assert driver_version(told) == version


def test_every_check_of_the_table_is_carried_out_by_something() -> None:
    assert [each.name for each in CHECKS] == list(DOING)


def test_checks_come_in_the_order_of_the_table_and_an_unknown_one_is_refused() -> None:
    assert [each.name for each in chosen(["hang", "facts"], quick=True)] == ["facts", "hang"]
    assert {each.name for each in chosen([], quick=True)} < {each.name for each in chosen([], quick=False)}
    with pytest.raises(UsageError, match="no check 'gpu'"):
        chosen(["gpu"], quick=False)


def test_jobs_of_checks_share_no_port() -> None:
    for check, later in itertools.pairwise(CHECKS):
        assert first_port(later) == first_port(check) + check.jobs


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2", "--node-rank", "0"], "needs --rdzv-endpoint HOST:PORT"),
        (["--nodes", "2", "--rdzv-endpoint", "a:29400"], "needs --node-rank"),
        (["--nodes", "2", "--rdzv-endpoint", "a:29400", "--node-rank", "2"], "needs --node-rank"),
        (["--nodes", "2", "--rdzv-endpoint", "a:29400", "--node-rank", "1"], "several nodes need a secret"),
        (["--check", "nothing"], "there is no check 'nothing'"),
    ],
)
def test_a_session_that_cannot_be_held_is_refused_with_what_it_needs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REGROW_TOKEN", raising=False)
    assert cli.main(["doctor", "--train", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2"], "give --train"),
        (["--nproc-per-node", "2"], "give --train"),
        (["--node-rank", "0"], "give --train"),
        (["--state-gb", "10"], "give --train"),
        (["--rdzv-endpoint", "a:29400"], "give --train"),
        (["--bind", "10.0.0.1"], "give --train"),
        (["--train", "--peer", "a:1"], "without --train"),
        (["--train", "--node", "a"], "without --train"),
        (["--train", "--check-timeout", "30s"], "without --train"),
    ],
)
def test_a_flag_that_would_be_dropped_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr("regrow.drill.command.hold", lambda *given, **_: done.append(given))
    monkeypatch.setattr("regrow.health.doctor.examine", lambda *given, **_: done.append(given))
    assert cli.main(["doctor", "--quick", *words]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert next(word for word in reversed(words) if word.startswith("--")) in told
    assert said in told
    assert done == []


def test_a_schedulers_number_of_the_node_is_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert cli.main(["doctor", "--quick", "--json", "-"]) in (0, 1)


def test_the_json_of_plain_doctor_goes_to_a_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor", "--quick", "--json", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text())["verdicts"]
    assert "VERDICT" in capsys.readouterr().out


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Sessions of one check that does nothing; the environment that it was given."""
    given: dict[str, str] = {}

    def carry_out(check: DrillCheck, folder: Path, environment: dict[str, str], *_: object) -> CheckResult:
        given.update(environment)
        return CheckResult(check.name, OK, "", 0.0, "")

    monkeypatch.setattr(session, "adopt_orphans", lambda: None)
    monkeypatch.setattr(session, "_carry_out", carry_out)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return given


def test_checks_do_not_get_what_the_environment_says_of_another_job(seen: dict[str, str]) -> None:
    others = ["PET_NNODES", "PET_NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GROUP_RANK"]
    others += ["REGROW_RECORD_PART", "REGROW_NODE_METRICS"]
    kept = {"NCCL_DEBUG": "INFO", "REGROW_TOKEN": "a secret", "CUDA_VISIBLE_DEVICES": "0"}
    report = hold(CHECKS[:1], DrillSettings(""), dict.fromkeys(others, "2") | kept, lambda _: None)
    assert report.code == 0
    assert not seen.keys() & set(others)
    assert kept.items() <= seen.items()


@pytest.mark.parametrize("train", [[], ["--train"]])
@pytest.mark.parametrize("place", ["", "absent/found.json"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_done(
    train: list[str],
    place: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    monkeypatch.setattr("regrow.drill.command.hold", lambda *given, **_: done.append(given))
    monkeypatch.setattr("regrow.health.doctor.examine", lambda *given, **_: done.append(given))
    assert cli.main(["doctor", *train, "--quick", "--json", str(tmp_path / place)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be written" in said
    assert "name a file in a folder" in said
    assert done == []


def test_a_file_for_the_report_is_left_as_it_is_until_there_is_one(tmp_path: Path) -> None:
    there, absent = tmp_path / "there", tmp_path / "absent"
    there.write_text("an older report")
    for path in (there, absent):
        writable("--json", str(path))
    assert there.read_text() == "an older report"
    assert not absent.exists()


def test_a_link_to_a_report_that_is_not_there_yet_stays(tmp_path: Path) -> None:
    link, behind = tmp_path / "link", tmp_path / "behind"
    link.symlink_to(behind)
    writable("--json", str(link))
    assert link.is_symlink()
    assert not behind.exists()


def test_a_signal_that_nohup_has_ignored_does_not_interrupt(seen: dict[str, str]) -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        report = hold(CHECKS[:1], DrillSettings(""), {}, lambda _: signal.raise_signal(signal.SIGHUP))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)
    assert (report.code, len(report.checks)) == (0, 1)


def test_a_signal_while_the_folder_is_made_or_removed_leaves_nothing_and_loses_no_result(
    seen: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, remove = os.mkdir, shutil.rmtree

    def made(path: str | Path, *more: Any, **named: Any) -> None:
        make(path, *more, **named)
        if Path(path).name.startswith("regrow-doctor-"):
            signal.raise_signal(signal.SIGINT)

    def removed(path: Path, **named: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        remove(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", made)
        report = hold(CHECKS[:1], DrillSettings(""), {}, lambda _: None)
    assert (report.code, list(report.checks), list(tmp_path.iterdir())) == (75, [], [])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", removed)
        report = hold(CHECKS[:1], DrillSettings(""), {}, lambda _: None)
    assert (report.code, [each.check for each in report.checks], list(tmp_path.iterdir())) == (0, ["facts"], [])
