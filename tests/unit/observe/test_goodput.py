"""Every rank-second of a run is one of eleven things, and they add up to the total."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.observe.observe_records import NODE, FakeJob, commit

from regrow.cli import main
from regrow.core.ids import Generation, JobId, Rank, StepNo, WorkerId
from regrow.core.messages.vocabulary import Role
from regrow.core.records import (
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    Record,
    WorkerSpawned,
    WorldChanged,
)
from regrow.observe.goodput import Account, Spent, account
from regrow.observe.goodput_report import GoodputReport, report, report_lines
from regrow.observe.ledger import Ledger

MOMENTS = st.floats(0.0, 100.0)


def started(world: int, at: float = 0.0) -> JobStarted:
    return JobStarted(at, JobId("job"), world, 2, 0, [])


def ordered(rank: int, at: float) -> WorkerSpawned:
    return WorkerSpawned(at, WorkerId(f"w{rank}"), NODE, Role.RANK, Rank(rank), Generation(1))


def formed(generation: int, at: float, step: int, world: int) -> GenerationFormed:
    workers = {str(rank): WorkerId(f"w{rank}") for rank in range(world)}
    return GenerationFormed(at, Generation(generation), StepNo(step), workers)


def mended(
    fault_at: float,
    stages: tuple[float, float, float, float, float],
    *,
    number: int = 1,
    generation: int = 2,
    step: int = 3,
    lost: int = 0,
    faults: int = 1,
) -> IncidentClosed:
    place = (Generation(generation), StepNo(step), "exit" if faults else "grow", [Rank(1)], "killed")
    at = fault_at + sum(stages)
    opened_at = fault_at + stages[0]
    return IncidentClosed(at, number, *place, "fork", faults, *stages, sum(stages), lost, 0, opened_at, fault_at)


def whole(found: Account) -> None:
    assert sum(found.spent.values()) == pytest.approx(found.total, rel=1e-9, abs=1e-6)
    assert all(value >= 0 for value in found.spent.values())
    assert sum(cost.rank_seconds for cost in found.incidents) <= found.total + 1e-6


# --- any records at all --------------------------------------------------------------------------------------------


@st.composite
def made_up(draw: st.DrawFn) -> list[Record]:
    """Records that nobody has checked: overlapping commits, faults out of order, worlds that change."""
    world = draw(st.integers(1, 4))
    ranks = st.integers(0, world - 1)
    records: list[Record] = [started(world), JobEnded(draw(st.floats(0.0, 120.0)), 0, "")]
    for number in range(draw(st.integers(0, 4))):
        records.append(formed(number + 1, draw(MOMENTS), draw(st.integers(0, 5)), draw(st.integers(1, 4))))
        if draw(st.booleans()):
            kind = draw(st.sampled_from(["fault", "shrink", "grow", "start", "restart"]))
            records.append(WorldChanged(0.0, Generation(number + 1), StepNo(0), kind, 1, 1, ""))
    for number in range(draw(st.integers(0, 4))):
        stages = draw(st.tuples(*[st.floats(0.0, 20.0)] * 5))
        faults = draw(st.integers(0, 2))
        records.append(mended(draw(MOMENTS), stages, number=number + 1, faults=faults))
    if draw(st.booleans()):
        records.append(
            IncidentOpened(draw(MOMENTS), 9, Generation(1), StepNo(1), "hang", [Rank(0)], "did not go on\nmore")
        )
    for _ in range(draw(st.integers(0, 12))):
        each = commit(
            draw(st.integers(0, 5)),
            draw(ranks),
            draw(MOMENTS),
            generation=draw(st.integers(1, 4)),
            seconds=draw(st.floats(0.0, 30.0)),
            adopted=draw(st.booleans()),
        )
        waits = draw(st.tuples(st.floats(0.0, 9.0), st.floats(0.0, 9.0)))
        records.append(msgspec.structs.replace(each, data_wait=waits[0], stall=waits[1]))
    if draw(st.booleans()):
        records.append(ordered(0, draw(MOMENTS)))
    return records


@given(made_up())
def test_whatever_was_written_down_adds_up(records: list[Record]) -> None:
    whole(account(records))


@given(made_up(), st.floats(0.1, 100.0))
def test_money_is_that_of_the_nodes_whose_time_it_was(records: list[Record], price: float) -> None:
    found = report(records, price=price)
    node_hours = found.rank_seconds * found.nodes / found.ranks / 3600
    assert found.cost == pytest.approx(price * node_hours)
    faults = [lost for lost in found.incidents if lost.name in {row.name for row in found.incidents}]
    assert sum(row.cost for row in found.by_node) == pytest.approx(sum(row.cost for row in found.by_cause))
    assert sum(row.cost for row in found.by_cause) <= sum(row.cost for row in faults) + 1e-9
    assert report_lines(found, records)


# --- runs of which it is known where their time went -------------------------------------------------------------


def test_a_run_without_faults_starts_trains_and_ends() -> None:
    records: list[Record] = [started(2), ordered(0, 1.0), formed(1, 3.0, 0, 2)]
    for rank in range(2):
        for step in range(4):
            each = commit(step, rank, 4.0 + step, seconds=0.7)
            records.append(msgspec.structs.replace(each, data_wait=0.2, stall=0.05))
    found = account([*records, JobEnded(8.0, 0, "")])
    whole(found)
    assert found.total == pytest.approx(16.0)
    assert found.spent == pytest.approx(
        dict.fromkeys(Spent, 0.0)
        | {
            Spent.CAPACITY: 2 * 1.0,
            Spent.FIRST_STEP: 2 * (2.0 + 0.05),
            Spent.PRODUCTIVE: 2 * 4 * 0.7,
            Spent.DATA_WAIT: 2 * 4 * 0.2,
            Spent.CHECKPOINT: 2 * 4 * 0.05,
            Spent.IDLE: 2 * (3 * 0.05 + 1.0),
        }
    )
    assert found.goodput == pytest.approx(5.6 / 16)


@pytest.mark.parametrize(("nodes", "local", "waited"), [(1, False, 0.0), (2, True, 0.0), (2, False, 1.0)])
def test_a_job_whose_nodes_are_all_on_this_machine_waits_for_none(nodes: int, local: bool, waited: float) -> None:
    job = msgspec.structs.replace(started(1), nodes=nodes, local=local)
    records: list[Record] = [job, ordered(0, 1.0), formed(1, 3.0, 0, 1), commit(0, 0, 4.0, seconds=1.0)]
    found = account([*records, JobEnded(4.0, 0, "")])
    whole(found)
    assert (found.spent[Spent.CAPACITY], found.spent[Spent.FIRST_STEP]) == pytest.approx((waited, 3.0 - waited))


def struck(*, adopted: bool = False) -> list[Record]:
    """Steps of a second; 0.4 s into step 3 rank 1 dies; half a second later the step runs again."""
    records: list[Record] = [started(2), ordered(0, 0.0), ordered(1, 0.0), formed(1, 0.0, 0, 2)]
    records += [commit(step, rank, 1.0 + step, seconds=1.0) for step in range(3) for rank in range(2)]
    records += [mended(3.4, (0.1, 0.1, 0.2, 0.1, 1.0)), formed(2, 3.9, 3, 2)]
    if adopted:
        records.append(commit(3, 1, 3.4, seconds=0.0, adopted=True))
    first = 4 if adopted else 3
    records += [
        commit(step, rank, 4.9 + step - first, seconds=1.0, generation=2) for step in range(first, 6) for rank in (0, 1)
    ]
    return [*records, JobEnded(4.9 + 5 - first, 0, "")]


def test_a_run_cut_off_by_a_fault_is_redone_and_the_run_that_counts_is_productive() -> None:
    found = account(struck())
    whole(found)
    assert found.spent[Spent.PRODUCTIVE] == pytest.approx(2 * 6 * 1.0)
    assert found.spent[Spent.REDO] == pytest.approx(2 * 0.4)
    assert [found.spent[name] for name in (Spent.DETECT, Spent.ABORT, Spent.REGROUP, Spent.HYDRATE)] == pytest.approx(
        [0.2, 0.2, 0.4, 0.2]
    )
    (incident,) = found.incidents
    assert incident.rank_seconds == pytest.approx(2 * 0.9)
    assert (incident.nodes, incident.steps_lost, incident.rung) == ([NODE], 0, "fork")


def test_a_run_whose_gradients_counted_is_productive_although_its_rank_died() -> None:
    found = account(struck(adopted=True))
    whole(found)
    assert found.spent[Spent.REDO] == pytest.approx(0.4), "only rank 0 has run the step that did not count"


def test_steps_that_were_given_up_are_redone_and_the_incident_pays_for_them() -> None:
    records: list[Record] = [started(1), ordered(0, 0.0), formed(1, 0.0, 0, 1)]
    records += [commit(step, 0, 1.0 + step, seconds=1.0) for step in range(4)]
    records += [mended(4.0, (0.0, 0.0, 1.0, 0.0, 1.0), lost=2), formed(2, 5.0, 2, 1)]
    records += [commit(step, 0, 4.0 + step, seconds=1.0, generation=2) for step in range(2, 5)]
    found = account([*records, JobEnded(8.0, 0, "")])
    whole(found)
    assert found.spent[Spent.REDO] == pytest.approx(2.0)
    assert found.spent[Spent.PRODUCTIVE] == pytest.approx(5.0)
    assert found.incidents[0].rank_seconds == pytest.approx(3.0)
    assert (found.steps_lost, Ledger(records).steps_redone) == (2, 2)


def test_places_that_a_fault_empties_wait_for_capacity_and_places_given_up_on_purpose_do_not() -> None:
    def shrunk(kind: str) -> Account:
        records: list[Record] = [started(4), ordered(0, 0.0), formed(1, 0.0, 0, 4), formed(2, 5.0, 5, 2)]
        records += [WorldChanged(5.0, Generation(2), StepNo(5), kind, 4, 2, ""), formed(3, 8.0, 8, 4)]
        return account([*records, JobEnded(10.0, 0, "")])

    by_fault, on_purpose = shrunk("fault"), shrunk("shrink")
    whole(by_fault)
    whole(on_purpose)
    assert by_fault.total == pytest.approx(40.0)
    assert by_fault.spent[Spent.CAPACITY] == pytest.approx(6.0)
    assert on_purpose.total == pytest.approx(34.0)
    assert on_purpose.spent[Spent.CAPACITY] == 0.0


def test_a_made_up_job_with_faults_spends_what_its_ledger_says() -> None:
    records = FakeJob(step=0.5).run(40, kills={4: 2, 17: 0, 30: 3})
    found, ledger = account(records), Ledger(records)
    whole(found)
    assert found.spent[Spent.PRODUCTIVE] == pytest.approx(4 * ledger.productive)
    assert found.spent[Spent.REDO] == pytest.approx(4 * 3 * 0.25)
    assert [cost.nodes for cost in found.incidents] == [[NODE]] * 3
    told = report(records, price=36.0)
    assert [(row.name, row.incidents) for row in told.by_node] == [(NODE, 3)]
    assert [(row.name, row.incidents) for row in told.by_cause] == [("exit", 3)]


def test_the_command_tells_it_to_people_and_to_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "events.jsonl"
    records = FakeJob(step=0.5).run(10, kills={4: 2})
    file.write_bytes(b"\n".join(msgspec.json.encode(each) for each in records) + b"\n")
    assert main(["goodput", str(file), "--price", "36"]) == 0
    shown = capsys.readouterr().out
    assert "0 committed steps lost, 0 computed again" in shown
    assert "step 4: killed by SIGKILL on node0, mended by standby" in shown
    assert main(["goodput", str(file), "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=GoodputReport)
    assert sum(found.spent.values()) == pytest.approx(found.rank_seconds)
    assert main(["goodput", str(tmp_path / "nowhere")]) == 2
    capsys.readouterr()
    assert main(["goodput", str(file), "--price", "-3"]) == 2
    assert "--price -3 is no price (give the price of a node-hour: a number from 0 on)" in capsys.readouterr().err
