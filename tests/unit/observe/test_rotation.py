"""Files of records stay small in a job that lasts for ever, and no incident is lost."""

import os
from pathlib import Path

import msgspec
import pytest
from tests.unit.observe.observe_records import commit

from regrow.agent.committed_steps import StepsFile
from regrow.core.config import record_limits
from regrow.core.errors import UsageError
from regrow.core.ids import Generation, Instant, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.records import (
    CheckpointSaved,
    GenerationFormed,
    IncidentOpened,
    JobStarted,
    Noted,
    Record,
    StepCommitted,
    WorkerSpawned,
    WorldChanged,
)
from regrow.core.rotation import RecordLimits, rotate, set_aside
from regrow.launch.verifying import find_run_on_one_clock
from regrow.observe import record as recording
from regrow.observe.goodput import Spent, account
from regrow.observe.order_proof import prove
from regrow.observe.reads import History, Missing, RunRecords
from regrow.observe.record import EventWriter
from regrow.observe.tail import RecordTail, read_records, read_run
from regrow.observe.thinning import thin_part

SMALL = RecordLimits(part=2_000, parts=2)


def incident(number: int) -> IncidentOpened:
    return IncidentOpened(float(number), number, Generation(1), StepNo(number), "exit", [Rank(0)], "it died")


def writes(path: Path, *records: Record, limits: RecordLimits = SMALL) -> None:
    with EventWriter(path, complain=pytest.fail, limits=limits) as writer:
        for each in records:
            writer.write(each)


def course(until: int) -> list[Record]:
    """An incident among many lines that are of no use later."""
    found: list[Record] = []
    for number in range(until):
        found.append(incident(number))
        found += [Noted(number + at / 10, "a line as any other") for at in range(1, 6)]
    return found


def test_a_full_file_is_set_aside_and_all_parts_are_read_in_order(tmp_path: Path) -> None:
    records = [Noted(float(number), f"line {number}") for number in range(200)]
    writes(tmp_path / "events.jsonl", *records, limits=RecordLimits(2_000, 100))
    parts = set_aside(tmp_path / "events.jsonl")
    assert [part.number for part in parts] == list(range(1, len(parts) + 1)) and len(parts) > 5
    assert all(part.path.stat().st_size < 2_200 for part in parts)
    assert read_records(tmp_path) == records


def test_old_parts_keep_every_incident_and_little_else(tmp_path: Path) -> None:
    path, records = tmp_path / "events.jsonl", course(100)
    writes(path, *records)
    read = read_records(tmp_path)
    assert [each for each in read if isinstance(each, IncidentOpened)] == [
        each for each in records if isinstance(each, IncidentOpened)
    ]
    notes = [each for each in read if isinstance(each, Noted)]
    assert 0 < len(notes) < 60 and notes == [each for each in records if isinstance(each, Noted)][-len(notes) :]
    assert not list(tmp_path.glob("*.thinned"))


def test_the_newest_membership_of_an_old_part_stays_with_its_nodes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    spawned = [WorkerSpawned(1.0, WorkerId(f"w{n}"), NodeId("node0"), "rank", Rank(n), Generation(1)) for n in range(3)]
    formed = [GenerationFormed(2.0 + n, Generation(n), StepNo(0), {"0": WorkerId(f"w{n}")}) for n in range(3)]
    changed = WorldChanged(6.0, Generation(3), StepNo(4), "shrink", 2, 1, "somebody asked")
    writes(
        path, *spawned, *formed, CheckpointSaved(5.0, StepNo(3), "a folder", 1, 1.0), changed, limits=RecordLimits(0)
    )
    thin_part(path)
    assert read_records(tmp_path) == [spawned[2], formed[2], changed]
    content = path.read_bytes()
    thin_part(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("at", range(6))
def test_a_writer_that_is_killed_while_it_rotates_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The kill falls before each call that changes a file."""

    class Killed(BaseException):
        pass

    path, records, calls = tmp_path / "events.jsonl", course(60), iter(range(1000))
    real = {name: getattr(os, name) for name in ("rename", "fsync")}
    turns = [0]

    def until_killed(name: str):  # type: ignore[no-untyped-def]
        def call(*args: object) -> object:
            turns[0] += 1
            if turns[0] == 8 + at:
                raise Killed
            return real[name](*args)

        return call

    for name in real:
        monkeypatch.setattr(os, name, until_killed(name))
    written = 0
    while written < len(records):
        try:
            with EventWriter(path, complain=pytest.fail, limits=SMALL) as writer:
                for each in records[written:]:
                    written += 1
                    writer.write(each)
        except Killed:
            assert next(calls) == 0
    read = read_records(tmp_path)
    assert [each.incident for each in read if isinstance(each, IncidentOpened)] == list(range(60))
    assert len(read) == len({(each.at, type(each)) for each in read})


def test_a_follower_reads_each_line_once_while_files_are_set_aside(tmp_path: Path) -> None:
    tail, seen = RecordTail(tmp_path), list[Record]()
    records = course(100)
    with EventWriter(tmp_path / "events.jsonl", complain=pytest.fail, limits=SMALL) as writer:
        for number, each in enumerate(records):
            writer.write(each)
            if number % 17 == 0:
                seen += tail.poll()
    assert seen + tail.poll() == records


def test_a_file_that_is_set_aside_as_it_is_read_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, records = tmp_path / "events.jsonl", [Noted(float(number), "x") for number in range(4)]
    writes(path, *records[:2], limits=RecordLimits(0))
    real = Path.open

    def opened(self: Path, *args: object, **words: object):  # type: ignore[no-untyped-def]
        stream = real(self, *args, **words)  # type: ignore[call-overload]
        if self == path and not set_aside(path):
            rotate(path, RecordLimits(), lambda part: None)
            writes(path, *records[2:], limits=RecordLimits(0))
        return stream

    monkeypatch.setattr(Path, "open", opened)
    tail = RecordTail(tmp_path)
    assert [*tail.poll(), *tail.poll()] == records


def test_a_file_that_cannot_be_set_aside_is_told_of_once_and_grows_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, limits: RecordLimits, drop: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(recording, "rotate", refuse)
    said: list[str] = []
    with EventWriter(tmp_path / "events.jsonl", complain=said.append, limits=SMALL) as writer:
        for each in course(60):
            writer.write(each)
    assert len(said) == 1 and "is not kept small: Operation not permitted" in said[0]
    assert len(read_records(tmp_path)) == 360


# --- steps ---------------------------------------------------------------------------------------------------------


def agents_lines(job_dir: Path, steps: int, limits: RecordLimits, *nodes: str) -> None:
    for rank, node in enumerate(nodes):
        file = StepsFile(job_dir / f"steps.{node}.jsonl", limits)
        for step in range(steps):
            file.add(commit(step, rank, 10.0 + step))
            file.flush()


def test_the_oldest_steps_go_first_and_those_that_are_told_of_have_no_holes(tmp_path: Path) -> None:
    agents_lines(tmp_path, 300, SMALL, "node0")
    parts = set_aside(tmp_path / "steps.node0.jsonl")
    assert len(parts) == 2 and parts[0].number > 5
    read = read_run(tmp_path, "a job")
    steps = [each.step for each in read.records if isinstance(each, StepCommitted)]
    assert steps == list(range(steps[0], 300)) and read.since == steps[0] > 0


def test_what_was_dropped_is_no_loss_of_a_sample_and_no_time_that_went_into_nothing(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "long"
    job.mkdir(parents=True)
    workers = {"0": WorkerId("w0"), "1": WorkerId("w1")}
    started = JobStarted(0.0, JobId("long"), 2, 2, 0, [])
    writes(job / "events.jsonl", started, GenerationFormed(9.0, Generation(1), StepNo(0), workers))
    agents_lines(job, 300, SMALL, "node0", "node1")
    run = read_run(job, "long")
    assert not any(missing.excuse == "" for missing in _missing(run))
    trimmed = find_run_on_one_clock(tmp_path / "jobs", str(job))
    found = account(trimmed.records)
    assert found.spent[Spent.FIRST_STEP] + found.spent[Spent.CAPACITY] < 0.1 * found.total
    assert found.total == pytest.approx(2 * (309.0 - (10.0 + run.since)))


def _missing(run: RunRecords) -> list[Missing]:
    found = [each for reads in History([run]).steps for each in reads.missing]
    assert len(found) == 2 * run.since
    assert prove([run]).reasons
    return found


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert record_limits() == RecordLimits(64 << 20, 16)
    monkeypatch.setenv("REGROW_RECORD_PART", "1MiB")
    monkeypatch.setenv("REGROW_RECORD_PARTS", "3")
    assert record_limits() == RecordLimits(1 << 20, 3)
    monkeypatch.setenv("REGROW_RECORD_PARTS", "none")
    with pytest.raises(UsageError, match="REGROW_RECORD_PARTS=none is no number of files"):
        record_limits()


def test_a_record_begins_with_its_type_which_is_what_old_parts_are_sorted_by() -> None:
    assert msgspec.json.encode(Noted(Instant(1.0), "x")).startswith(b'{"type":"Noted",')
