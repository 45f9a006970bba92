"""`regrow doctor --train`: what results of checks come to, and what is carried out."""

import itertools
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regrow import cli
from regrow.core.errors import UsageError
from regrow.core.ids import Generation, Instant, Rank, StepNo, WorkerId
from regrow.core.records import FaultInjected, IncidentClosed, Record, StepCommitted
from regrow.drill import session
from regrow.drill.__main__ import DOING
from regrow.drill.checks import CHECKS, DrillCheck, chosen, first_port
from regrow.drill.ground import DrillSettings
from regrow.drill.judging import (
    Blow,
    FlowRate,
    JobRun,
    MachineFacts,
    ProcessCount,
    judge_alone,
    judge_counts,
    judge_facts,
    judge_rates,
    judge_steady,
    judge_struck,
    unstruck,
)
from regrow.drill.scripts import network
from regrow.drill.session import hold
from regrow.drill.verdict import CheckResult, CheckStatus, Judgement, code_of, conclude
from regrow.launch.checks import writable
from regrow.observe.ledger import Ledger

OK, FAILED, ABSENT = CheckStatus.OK, CheckStatus.FAILED, CheckStatus.NOT_APPLICABLE
GOOD = MachineFacts("a device", 65536, None, [], 1 << 30, 16 << 30, 4)
BLOW = Blow(1, 3, "forward")


def results(*statuses: CheckStatus) -> list[CheckResult]:
    return [CheckResult(f"c{at}", status, "", 1.0, "") for at, status in enumerate(statuses)]


@pytest.mark.parametrize(
    ("statuses", "code", "said"),
    [
        ((OK, OK), 0, "2 of 2 checks are ok"),
        ((OK, ABSENT), 0, "1 of 2 checks are ok; not applicable here, so not shown: c1"),
        ((OK, FAILED), 1, "1 of 2 checks are ok; FAILED: c1"),
        ((ABSENT,), 1, "0 of 1 checks are ok; not applicable here, so not shown: c0; nothing was shown"),
    ],
)
def test_only_a_session_without_a_failed_check_and_with_a_good_one_ends_with_0(
    statuses: Sequence[CheckStatus], code: int, said: str
) -> None:
    found = results(*statuses)
    assert (code_of(found), conclude(found, begun=len(found))) == (code, said)


def test_an_interrupted_session_says_how_much_is_missing() -> None:
    assert conclude(results(OK), begun=3) == "1 of 3 checks are ok; interrupted: 2 not carried out"


def test_a_line_says_cause_and_figure() -> None:
    line = CheckResult("steady", FAILED, "ratio 2", 3.0, "too slow").line
    assert line.split() == ["failed", "steady", "3.0", "s", "too", "slow;", "ratio", "2"]


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (GOOD._replace(descriptors=64), "a process may open 64 files only: ulimit -n 65536"),
        (GOOD._replace(locked=65536, infiniband=["mlx5_0"]), "a process may lock 64 KiB only, mlx5_0 needs more"),
        (GOOD._replace(shared_free=1 << 20), "/dev/shm has 1 MiB free: a container needs --shm-size or --ipc=host"),
        (GOOD._replace(memory_free=1 << 30), "1.0 GiB of memory are free for 4 ranks"),
    ],
)
def test_a_limit_that_is_too_small_is_named_with_its_cure(facts: MachineFacts, cause: str) -> None:
    assert judge_facts(GOOD).status is OK
    judged = judge_facts(facts)
    assert judged.status is FAILED
    assert judged.cause.startswith(cause)


def test_locked_memory_is_asked_for_only_where_an_adapter_needs_it() -> None:
    assert judge_facts(GOOD._replace(locked=65536)).status is OK


def test_rates_say_how_long_a_nodes_state_travels() -> None:
    rates = [FlowRate("10.0.0.1", 1, 2.0), FlowRate("10.0.0.1", 4, 5.0)]
    judged = judge_rates(rates, state_gb=140)
    assert judged.status is OK
    assert judged.figure == (
        "10.0.0.1 1 flow 2.00 GB/s, 10.0.0.1 4 flows 5.00 GB/s; a lost node takes 28 s for 140 GB of state (--state-gb)"
    )


@pytest.mark.parametrize(
    ("rates", "cause"),
    [
        ([], "no address was measured"),
        ([FlowRate("10.0.0.1", 4, 0.01)], "10.0.0.1 is slower than 0.05 GB/s"),
        (
            [FlowRate("10.0.0.1", 1, 0.0, "timed out"), FlowRate("172.17.0.1", 1, 0.0, "Connection refused")],
            "10.0.0.1 did not answer: timed out; 172.17.0.1 did not answer: Connection refused",
        ),
        (
            [FlowRate("10.0.0.1", 1, 5.0), FlowRate("10.0.0.1", 4, 0.0, "Connection reset by peer")],
            "10.0.0.1 broke: Connection reset by peer",
        ),
    ],
)
def test_a_network_that_is_slow_or_broken_or_nowhere_answers_fails(rates: list[FlowRate], cause: str) -> None:
    judged = judge_rates(rates, state_gb=10)
    assert (judged.status, judged.cause) == (FAILED, cause)


def test_an_address_that_does_not_answer_is_named_and_is_no_failure_beside_one_that_does() -> None:
    rates = [FlowRate("10.0.0.1", 1, 2.0), FlowRate("10.0.0.1", 4, 5.0), FlowRate("172.17.0.1", 1, 0.0, "timed out")]
    judged = judge_rates(rates, state_gb=10)
    assert judged.status is OK
    assert judged.figure.endswith("; 172.17.0.1 did not answer: timed out")


@pytest.mark.parametrize(("bind", "listens"), [("", ["127.0.0.1"]), ("127.0.0.3", ["127.0.0.3"])])
def test_the_network_is_measured_on_loopback_or_where_the_user_binds(bind: str, listens: list[str]) -> None:
    receiver = network.Receiver(network.addresses(bind), b"")
    try:
        assert [host for host, _ in receiver.places] == listens
    finally:
        receiver.close()


def test_all_interfaces_are_measured_only_where_the_user_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.1.0.1"}
    up, found = SimpleNamespace(isup=True), {}
    for name, address in known.items():
        found[name] = [SimpleNamespace(family=socket.AF_INET, address=address)]
    monkeypatch.setattr("psutil.net_if_stats", lambda: dict.fromkeys(known, up))
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    assert network.addresses("0.0.0.0") == ["10.0.0.1", "10.1.0.1"]
    assert network.addresses("10.1.0.1") == ["10.1.0.1"]


def counts(growth: int) -> list[ProcessCount]:
    return [ProcessCount(step, 16 + growth * (step // 4), 5) for step in range(12)]


KILLED = [StepNo(3), StepNo(7)]


def test_descriptors_that_grow_with_each_recovery_fail() -> None:
    assert judge_counts(counts(0), KILLED) == Judgement(OK, "2 times formed anew, 16 descriptors and 5 threads")
    judged = judge_counts(counts(3), KILLED)
    assert (judged.status, judged.cause) == (FAILED, "descriptors of a survivor grew from 19 to 22 in 1 recoveries")


def test_a_count_that_ends_early_shows_nothing() -> None:
    assert judge_counts(counts(0)[:7], KILLED).status is FAILED


def ledger(*more: Record, loss: float = 1.0, steps: int = 5) -> Ledger:
    commits = [
        StepCommitted(
            at=Instant(float(step)),
            worker=WorkerId(f"w{rank}"),
            generation=Generation(1),
            step=StepNo(step),
            rank=Rank(rank),
            metrics={"loss": loss if step == 4 else 0.5},
            seconds=0.1,
        )
        for step in range(steps)
        for rank in range(2)
    ]
    return Ledger([*commits, *more])


def struck(kind: str = "worker") -> list[Record]:
    fault = FaultInjected(
        at=Instant(3.0),
        fault="plan-1",
        worker=WorkerId("w1"),
        rank=Rank(1),
        step=StepNo(3),
        stage="forward",
        how="sigkill",
    )
    closed = IncidentClosed(
        at=Instant(4.0),
        incident=1,
        generation=Generation(2),
        step=StepNo(3),
        kind=kind,
        ranks=[Rank(1)],
        cause="",
        rung="fork",
        faults=1,
        detect=0.1,
        abort=0.1,
        regroup=0.1,
        hydrate=0.1,
        redo=0.1,
        total=0.5,
        steps_lost=0,
        hydrated_bytes=0,
        opened_at=Instant(3.1),
        fault_at=Instant(3.0),
    )
    return [fault, closed]


ALONE = JobRun(0, ledger(), "", 1.0)


@pytest.mark.parametrize(
    ("run", "cause"),
    [
        (JobRun(None, ledger(), "", 9.0), "the training did not end within 9 s: its newest step is 4"),
        (JobRun(1, ledger(), "", 9.0), "the training ended with code 1: its newest step is 4"),
        (
            JobRun(0, ledger(*struck(), loss=2.0), "", 9.0),
            "not bitwise equal to the undisturbed run: step 4, rank 0: loss is 2.0 and 1.0",
        ),
        (
            JobRun(0, ledger(*struck(), steps=4), "", 9.0),
            "not bitwise equal to the undisturbed run: step 4, rank 0 was committed in one of the runs only",
        ),
        (JobRun(0, ledger(), "", 9.0), "rank 1 was not struck at forward of step 3"),
        (JobRun(0, ledger(struck()[0]), "", 9.0), "no incident of kind hang is in the records"),
        (JobRun(0, ledger(*struck("worker")), "", 9.0), "no incident of kind hang is in the records"),
    ],
)
def test_a_struck_training_is_ok_only_if_all_was_struck_mended_and_equal(run: JobRun, cause: str) -> None:
    judged = judge_struck(run, ALONE, [BLOW], kind="hang")
    assert (judged.status, judged.cause) == (FAILED, cause)
    assert unstruck(ledger(struck()[0]), [BLOW]) == ""
    assert judge_struck(JobRun(0, ledger(*struck("hang")), "", 9.0), ALONE, [BLOW], kind="hang") == Judgement(
        OK, "1 faults (forward) mended, bitwise equal; 0.50 s each, at most 0.50"
    )


def test_a_lost_nodes_newest_records_may_be_lost_with_it_and_its_numbers_may_not_differ() -> None:
    lost = frozenset({Rank(0), Rank(1)})
    assert judge_struck(JobRun(0, ledger(*struck(), steps=4), "", 1.0), ALONE, unsaid=lost).status is OK
    assert judge_struck(JobRun(0, ledger(*struck(), loss=2.0), "", 1.0), ALONE, unsaid=lost).status is FAILED


def test_an_undisturbed_run_without_its_steps_proves_nothing() -> None:
    assert judge_alone(ALONE, steps=5).status is OK
    assert judge_alone(ALONE, steps=6).status is FAILED
    assert judge_alone(ALONE._replace(code=1), steps=5).status is FAILED
    assert judge_alone(ALONE._replace(code=None), steps=5).status is FAILED


@pytest.mark.parametrize(
    ("blocks", "status"),
    [
        ({"plain": [100.0], "regrow": [140.0]}, OK),
        ({"plain": [100.0], "regrow": [160.0]}, FAILED),
        ({"plain": [2.0], "regrow": [11.0]}, OK),
        ({"plain": [100.0], "regrow": []}, FAILED),
    ],
)
def test_a_step_may_take_half_as_long_again_or_ten_milliseconds_more(
    blocks: dict[str, list[float]], status: CheckStatus
) -> None:
    assert judge_steady(blocks).status is status


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
