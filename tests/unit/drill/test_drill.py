"""`regrow doctor --train`: what results of checks come to."""

import socket
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from regrow.core.ids import Generation, Instant, Rank, StepNo, WorkerId
from regrow.core.records import FaultInjected, IncidentClosed, Record, StepCommitted
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
from regrow.drill.verdict import CheckResult, CheckStatus, Judgement, code_of, conclude
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
        OK, "1 fault (forward) mended, bitwise equal; 0.50 s each, at most 0.50"
    )


def test_a_lost_nodes_newest_records_may_be_lost_with_it_and_its_numbers_may_not_differ() -> None:
    lost = frozenset({Rank(0), Rank(1)})
    assert judge_struck(JobRun(0, ledger(*struck(), steps=4), "", 1.0), ALONE, incomplete=lost).status is OK
    assert judge_struck(JobRun(0, ledger(*struck(), loss=2.0), "", 1.0), ALONE, incomplete=lost).status is FAILED


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
