"""Rules about the lines of workers: what a file may say, what is counted, and that no pattern holds anybody up."""

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.membership.membership_job import Job

from regrow.core.errors import UsageError
from regrow.core.ids import NodeId, Rank, WorkerId
from regrow.core.messages import orders
from regrow.core.messages.log_rules import LogRule, LogRuleNews, LogRuleOrder, LogRulesNoted
from regrow.core.records import IncidentOpened, NodeJudged, NodeQuarantined, Noted
from regrow.core.verdicts import Action, Severity
from regrow.health import log_watch
from regrow.health.log_rules import LONGEST_PATTERN, MOST_RULES, ActiveRules, load_rules, parse_rules
from regrow.health.log_watch import LogWatch

ROOT = Path(__file__).parents[3]
W = WorkerId("w1")


def test_a_rule_has_defaults_and_all_of_it_can_be_said() -> None:
    text = """
        [[rule]]
        name = "nccl"
        pattern = 'NCCL WARN'
        [[rule]]
        name = "beat"
        pattern = 'step \\d+'
        at_least = 2
        within = "90s"
        first_within = "20min"
        severity = "leave"
        action = "replace"
    """
    first, second = parse_rules(text)
    assert first == LogRule("nccl", "NCCL WARN", at_most=0)
    assert second == LogRule(
        "beat",
        r"step \d+",
        at_least=2,
        within=90.0,
        first_within=1200.0,
        severity=Severity.LEAVE,
        action=Action.REPLACE,
    )
    assert second.replaces and not first.replaces


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has 0 rules"),
        ("[[rule]", "is not TOML"),
        ("[rule]\nname = 'a'", "'rule' is not a list of tables"),
        ("[[rules]]", "unknown key 'rules'"),
        ("[[rule]]\npattern = 'a'", "rule 1: name is missing"),
        ("[[rule]]\nname = 'a b'\npattern = 'a'", r"rule 1 \('a b'\): name = 'a b' cannot name a rule"),
        ("[[rule]]\nname = 'a'", r"rule 1 \('a'\): pattern is missing"),
        ("[[rule]]\nname = 'a'\npattern = 'b('", "is no regular expression: missing \\)"),
        ("[[rule]]\nname = 'a'\npattern = '.*'", "fits every line"),
        (f"[[rule]]\nname = 'a'\npattern = '{'x' * (LONGEST_PATTERN + 1)}'", "pattern has 501 characters"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\nat_most = -1", "at_most = -1 is no number of lines"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\nat_most = true", "at_most = True is no number of lines"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\nat_least = 0", "at_least = 0 is no number of lines"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\nat_least = 1", "at_least needs to know in how much time"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\nat_least = 1\nat_most = 1\nwithin = '1s'", "exclude each other"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\nwithin = 'soon'", "within: "),
        ("[[rule]]\nname = 'a'\npattern = 'b'\nfirst_within = '1s'", "first_within is for lines that must come"),
        (
            "[[rule]]\nname = 'a'\npattern = 'b'\nat_least = 1\nwithin = '1s'\nfirst_within = 0",
            "first_within = 0 is no",
        ),
        ("[[rule]]\nname = 'a'\npattern = 'b'\nwithin = 5", "within = 5 is no time"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\nseverity = 'ok'", "severity = 'ok' is not known"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\naction = 'kill'", "action = 'kill' is not known"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\nevery = 1", "unknown key 'every'"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\n" * 2, "two rules called 'a'"),
        ("[[rule]]\nname = 'a'\npattern = 'b'\n" * (MOST_RULES + 1), "has 65 rules"),
    ],
)
def test_a_bad_file_is_refused_with_file_rule_and_cure(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        parse_rules(text, source="my.toml")
    assert "my.toml" in refused.value.cause and refused.value.hint


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--log-rules .*none.toml cannot be read"):
        load_rules(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not text"):
        load_rules(tmp_path / "binary.toml")


# --- counting --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 5), st.floats(1.0, 10.0), st.lists(st.floats(0.01, 6.0), max_size=60))
def test_more_than_at_most_within_the_window_is_told_once_until_there_are_fewer(
    most: int, window: float, gaps: list[float]
) -> None:
    rule = LogRule("many", "x", at_most=most, within=window)
    active, now, times, over = ActiveRules([rule]), 0.0, list[float](), False
    for gap in gaps:
        now += gap
        times.append(now)
        beyond = sum(at > now - window for at in times) > most
        news = active.matched(rule, W, "a line", now)
        assert (news is not None) == (beyond and not over)
        assert news is None or (news.broken and news.line == "a line")
        over = beyond
    assert active.late(now + 1e9) == [] and active.next_deadline() is None


@given(st.integers(1, 4), st.floats(1.0, 10.0), st.lists(st.floats(0.01, 6.0), min_size=1, max_size=60))
def test_fewer_than_at_least_within_the_window_is_told_at_its_end_and_so_is_that_they_come_again(
    least: int, window: float, gaps: list[float]
) -> None:
    rule = LogRule("beat", "x", at_least=least, within=window)
    active, now, times = ActiveRules([rule]), 0.0, list[float]()
    assert active.late(1e9) == [], "it begins with the first"
    broken = False
    for gap in gaps:
        deadline = active.next_deadline()
        if deadline is not None and deadline <= now + gap:
            assert active.late(deadline - 1e-3) == []
            (late,) = active.late(deadline)
            assert late.broken and late.missing == deadline - times[-1]
            assert active.late(deadline) == [] and active.next_deadline() is None
            broken = True
        now += gap
        times.append(now)
        news = active.matched(rule, W, "a line", now)
        assert news is None or not news.broken
        assert (news is not None) <= broken
        broken = broken and news is None
        enough = sum(at + window > now for at in times) >= least  # as the deadline is added up, and so rounded
        assert not (broken and enough)


def test_a_worker_that_has_ended_is_not_missed() -> None:
    rule = LogRule("beat", "x", at_least=1, within=5.0)
    active = ActiveRules([rule])
    active.matched(rule, W, "", 1.0)
    assert active.next_deadline() == 6.0
    active.ended(W)
    assert active.next_deadline() is None and active.late(100.0) == []


def test_a_first_line_that_never_comes_is_missed_where_the_rule_says_by_when() -> None:
    rule, silent = LogRule("beat", "x", at_least=2, within=5.0, first_within=60.0), WorkerId("w2")
    active = ActiveRules([rule, LogRule("other", "y", at_least=1, within=5.0), LogRule("never", "z", at_most=0)])
    for worker, now in ((W, 100.0), (silent, 110.0), (W, 120.0)):
        active.began(worker, now)
    assert active.next_deadline() == 160.0
    assert active.matched(rule, W, "a line", 150.0) is None
    assert active.next_deadline() == 155.0, "from the first on the window counts"
    active.ended(W)
    assert active.late(169.0) == [] and active.next_deadline() == 170.0
    (late,) = active.late(171.0)
    assert (late.worker, late.broken, late.missing, late.never) == (silent, True, 61.0, True)
    assert active.late(999.0) == [] and active.next_deadline() is None
    again = active.matched(rule, silent, "a line", 1000.0)
    assert again is not None and not again.broken
    assert active.next_deadline() == 1005.0


# --- lines -----------------------------------------------------------------------------------------------------------


def watch(*rules: LogRule) -> LogWatch:
    return LogWatch(LogRuleOrder(NodeId("n0"), list(rules)))


def test_a_line_is_told_with_its_rank_and_nothing_in_it_moves_a_cursor() -> None:
    rule = LogRule("warn", "NCCL WARN", at_most=0, severity=Severity.LEAVE, action=Action.RESET)
    (told,) = watch(rule).line(b"w1\t3\t\x1b[31mNCCL WARN\x07 " + b"x" * 500, 1.0)
    assert isinstance(told, LogRuleNews)
    assert (told.worker, told.rank, told.source, told.severity, told.action) == ("w1", 3, "log:warn", "leave", "reset")
    assert told.evidence.startswith("rank 3 has printed:  [31mNCCL WARN  xxx") and len(told.evidence) < 250
    assert told.evidence.isprintable()


def test_a_rank_that_prints_nothing_is_told_of_with_its_number() -> None:
    found = watch(LogRule("beat", "^step", at_least=1, within=5.0, first_within=60.0))
    assert list(found.line(b"w1\t3", 100.0)) == []
    assert found.next_deadline == 160.0
    (told,) = found.late(161.0)
    assert isinstance(told, LogRuleNews)
    assert (told.rank, told.severity) == (3, "suspect")
    assert told.evidence == "rank 3 has printed nothing that fits since it began 61 s ago"
    (told,) = found.line(b"w1\t3\tstep 1", 200.0)
    assert isinstance(told, LogRuleNews)
    assert (told.severity, told.evidence) == ("ok", "rank 3 prints it now: step 1")


@pytest.fixture
def alarmed() -> Iterator[None]:
    """Its alarms, whichever clock they go by, end a search as in the process itself."""
    before = {each: signal.signal(each, log_watch._too_long) for each in (signal.SIGVTALRM, signal.SIGALRM)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("alarmed")
def test_a_pattern_that_takes_for_ever_is_switched_off_and_the_others_go_on() -> None:
    found = watch(LogRule("bad", "(a+)+$", at_most=0), LogRule("good", "b", at_most=1))
    began = time.thread_time()
    (noted,) = found.line(b"w1\t0\t" + b"a" * 60 + b"b", 1.0)
    assert isinstance(noted, LogRulesNoted) and "n0 applies the log rule bad no more" in noted.text
    (told,) = found.line(b"w1\t0\t" + b"a" * 60 + b"b", 2.0)
    assert isinstance(told, LogRuleNews) and "more than 1 such lines, the last: aaa" in told.evidence
    assert time.thread_time() - began < 20.0, "alone it takes longer than the world"


class Unscheduled:
    """A pattern that is no work at all, on a machine that lets nobody look for it for a while."""

    def search(self, _: str) -> None:
        time.sleep(3 * log_watch.LONGEST_SEARCH_S)


@pytest.mark.usefixtures("alarmed")
def test_a_rule_is_not_switched_off_because_the_machine_is_busy() -> None:
    found = watch(LogRule("good", "b", at_most=0))
    found._patterns = [(rule, cast(re.Pattern[str], Unscheduled())) for rule, _ in found._patterns]
    assert list(found.line(b"w1\t0\tbusy", 1.0)) == []


def test_the_end_of_a_worker_and_odd_bytes_are_no_error() -> None:
    found = watch(LogRule("beat", "x", at_least=1, within=5.0))
    assert list(found.line(b"w1\t0\t\xff\xfe x\ty", 1.0)) == []
    assert list(found.line(b"w1", 2.0)) == []
    assert list(found.late(100.0)) == [] and found.next_deadline is None


LINES = {
    "node3:411:902 [2] transport/net_ib.cc:1040 NCCL WARN NET/IB : Got completion with error 12": "nccl-warn",
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:2026": "nccl-error",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed": "nccl-error",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE": "nccl-watchdog",
    "RuntimeError: CUDA error: device-side assert triggered": "cuda-error",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "ecc",
    "NVRM: Xid (PCI:0000:65:00): 79, pid=1234, GPU has fallen off the bus.": "xid",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm": "cublas-cudnn",
    "OSError: [Errno 28] No space left on device": "disk",
    "step 12: loss 3.1, lr 1e-4, NCCL version 2.29": "",
    "[rank1]: saved checkpoint; 0 ECC errors": "",
}


@pytest.mark.parametrize(("line", "name"), LINES.items())
def test_the_list_that_is_shipped_finds_what_it_says(line: str, name: str) -> None:
    found = watch(*load_rules(ROOT / "deploy/log-rules/nvidia.toml"))
    told = {each.source for each in found.line(f"w1\t0\t{line}".encode(), 1.0) if isinstance(each, LogRuleNews)}
    assert (f"log:{name}" in told) if name else not told


# --- what follows ----------------------------------------------------------------------------------------------------


def printed(job: Job, rank: int, severity: Severity = Severity.SUSPECT, action: Action = Action.NONE) -> None:
    worker = job.of(rank)
    node = job.machine.roster.workers[worker].node
    job.tell(LogRuleNews(node, worker, Rank(rank), "log:bad", severity, action, f"rank {rank} has printed: bad"))


def test_a_broken_rule_is_a_verdict_and_nothing_else() -> None:
    job = Job(4, nodes=2).trained(4)
    printed(job, 3)
    told = job.last(NodeJudged)
    assert (told.node, told.device, told.severity, told.source) == ("n1", "slot1", "suspect", "log:bad")
    assert not job.all(orders.FenceWorker) and not job.all(IncidentOpened)
    printed(job, 3, Severity.OK)
    assert not any(node.verdicts for node in job.machine.snapshot().nodes)


def test_leave_counts_against_the_node_as_an_examination_does() -> None:
    job = Job(4, nodes=2, slots=4).trained(4)
    printed(job, 3, Severity.LEAVE)
    assert not job.all(NodeQuarantined)
    printed(job, 2, Severity.LEAVE)
    assert [each.node for each in job.all(NodeQuarantined)] == ["n1"]


def test_only_replace_is_a_fault_of_the_rank_and_only_while_it_trains() -> None:
    job = Job(4).trained(4)
    lost = job.of(2)
    printed(job, 2, action=Action.REPLACE)
    assert [each.worker for each in job.all(orders.FenceWorker)] == [lost]
    opened = job.last(IncidentOpened)
    assert (opened.kind, opened.ranks) == ("log", [2]) and "rank 2 has printed: bad" in opened.cause
    printed(job, 2, action=Action.REPLACE)
    assert len(job.all(orders.FenceWorker)) == 1


def test_the_last_words_of_a_worker_that_has_gone_are_heard() -> None:
    job = Job(4).trained(4)
    gone = job.of(2)
    job.exited(gone)
    job.tell(
        LogRuleNews(NodeId("n0"), gone, Rank(2), "log:x", Severity.SUSPECT, Action.REPLACE, "rank 2 has printed: x")
    )
    job.tell(LogRuleNews(NodeId("n9"), WorkerId("w99"), Rank(2), "log:x", Severity.FATAL, Action.REPLACE, "who?"))
    assert [(each.node, each.source) for each in job.all(NodeJudged)] == [("n0", "log:x")]
    assert not job.all(orders.FenceWorker)
    job.tell(LogRulesNoted(NodeId("n0"), "one is switched off"))
    assert "one is switched off" in [each.text for each in job.all(Noted)]
