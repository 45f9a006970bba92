"""Displays for people: sentences, curves, the picture on a terminal, the receipt."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.unit.observe.observe_records import FakeJob, commit

from regrow.core.ids import Generation, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.records import (
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    Record,
    ReplacementJudged,
    ReplicaCorrupted,
    StepCommitted,
    WorkerGone,
)
from regrow.launch.console import Console as Speaker
from regrow.observe.curve import draw_curve
from regrow.observe.ledger import Ledger
from regrow.observe.live import LiveView, PlainView, follow, open_view
from regrow.observe.receipt import Receipt, differences
from regrow.observe.scene import Scene, WorkerState
from regrow.observe.story import describe, mended, seconds


def _scene(records: list[Record]) -> Scene:
    scene = Scene()
    scene.add_all(records)
    return scene


def _console(width: int = 100, height: int = 30, *, terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=terminal, color_system=None)


def _text(console: Console) -> str:
    stream = console.file
    return stream.getvalue() if isinstance(stream, io.StringIO) else ""


def test_silent_corruption_is_told_with_its_place_and_counted() -> None:
    found = ReplicaCorrupted(1.0, StepNo(8), Rank(1), WorkerId("n0.w1"), NodeId("n0"), ["model.weight"], 2)
    assert describe(found) == (
        "the state of rank 1 was wrong before step 8, in model.weight: worker n0.w1, 2 corruptions on n0 so far"
    )
    assert Ledger([found]).corruptions == [found]


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ([], "replaceable: not proven yet"),
        ([ReplacementJudged(9.0, Rank(1), StepNo(4210))], "replaceable: last proven at step 4,210"),
        (
            [ReplacementJudged(9.0, Rank(1), StepNo(3)), ReplacementJudged(9.5, Rank(1), StepNo(9), "a [counter]")],
            "not replaceable by newcomers: a [counter]",
        ),
    ],
)
def test_the_picture_says_whether_newcomers_are_proven(found: list[Record], shown: str) -> None:
    console = _console()
    view = LiveView(console)
    view.scene.add_all([*FakeJob().run(3, kills={}), *found])
    console.print(view.draw())
    assert shown in _text(console)


def test_the_launcher_says_once_that_newcomers_are_proven_and_each_time_that_they_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    speaker = Speaker()
    for step in (3, 400):
        speaker.record(ReplacementJudged(9.0, Rank(1), StepNo(step)))
    speaker.record(ReplacementJudged(9.5, Rank(1), StepNo(500), "a counter"))
    told = "rank 1 is not replaceable by a newcomer, so from now on all start again instead: a counter"
    assert (
        capsys.readouterr().err
        == f"regrow: rank 1 is replaceable: proven at step 3 (the last proof: `regrow status`)\nregrow: {told}\n"
    )


def test_a_job_is_told_in_sentences() -> None:
    lines = [line for record in FakeJob().run(6, kills={3: 2}) if (line := describe(record)) is not None]
    assert lines[0] == "job job: 4 ranks on 1 node, 1 standby"
    assert "fault fault-1: sigkill strikes rank 2 in step 3, stage backward" in lines
    assert any(line.startswith("incident 1: mended by standby in 0.75 s (detect 10 ms, ") for line in lines)
    assert lines[-1] == "job ended with code 0"


def test_a_planned_change_is_no_incident() -> None:
    for record in FakeJob().run(6, kills={3: 2}):
        if isinstance(record, IncidentOpened):
            line = describe(msgspec.structs.replace(record, kind="move", cause="rank 2 from node0 to node1"))
            assert line == "change 1 in step 3: rank 2 from node0 to node1"
        elif isinstance(record, IncidentClosed):
            change = msgspec.structs.replace(record, kind="move", faults=0)
            assert (describe(change) or "").startswith("change 1 in 0.75 s (detect 10 ms, ")
            view = LiveView(console := _console())
            view.scene.add_all([*FakeJob().run(2, kills={}), change])
            console.print(view.draw())
            assert "incidents: 0, changes: 1, steps lost: 0" in _text(console)


def test_a_diagnosis_is_told_with_the_end() -> None:
    assert describe(JobEnded(1.0, 1, "out of budget")) == "job ended with code 1: out of budget"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.003, "3 ms"), (0.0996, "0.10 s"), (9.996, "10.0 s"), (99.96, "1:39 min"), (247.0, "4:07 min")],
)
def test_a_duration_is_written_in_the_unit_that_suits_it(value: float, text: str) -> None:
    assert seconds(value) == text


def test_a_falling_curve_starts_at_the_top_left_and_ends_at_the_bottom_right() -> None:
    lines = draw_curve([float(-x) for x in range(100)], width=20, height=5)
    assert [len(line) for line in lines] == [20] * 5
    assert lines[0][0] != " "
    assert lines[0][-1] == " "
    assert lines[-1][-1] != " "
    assert lines[-1][0] == " "


def test_a_curve_without_values_is_blank_and_a_nan_leaves_a_gap() -> None:
    assert draw_curve([], width=4, height=2) == ["    ", "    "]
    assert draw_curve([1.0, 1.0, float("nan"), float("nan"), 1.0, 1.0], width=3, height=1)[0][1] == " "


def test_a_killed_rank_is_lost_until_the_standby_stands_in_its_place() -> None:
    records = FakeJob().run(6, kills={3: 2})
    gone = next(index for index, record in enumerate(records) if isinstance(record, WorkerGone))
    scene = _scene(records[: gone + 2])
    assert scene.places[Rank(2)].state is WorkerState.LOST
    assert scene.places[Rank(0)].state is WorkerState.MENDING
    scene.add_all(records[gone + 2 : -1])
    assert [scene.places[Rank(rank)].state for rank in range(4)] == [WorkerState.TRAINING] * 4
    assert scene.places[Rank(2)].worker == "w4"
    assert [standby.worker for standby in scene.standbys] == ["w5"]


def test_throughput_is_counted_over_the_whole_world() -> None:
    scene = _scene(FakeJob(step=0.5).run(10, kills={}))
    assert scene.steps_per_second() == pytest.approx(2.0)
    assert scene.samples_per_step() == 4 * 8


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24), (60, 16)])
def test_the_picture_fits_the_terminal(width: int, height: int) -> None:
    console = _console(width, height)
    view = LiveView(console, title="gpt", until=40, clock=lambda: 30.0)
    view.scene.add_all(FakeJob().run(40, kills={5: 0, 15: 1, 25: 2})[:-1])
    console.print(view.draw())
    lines = _text(console).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    if width >= 80:
        text = "\n".join(lines)
        for word in (
            "training",
            "incidents: 3",
            "standby",
            "step 40 of 40",
            "samples/s",
            "goodput",
            "hydrate",
            "4004",
            "loss",
        ):
            assert word in text


def test_a_cause_with_brackets_and_lines_is_shown_as_it_is() -> None:
    cause = "collective failed: [/gloo/pair.cc:537] reset\nmore of it"
    console = _console(140)
    view = LiveView(console)
    opened = IncidentOpened(1.0, 1, Generation(1), StepNo(3), "collective", [Rank(2)], cause)
    view.feed([FakeJob().run(3, kills={})[0], opened])
    console.print(view.draw())
    assert "rank 2: collective failed: [/gloo/pair.cc:537] reset " in _text(console)
    assert "more of it" not in _text(console)


def test_an_empty_picture_can_be_drawn_before_the_job_has_started() -> None:
    console = _console()
    console.print(LiveView(console).draw())
    assert "starting" in _text(console)


def test_without_a_terminal_there_are_lines() -> None:
    console = _console(terminal=False)
    now = 0.0
    view = open_view(console, plain=False, until=10)
    assert isinstance(view, PlainView)
    plain = PlainView(console, until=10, every=5.0, clock=lambda: now)
    with plain:
        for record in FakeJob().run(10, kills={4: 1}):
            now = record.at
            plain.feed([record])
    lines = _text(console).splitlines()
    assert sum("of 10, loss" in line for line in lines) == 2
    assert sum("mended by standby" in line for line in lines) == 1


def test_a_view_is_fed_from_a_jobs_files_to_the_last_line(tmp_path: Path) -> None:
    console = _console(terminal=False)
    looks = iter([True, False])
    (tmp_path / "events.jsonl").write_text('{"type":"JobEnded","at":1.0,"code":0,"diagnosis":""}\n')
    with PlainView(console) as view:
        follow(tmp_path, view, running=lambda: next(looks), every=0.0)
    assert "job ended with code 0" in _text(console)


def _receipt(
    disturbed: list[Record], alone: list[Record], *, digest: str | None = "a", other: str | None = "a"
) -> Receipt:
    return Receipt(Ledger(disturbed), Ledger(alone), digest, other, planned=1)


def test_two_equal_runs_are_bitwise_equal() -> None:
    receipt = _receipt(FakeJob().run(10, kills={4: 1}), FakeJob(start=99.0).run(10, kills={}))
    assert receipt.bitwise_equal
    assert receipt.recovered
    figures = receipt.figures()
    assert (figures["bitwise_equal"], figures["steps_lost"], figures["faults"]) == (1.0, 0.0, 1.0)
    assert figures["recovery_median_s"] == pytest.approx(0.75)


def test_one_bit_in_one_loss_of_one_rank_is_told() -> None:
    alone = FakeJob().run(10, kills={})
    at = next(index for index, record in enumerate(alone) if isinstance(record, StepCommitted))
    alone[at] = commit(0, 0, alone[at].at, loss=1.0000000000000002)
    receipt = _receipt(FakeJob().run(10, kills={4: 1}), alone)
    assert not receipt.bitwise_equal
    assert differences(receipt.disturbed, receipt.alone) == ["step 0, rank 0: loss is 1.0 and 1.0000000000000002"]


def test_a_missing_step_or_digest_is_not_equal() -> None:
    disturbed, alone = FakeJob().run(10, kills={4: 1}), FakeJob().run(10, kills={})
    assert not _receipt(disturbed, FakeJob().run(11, kills={})).bitwise_equal
    assert not _receipt(disturbed, alone, other="b").bitwise_equal
    assert not _receipt(disturbed, alone, digest=None, other=None).bitwise_equal
    assert not _receipt([], []).bitwise_equal


def test_a_fault_that_never_struck_or_a_job_that_failed_is_no_recovery() -> None:
    assert not _receipt(FakeJob().run(10, kills={}), FakeJob().run(10, kills={})).recovered
    assert not _receipt(FakeJob().run(10, kills={4: 1}, code=75), FakeJob().run(10, kills={})).recovered


def test_a_redone_step_counts_as_lost_even_where_no_incident_says_so() -> None:
    disturbed = [JobStarted(0.0, JobId("j"), 1, 1, 0, []), commit(0, 0, 1.0), commit(0, 0, 2.0, generation=2)]
    assert _receipt(disturbed, []).steps_lost == 1


def test_the_receipt_prints_its_verdict() -> None:
    console = _console()
    _receipt(FakeJob().run(10, kills={4: 1}), FakeJob().run(10, kills={})).print(console)
    text = _text(console)
    assert "identical (40 compared)" in text
    assert "bitwise equal" in text
    assert "1 of 1 struck; all mended" in text
    console = _console()
    _receipt(FakeJob().run(10, kills={4: 1}), FakeJob().run(9, kills={}), other=None).print(console)
    assert "step 9, rank 0: committed in only one of the runs" in _text(console)


def test_a_worker_that_ends_well_is_not_told() -> None:
    assert describe(WorkerGone(1.0, WorkerId("w0"), Rank(0), 0, "")) is None


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "rank 1 exited with code 1: a standby took its place; step 7 goes on after 0.40 s, no step lost"),
        (
            {"rung": "shrink", "before": 3, "after": 2, "steps_lost": 1},
            "the others go on without it, 3 to 2 replicas; ",
        ),
        ({"rung": "restart", "steps_lost": 2}, "all workers started again; step 7 goes on after 0.40 s, 2 steps lost"),
        (
            {"faults": 0, "kind": "grow", "rung": "grow", "cause": "regrow scale", "before": 1, "after": 3},
            "grown from 1 to 3 replicas at step 7 (regrow scale); pause 0.40 s",
        ),
        (
            {"faults": 0, "before": 2, "after": 1, "cause": "x"},
            "shrunk from 2 to 1 replica at step 7 (x); pause 0.40 s",
        ),
        ({"faults": 0, "rung": "node", "cause": "a drain"}, "moved at step 7 (a drain); pause 0.40 s"),
        ({"rung": "all"}, "all workers started again with the state that was in memory; step 7 goes on"),
        ({"rung": "all", "steps_lost": 2}, "goes on after 0.40 s, 2 steps lost"),
        (
            {"faults": 2, "ranks": [Rank(1), Rank(0)]},
            "rank 1 exited with code 1 (2 faults mended together: ranks 0, 1): a standby took its place; step 7",
        ),
        (
            {"faults": 2, "ranks": []},
            "rank 1 exited with code 1 (2 faults mended together): a standby took its place; step 7",
        ),
        ({"rung": "restart", "steps_lost": 1}, "goes on after 0.40 s, 1 step lost"),
    ],
)
def test_the_end_of_an_incident_is_one_sentence_as_a_person_says_it(changed: dict[str, Any], sentence: str) -> None:
    fields: dict[str, Any] = {
        **dict.fromkeys(("detect", "abort", "regroup", "hydrate", "redo"), 0.1),
        **{"at": 1.0, "incident": 1, "generation": Generation(2), "step": StepNo(7), "kind": "exit"},
        **{"ranks": [Rank(1)], "cause": "rank 1 exited with code 1", "rung": "standby", "faults": 1, "total": 0.4},
        **{"steps_lost": 0, "hydrated_bytes": 0, "opened_at": 0.6, "fault_at": 0.6},
    }
    closed = IncidentClosed(**fields | changed)
    assert sentence in mended(closed)
