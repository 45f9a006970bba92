"""A run told in plain words, from its records."""

from pathlib import Path

import msgspec
import pytest

from regrow.cli import main
from regrow.core.ids import Generation, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.records import (
    FaultInjected,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    Record,
    ReplacementJudged,
    ScaleRefused,
    StepCommitted,
    WorkerGone,
    WorkerSpawned,
    WorldChanged,
)
from regrow.observe.run_story import lost_workers, run_lines


def opened(incident: int, at: float) -> IncidentOpened:
    return IncidentOpened(at, incident, Generation(incident), StepNo(3), "exit", [Rank(1)], "its node was lost\nmore")


def closed(incident: int, at: float, *, rung: str = "standby", faults: int = 1, total: float = 0.5) -> IncidentClosed:
    return IncidentClosed(
        at,
        incident,
        Generation(incident),
        StepNo(3),
        "exit" if faults else "grow",
        [Rank(1)],
        "rank 1 was ended by SIGKILL" if faults else "somebody asked for it",
        rung,
        faults,
        0.01,
        0.02,
        0.3,
        0.1,
        0.07,
        total,
        0,
        12_300_000,
        at - total,
        at - total,
    )


def commits(steps: int) -> list[Record]:
    return [
        StepCommitted(10.0 + step + rank / 10, StepNo(step), Rank(rank), WorkerId(f"w{rank}"), Generation(1), 0.9, {})
        for step in range(steps)
        for rank in range(2)
    ]


START = JobStarted(5.0, JobId("run"), 2, 2, 1, ["train.py", "--lr", "1"])


def text(*records: Record, live: bool = False) -> str:
    return "\n".join(run_lines(records, live=live))


def test_incidents_are_told_once_with_cause_rung_stages_and_cost() -> None:
    told = text(START, *commits(4), opened(1, 13.5), closed(1, 14.0), JobEnded(75.0, 0, ""))
    assert told.count("rank 1") == 1
    assert (
        "+0:00:09  step 3: rank 1 was ended by SIGKILL\n"
        "          mended by standby in 0.50 s "
        "(detect 10 ms, abort 20 ms, regroup 0.30 s, hydrate 0.10 s, redo 70 ms)\n"
        "          no committed step lost, 12.3 MB of state received\n"
    ) in told
    assert "+0:01:10  job ended with code 0" in told
    assert "1 incident cost 0.50 s: 1 by standby; no committed step lost, 0 computed again" in told
    assert "4 steps committed in 4.00 s" in told


def test_a_replacement_that_nobody_had_compared_is_called_believed() -> None:
    believed = "no replacement was compared with its rank"
    proven = ReplacementJudged(12.0, Rank(1), StepNo(2))
    refuted = ReplacementJudged(12.0, Rank(1), StepNo(2), "the output of 0 (Linear) differs")
    assert believed in text(START, *commits(4), closed(1, 14.0))
    assert believed in text(START, *commits(4), closed(1, 14.0, rung="fork"))
    assert believed not in text(START, *commits(4), closed(1, 14.0, rung="retry"))
    assert believed not in text(START, *commits(4), proven, closed(1, 14.0))
    assert believed not in text(START, *commits(4), refuted, closed(1, 14.0))


def test_what_a_newcomer_would_compute_otherwise_is_told_once_with_what_follows() -> None:
    refuted = ReplacementJudged(12.0, Rank(1), StepNo(2), "the output of 0 (Linear) differs")
    told = text(START, *commits(4), refuted)
    assert told.count("so from now on all start again instead: the output of 0 (Linear) differs") == 1


def test_what_was_not_mended_is_said_and_who_it_struck() -> None:
    told = text(START, opened(1, 6.0))
    assert "+0:00:01  step 3: rank 1: its node was lost\n          not mended" in told
    assert "its end was not written down" in told
    assert "no incident" not in told
    assert "it still goes on" in text(START, live=True)
    assert "no incident" in text(START, live=True)


def test_several_incidents_and_changes_of_the_world_are_added_up() -> None:
    told = text(
        START,
        WorldChanged(8.0, Generation(2), StepNo(2), "grow", 2, 4, "regrow scale"),
        closed(1, 9.0, rung="grow", faults=0, total=0.2),
        closed(2, 20.0, total=1.0),
        closed(3, 30.0, rung="fork", total=3.0),
        closed(4, 40.0, total=1.5),
        ScaleRefused(41.0, 9, "more than the maximum of 4"),
        FaultInjected(42.0, "f1", WorkerId("w1"), Rank(1), StepNo(7), "now", "sigkill"),
    )
    assert "step 2: the world grows, 2 → 4 replicas: regrow scale" in told
    assert "the other ranks pause for 0.20 s" in told
    assert "3 incidents cost 5.50 s in all, 1.50 s each (median): 2 by standby, 1 by fork" in told
    assert "1 planned change cost 0.20 s" in told
    assert "9 replicas were asked for and refused: more than the maximum of 4" in told
    assert "fault f1: sigkill strikes rank 1" in told


def test_the_node_that_loses_workers_is_seen() -> None:
    def spawned(worker: str, node: str) -> WorkerSpawned:
        return WorkerSpawned(1.0, WorkerId(worker), NodeId(node), "rank", Rank(0), Generation(1))

    records: list[Record] = [START, spawned("a", "node0"), spawned("b", "node1"), spawned("c", "node1")]
    records += [WorkerGone(2.0, WorkerId(worker), Rank(0), -9, "") for worker in ("a", "b", "c")]
    records += [WorkerGone(3.0, WorkerId("standby"), None, -15, ""), WorkerGone(3.0, WorkerId("b"), Rank(0), 0, "")]
    assert lost_workers(records) == {"node1": 2, "node0": 1}
    assert "lost workers by node: node1 2, node0 1" in text(*records)


def test_the_command_reads_a_file_of_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"\n".join(msgspec.json.encode(each) for each in (START, closed(1, 14.0))) + b"\n")
    assert main(["story", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "+0:00:00  job run: 2 ranks on 2 nodes, 1 standby\n          train.py --lr 1\n" in shown
    assert "mended by standby in 0.50 s" in shown
    assert main(["story", str(tmp_path / "nowhere")]) == 2
