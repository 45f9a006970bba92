"""The ledger counts every committed number once and flatters nobody."""

from pathlib import Path

import msgspec
import pytest
from tests.unit.observe.observe_records import FakeJob, commit

from regrow.core.errors import ProtocolError
from regrow.core.ids import Generation, JobId, StepNo
from regrow.core.records import SCHEMA, GenerationFormed, IncidentClosed, JobStarted, Noted, StepCommitted
from regrow.observe.ledger import Ledger, last_committed, read_records, time_lost
from regrow.observe.tail import RecordTail


def _write(path: Path, *lines: str) -> None:
    with path.open("a") as stream:
        stream.write("".join(lines))


def _line(record: msgspec.Struct) -> str:
    return msgspec.json.encode(record).decode() + "\n"


def _formed(generation: int, at: float, step: int) -> GenerationFormed:
    return GenerationFormed(at, Generation(generation), StepNo(step), {})


def test_records_of_all_files_come_in_order_of_time(tmp_path: Path) -> None:
    _write(tmp_path / "events.jsonl", _line(Noted(1.0, "first")), _line(Noted(3.0, "last")))
    _write(tmp_path / "steps.node0.jsonl", _line(commit(0, 0, 2.0)))
    _write(tmp_path / "steps.node1.jsonl", _line(commit(0, 1, 2.5)))
    assert [record.at for record in read_records(tmp_path)] == [1.0, 2.0, 2.5, 3.0]


def test_fields_that_the_writer_adds_do_no_harm(tmp_path: Path) -> None:
    _write(tmp_path / "events.jsonl", '{"type":"Noted","at":1.0,"text":"x","worker":null,"time":1e9}\n')
    assert read_records(tmp_path) == [Noted(1.0, "x")]


def test_a_torn_last_line_is_left_out_and_read_once_it_is_whole(tmp_path: Path) -> None:
    whole, torn = _line(Noted(1.0, "whole")), _line(Noted(2.0, "torn"))
    _write(tmp_path / "events.jsonl", whole, torn[:20])
    tail = RecordTail(tmp_path)
    assert [record.at for record in tail.poll()] == [1.0]
    assert tail.poll() == []
    _write(tmp_path / "events.jsonl", torn[20:])
    assert tail.poll() == [Noted(2.0, "torn")]


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ("\0" * 4096 + "\n", [1.0]),
        ("\0" * 4096 + _line(Noted(2.0, "after")), [1.0, 2.0]),
        (_line(Noted(2.0, "cut"))[:20] + "\0" * 100 + "\n", [1.0]),
        (_line(Noted(2.0, "cut"))[:20] + "\0" * 100 + _line(Noted(3.0, "after")), [1.0, 3.0]),
        ("\0" * 4096, [1.0]),
    ],
)
def test_zeros_that_a_loss_of_power_has_left_are_a_torn_line(tmp_path: Path, left: str, kept: list[float]) -> None:
    _write(tmp_path / "steps.n0.jsonl", _line(Noted(1.0, "whole")), left)
    tail = RecordTail(tmp_path)
    assert [record.at for record in tail.poll()] == kept
    assert tail.torn == {tmp_path / "steps.n0.jsonl"}
    assert tail.poll() == [] and tail.torn, "what is missing is missing for ever"


def test_a_line_that_is_no_record_is_named_with_its_place(tmp_path: Path) -> None:
    good = _line(Noted(1.0, "x"))
    _write(tmp_path / "events.jsonl", good, '{"type":"Nonsense","at":1}\n')
    with pytest.raises(ProtocolError, match=f"events.jsonl, byte {len(good)}"):
        read_records(tmp_path)


def test_records_of_a_newer_version_are_refused_by_their_first_line(tmp_path: Path) -> None:
    newer = msgspec.structs.replace(_started(2), schema=SCHEMA + 1)
    _write(tmp_path / "events.jsonl", _line(newer), '{"type":"Nonsense","at":1}\n')
    with pytest.raises(ProtocolError, match=f"records of version {SCHEMA + 1}, this regrow reads up to {SCHEMA}"):
        read_records(tmp_path)


def test_records_without_a_version_and_with_fields_of_a_newer_one_are_read(tmp_path: Path) -> None:
    older = msgspec.to_builtins(_started(2)) | {"later": 1}
    del older["schema"]
    _write(tmp_path / "events.jsonl", msgspec.json.encode(older).decode() + "\n")
    assert read_records(tmp_path) == [_started(2)]


def test_a_job_without_records_has_an_empty_ledger(tmp_path: Path) -> None:
    ledger = Ledger(read_records(tmp_path / "nowhere"))
    assert (ledger.wall, ledger.goodput, ledger.steps_redone, ledger.step_median) == (0.0, 1.0, 0, None)


def test_the_same_record_twice_is_one_commit() -> None:
    ledger = Ledger([commit(0, 0, 1.0), commit(0, 0, 1.0)])
    assert ledger.steps_redone == 0


def test_steps_committed_again_after_a_restart_are_redone_once_each_whatever_the_world() -> None:
    before = [commit(step, rank, 1.0 + step) for step in range(8) for rank in range(2)]
    after = [commit(step, rank, 21.0 + step, generation=2) for step in range(5, 9) for rank in range(2)]
    assert Ledger(before + after).steps_redone == 3


def test_a_step_that_some_had_committed_when_it_was_redone_counts_as_redone() -> None:
    ledger = Ledger([commit(0, 0, 1.0), commit(0, 0, 2.0, generation=2), commit(0, 1, 2.0, generation=2)])
    assert ledger.steps_redone == 1


def test_an_adopted_commit_is_not_redone_and_never_hides_the_computed_one() -> None:
    own, adopted = commit(0, 1, 1.0, loss=2.0), commit(0, 1, 1.5, generation=2, loss=3.0, adopted=True)
    for records in ([own, adopted], [adopted, own]):
        ledger = Ledger(records)
        assert ledger.steps_redone == 0
        assert ledger.numbers == {(0, 1): {"loss": 2.0}}


def test_the_curve_is_the_mean_over_ranks() -> None:
    ledger = Ledger([commit(0, 0, 1.0, loss=1.0), commit(0, 1, 1.0, loss=3.0), commit(1, 0, 2.0, loss=0.5)])
    assert ledger.curve() == [(0, 2.0), (1, 0.5)]


def test_goodput_is_one_where_steps_follow_each_other_without_a_gap() -> None:
    ledger = Ledger([_formed(1, 0.0, 0)] + [commit(step, 0, 0.5 * (step + 1)) for step in range(10)])
    assert ledger.wall == pytest.approx(5.0)
    assert ledger.goodput == pytest.approx(1.0)


def test_time_between_steps_is_not_productive() -> None:
    ledger = Ledger([commit(0, 0, 1.0, seconds=1.0), commit(1, 0, 3.0, seconds=1.0)])
    assert ledger.goodput == pytest.approx(2 / 3)


def test_an_attempt_that_a_fault_cut_off_and_the_mending_are_not_productive() -> None:
    job = FakeJob(step=0.5).run(10, kills={4: 2})
    ledger = Ledger(job)
    lost = 0.25 + FakeJob.mend
    assert ledger.wall == pytest.approx(5.0 + lost)
    assert ledger.goodput == pytest.approx(5.0 / (5.0 + lost))


def test_a_commit_that_counts_its_mending_as_step_time_gains_nothing() -> None:
    before = [_formed(1, 0.0, 0), commit(0, 0, 1.0, seconds=1.0)]
    after = [_formed(2, 9.0, 1), commit(1, 0, 10.0, generation=2, seconds=9.0)]
    assert Ledger([*before, *after]).productive == pytest.approx(2.0)


def test_a_step_computed_twice_is_productive_once() -> None:
    first = [commit(step, 0, 1.0 + step, seconds=1.0) for step in range(4)]
    again = [commit(step, 0, 10.0 + step, generation=2, seconds=1.0) for step in range(2, 5)]
    assert Ledger(first + again).productive == pytest.approx(5.0)


def test_the_median_step_leaves_out_the_steps_that_a_fault_struck() -> None:
    assert Ledger(FakeJob(step=0.5).run(12, kills={3: 0, 7: 1})).step_median == pytest.approx(0.5)


def test_a_fault_with_no_rank_left_behind_is_summed_up() -> None:
    ledger = Ledger(FakeJob().run(10, kills={3: 0, 6: 3}))
    assert len(ledger.incidents) == len(ledger.injected) == 2
    assert (ledger.steps_lost, ledger.steps_redone, ledger.open_incidents) == (0, 0, {})
    assert ledger.recovery_median == pytest.approx(0.75)


@pytest.mark.parametrize(("faults", "median"), [(0, 0.75), (1, 3.0)])
def test_a_planned_change_counts_as_a_recovery_only_if_a_fault_struck_it(faults: int, median: float) -> None:
    job = FakeJob().run(10, kills={3: 0})
    closed = next(record for record in job if isinstance(record, IncidentClosed))
    move = msgspec.structs.replace(closed, incident=9, kind="move", total=5.25, faults=faults)
    assert Ledger([*job, move]).recovery_median == pytest.approx(median)


# --- time lost: the one measure for every side of the benchmark ---------------------------------------------------


def _started(world: int) -> JobStarted:
    return JobStarted(0.0, JobId("job"), world, 1, 0, [])


def _steps(steps: range, at: float, *, generation: int, world: int = 2) -> list[StepCommitted]:
    return [
        commit(step, rank, at + 0.5 * (number + 1), generation=generation)
        for number, step in enumerate(steps)
        for rank in range(world)
    ]


def test_time_lost_is_from_the_kill_to_the_next_step_of_every_rank_minus_a_median_step() -> None:
    records = [_started(2), *_steps(range(4), 0.0, generation=1), *_steps(range(4, 6), 2.4, generation=2)]
    lost = time_lost(Ledger(records), killed_at=2.2, ended=Generation(1), step_median=0.5)
    assert lost == pytest.approx(2.9 - 2.2 - 0.5)


def test_time_lost_counts_the_way_back_to_the_step_reached_before() -> None:
    records = [_started(2), *_steps(range(8), 0.0, generation=0), *_steps(range(5, 10), 8.0, generation=1)]
    lost = time_lost(Ledger(records), killed_at=4.2, ended=Generation(0), step_median=0.5)
    assert lost == pytest.approx(8.0 + 4 * 0.5 - 4.2 - 0.5)


def test_time_lost_waits_for_the_slowest_rank() -> None:
    records = [_started(2), *_steps(range(4), 0.0, generation=1), commit(4, 0, 3.0, generation=2)]
    assert time_lost(Ledger(records), killed_at=2.2, ended=Generation(1), step_median=0.5) is None
    records.append(commit(4, 1, 7.0, generation=2))
    lost = time_lost(Ledger(records), killed_at=2.2, ended=Generation(1), step_median=0.5)
    assert lost == pytest.approx(7.0 - 2.2 - 0.5)


def test_a_step_that_survivors_finish_after_the_kill_is_not_the_step_that_is_waited_for() -> None:
    records = [_started(2), *_steps(range(4), 0.0, generation=1), commit(4, 0, 2.3, generation=1)]
    records += [commit(4, 1, 2.6, generation=2, adopted=True), *_steps(range(5, 6), 2.6, generation=2)]
    lost = time_lost(Ledger(records), killed_at=2.2, ended=Generation(1), step_median=0.5)
    assert lost == pytest.approx(3.1 - 2.2 - 0.5)


def test_a_dead_ranks_step_that_is_adopted_late_does_not_move_the_step_waited_for() -> None:
    records = [_started(2), *_steps(range(4), 0.0, generation=1), *_steps(range(4, 6), 2.4, generation=2)]
    late = commit(4, 1, 2.1, generation=1, adopted=True)
    lost = time_lost(Ledger([*records, late]), killed_at=2.2, ended=Generation(1), step_median=0.5)
    assert lost == pytest.approx(2.9 - 2.2 - 0.5)


def test_a_later_restart_does_not_move_the_time_lost_to_an_earlier_kill() -> None:
    once = [_started(2), *_steps(range(8), 0.0, generation=0), *_steps(range(5, 10), 8.0, generation=1)]
    twice = [*once, *_steps(range(5, 12), 20.0, generation=2)]
    arguments = {"killed_at": 4.2, "step_median": 0.5}
    assert time_lost(Ledger(once), ended=Generation(0), **arguments) == pytest.approx(
        time_lost(Ledger(twice), ended=Generation(0), **arguments) or 0.0
    )


def test_the_last_committed_step_before_any_is_minus_one() -> None:
    assert last_committed(Ledger(), Generation(5)) == -1
