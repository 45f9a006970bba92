"""Hanging and slow workers: the table of situations."""

from typing import Any

import pytest
from tests.unit.membership.membership_job import Job

from regrow.core.ids import Generation, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import observations, orders
from regrow.core.messages.observations import NodeSeen, TakeStacks, WorkerObservation
from regrow.core.phase import Phase
from regrow.core.records import IncidentOpened, Noted
from regrow.membership.recovery.hangs import Bounds, RankObservation, behind, describe, judge

WAITS: dict[str, Any] = {"calls": 3, "waits": True, "awaits": "allreduce on world"}
DEVICE: dict[str, Any] = {"calls": 3, "waits": True, "awaits": observations.DEVICE}
OUTSIDE: dict[str, Any] = {"phase": Phase.OUTSIDE}


def look(
    rank: int, /, seconds: float = 100.0, *, finished: bool = False, moves: bool = False, **what: Any
) -> RankObservation:
    fields: dict[str, Any] = {"calls": 2, "phase": Phase.COMPUTING, **what}
    step = StepNo(fields.pop("step", 7))
    name = WorkerId(f"w{rank}")
    sight = None if moves else WorkerObservation(name, Generation(1), step, seconds=seconds, **fields)
    return RankObservation(Rank(rank), name, sight, finished)


def hung(*looks: RankObservation, bounds: Bounds | None = None) -> list[int]:
    return [each.rank for each in judge(looks, bounds or Bounds(90.0)).hung]


SITUATIONS: list[tuple[str, list[RankObservation], list[int]]] = [
    ("one is blocked in its step, the others wait for it", [look(0, **WAITS), look(1), look(2, **WAITS)], [1]),
    ("its process is stopped, the others wait", [look(0, **WAITS), look(1, stopped=True)], [1]),
    ("stopped while it receives state", [look(0, **WAITS), look(1, stopped=True, phase=Phase.RECOVERING)], [1]),
    ("stopped between two steps", [look(0, **WAITS), look(1, stopped=True, **OUTSIDE)], [1]),
    ("stopped, for less than the bound", [look(0, **WAITS), look(1, 60.0, stopped=True)], []),
    ("the processes of all are stopped", [look(0, stopped=True), look(1, stopped=True)], []),
    (
        "its process is stopped in the last step, and the others are done",
        [look(0, finished=True, phase=Phase.WAITING), look(1, stopped=True)],
        [1],
    ),
    (
        "stopped in the last step, with which the others are done since a moment only",
        [look(0, 5.0, finished=True, phase=Phase.WAITING), look(1, 120.0, stopped=True)],
        [],
    ),
    ("all stand in one body", [look(0), look(1), look(2)], []),
    ("the first step of a world of one", [look(0, 800.0)], []),
    ("one evaluates, and all others wait inside the step", [look(0, **OUTSIDE), look(1, **WAITS)], []),
    ("it evaluates for half an hour, and computes nothing", [look(0, 1801.0, **OUTSIDE), look(1, **WAITS)], [0]),
    ("a restartable function", [look(0, 900.0, phase=Phase.REGION), look(1, 900.0, **WAITS)], []),
    ("one computes", [look(0, busy=True), look(1, **WAITS)], []),
    ("one computes for a quarter of an hour", [look(0, 901.0, busy=True), look(1, 901.0, **WAITS)], [0]),
    ("a loader that skips to its step", [look(0, 300.0, phase=Phase.DATA), look(1, 300.0, **WAITS)], []),
    ("a loader that hangs", [look(0, 361.0, phase=Phase.DATA), look(1, 361.0, **WAITS)], [0]),
    ("the one for whom they wait goes on", [look(0, moves=True), look(1, **WAITS)], []),
    ("one is blocked, and maybe waits for one who evaluates", [look(0), look(1, **OUTSIDE), look(2, **WAITS)], []),
    ("the last of a slow body: the others wait for a moment only", [look(0, 5.0, **WAITS), look(1, 120.0)], []),
    ("the last to be woken: the others go on for a moment only", [look(0, 5.0), look(1, 120.0, stopped=True)], []),
    ("two are blocked", [look(0), look(1), look(2, **WAITS)], [0, 1]),
    ("all wait for one another", [look(0, **WAITS), look(1, **WAITS)], []),
    (
        "one waits in a collective of its own making",
        [look(0, 400.0, **WAITS), look(1, 400.0, calls=3, waits=True, awaits="recv on world"), look(2, 400.0, **WAITS)],
        [1],
    ),
    ("on GPUs: the one with the fewest collectives", [look(0, waits=None, calls=3), look(1, waits=None)], [1]),
    ("on GPUs: a step behind", [look(0, waits=None, step=8, calls=0), look(1, waits=None, calls=9)], [1]),
    ("on GPUs: all at the same place", [look(0, waits=None), look(1, waits=None)], []),
    ("one is at its update while the others wait before it", [look(0, phase=Phase.UPDATING), look(1, **WAITS)], [0]),
    ("all wait for the verdict", [look(0, phase=Phase.WAITING), look(1, phase=Phase.WAITING)], []),
    ("all wait for their devices", [look(0, **DEVICE), look(1, **DEVICE)], []),
    ("one waits for its device, and another has left the step", [look(0, **DEVICE), look(1, 1801.0, **OUTSIDE)], [1]),
    ("one is blocked, and the others wait for their devices", [look(0), look(1, **DEVICE)], [0]),
    ("nobody does anything for half an hour", [look(0, 1801.0), look(1, 1801.0)], [0, 1]),
    ("nobody does anything else than compute", [look(0, 1801.0, busy=True), look(1, 1801.0, busy=True)], []),
]


@pytest.mark.parametrize(("looks", "culprits"), [case[1:] for case in SITUATIONS], ids=[case[0] for case in SITUATIONS])
def test_who_hangs(looks: list[RankObservation], culprits: list[int]) -> None:
    assert hung(*looks) == culprits


@pytest.mark.parametrize(
    ("looks", "culprits"),
    [
        ([look(0, 3.0, **WAITS), look(1, 3.0)], [1]),
        ([look(0, 3.0, **WAITS), look(1, 3.0, busy=True)], [1]),
        ([look(0, 3.0, **WAITS), look(1, 3.0, phase=Phase.DATA)], [1]),
        ([look(0, 3.0, **WAITS), look(1, 3.0, **OUTSIDE)], []),
        ([look(0, 3.0), look(1, 3.0)], [0, 1]),
    ],
    ids=["blocked", "computing", "reading", "between two steps", "all at the same place"],
)
def test_a_bound_that_the_user_ordered_holds_for_all_that_happens_in_a_step(
    looks: list[RankObservation], culprits: list[int]
) -> None:
    assert hung(*looks, bounds=Bounds(2.0, ordered=True)) == culprits


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([look(0, **DEVICE), look(1, **DEVICE)], True),
        ([look(0, **DEVICE), look(1, 60.0, **DEVICE)], False),
        ([look(0, **DEVICE), look(1, **WAITS)], True),
        ([look(0, **DEVICE), look(1, phase=Phase.WAITING)], True),
        ([look(0, 800.0, waits=None, busy=True), look(1, 901.0, **DEVICE)], False),
        ([look(rank, 9000.0, waits=None, busy=True) for rank in range(2)], False),
        ([look(rank, 9000.0, waits=False, busy=True, calls=rank) for rank in range(2)], False),
        ([look(rank, 9000.0, waits=None, busy=True, **OUTSIDE) for rank in range(2)], False),
        ([look(rank, 9000.0, waits=None, busy=True, phase=Phase.DATA) for rank in range(2)], False),
        ([look(0, **DEVICE), look(1, stopped=True)], False),
        ([look(0, **DEVICE), look(1)], False),
        ([look(0, **WAITS), look(1, **WAITS)], False),
    ],
    ids=[
        "all wait for their devices",
        "one of them not for long enough",
        "one waits for the others in the processor's memory",
        "one waits before the update",
        "one computes, or waits unseen",
        "all compute in their bodies for hours",
        "all compute, one after a collective more",
        "all evaluate, on devices or not",
        "all make their data",
        "a process is stopped",
        "one is blocked elsewhere",
        "no device is in it",
    ],
)
def test_groups_are_formed_anew_where_all_wait_and_some_for_their_devices(
    looks: list[RankObservation], expected: bool
) -> None:
    assert judge(looks, Bounds(90.0)).anew is expected


def test_a_bound_that_the_user_ordered_holds_before_a_device_was_asked() -> None:
    looks = [look(0, 20.0, waits=None, busy=True), look(1, 20.0, **DEVICE)]
    assert judge(looks, Bounds(15.0, ordered=True)).anew


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([look(0, waits=None), look(1, waits=None)], True),
        ([look(0, waits=None, busy=True), look(1, waits=None)], False),
        ([look(0, waits=False), look(1, waits=None)], False),
        ([look(0, 59.0, waits=None), look(1, 59.0, waits=None)], False),
        ([look(rank, 9000.0, waits=None, phase=Phase.DATA) for rank in range(2)], False),
    ],
)
@pytest.mark.parametrize("bounds", [Bounds(90.0), Bounds(15.0, ordered=True)])
def test_groups_are_formed_anew_for_all_that_keep_pythons_lock_and_compute_nothing(
    looks: list[RankObservation], expected: bool, bounds: Bounds
) -> None:
    """None has asked its device within a minute, which a thread of Python's does."""
    verdict = judge(looks, bounds)
    assert verdict.anew is expected
    assert not (expected and verdict.hung)


def test_those_that_compute_for_hours_in_a_body_are_neither_halted_nor_ended() -> None:
    for calls in ((2, 2), (2, 3)):
        job = Job(2).trained(4)
        for hours in range(1, 5):
            job.now += 3600.0
            observations = [
                job.sight(rank, 5, seconds=3600.0 * hours, waits=False, busy=True, calls=calls[rank])
                for rank in job.ranks
            ]
            job.seen(*observations)
            job.now += 1.0
            job.seen(*observations)
        assert not job.all(orders.HaltGeneration)
        assert not job.all(orders.FenceWorker)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({0: {"a": 7}, 1: {"a": 6}}, [1]),
        ({0: {"a": 7}, 1: {"a": 7}}, []),
        ({0: {"a": 7, "b": 3}, 1: {"a": 7}, 2: {"b": 2}}, [2]),
        ({0: {"a": 6, "b": 3}, 1: {"a": 7}, 2: {"b": 2}}, [2]),
        ({0: {"a": 6, "b": 3}, 1: {"a": 7, "b": 2}}, []),
        ({0: {"a": 7}, 1: {"b": 3}}, []),
        ({0: {}, 1: {}}, []),
    ],
)
def test_who_is_behind_is_known_by_the_calls_of_each_group(
    counts: dict[int, dict[str, int]], expected: list[int]
) -> None:
    assert behind({Rank(rank): calls for rank, calls in counts.items()}) == expected


def test_the_bound_follows_the_longest_step_and_what_was_in_vain() -> None:
    assert Bounds.of(None, 90.0, longest=1.0) == Bounds(90.0)
    assert Bounds.of(None, 90.0, longest=20.0) == Bounds(200.0)
    assert Bounds.of(None, 90.0, longest=20.0, patience=2.0) == Bounds(400.0)
    assert Bounds.of(5.0, 90.0, longest=20.0, patience=2.0) == Bounds(5.0, ordered=True)


def test_a_rank_that_stands_still_is_told_with_all_that_is_seen_of_it() -> None:
    text = describe(look(3, 91.26, blocked="futex_wait_queue"))
    assert text == (
        "rank 3: no progress for 91.3 s in computing of step 7, after 2 collectives, not using the processor in "
        "futex_wait_queue"
    )


# --- what the coordinator makes of it -------------------------------------------------------------------------------


def test_one_look_is_not_enough_to_end_a_worker() -> None:
    job = Job(2).trained(4)
    job.now += 500.0
    observations = [job.sight(0, 5), job.sight(1, 5, waits=True)]
    job.tell(NodeSeen(NodeId("n0"), observations))
    assert not job.all(orders.FenceWorker)
    culprit = job.of(0)
    job.tell(NodeSeen(NodeId("n0"), observations), after=2.0)
    assert [fence.worker for fence in job.all(orders.FenceWorker)] == [culprit]


def test_two_agents_see_what_neither_sees_alone() -> None:
    job = Job(2, nodes=2).trained(4)
    job.now += 500.0
    for _ in range(3):
        job.tell(NodeSeen(NodeId("n0"), [job.sight(0, 5, phase=Phase.OUTSIDE)]), after=2.0)
        job.tell(NodeSeen(NodeId("n1"), [job.sight(1, 6, waits=True)]), after=0.5)
    assert not job.all(orders.FenceWorker), "rank 1 waits in the step for rank 0, which evaluates"


def test_the_only_one_with_a_part_of_the_state_is_not_ended_on_suspicion() -> None:
    job = Job(2).trained(4)
    for rank in job.ranks:
        job.machine.roster.workers[job.of(rank)].holding = f"part {rank}"
    job.now += 500.0
    for seconds in (100.0, 900.0):
        job.seen(job.sight(0, 5, seconds=seconds), job.sight(1, 5, waits=True, seconds=seconds))
        assert not job.all(orders.FenceWorker)
    assert [note.text for note in job.all(Noted) if "rank 0: no progress" in note.text], "which is said"
    assert job.of(0) in {order.worker for order in job.all(TakeStacks)}


def test_who_was_replaced_in_vain_gets_more_time_the_next_time() -> None:
    job = Job(2).trained(4)
    for bound in (90.0, 180.0, 360.0):
        fences = len(job.all(orders.FenceWorker))
        job.now += 5000.0
        job.seen(job.sight(0, 5, seconds=bound - 1.0), job.sight(1, 5, waits=True))
        assert len(job.all(orders.FenceWorker)) == fences, f"within {bound} s"
        job.seen(job.sight(0, 5, seconds=bound + 1.0), job.sight(1, 5, waits=True))
        assert len(job.all(orders.FenceWorker)) == fences + 1
        job.halted(1, 5)
        job.ready(job.of(0))
        job.joined()
    assert [opened.kind for opened in job.all(IncidentOpened)] == ["hang"]


def test_a_standstill_of_all_is_said_every_minute_and_nobody_is_ended() -> None:
    job = Job(3).trained(4)
    for minute in range(1, 6):
        job.now += 60.0
        job.seen(*[job.sight(rank, 5, seconds=60.0 * minute + 5.0) for rank in job.ranks])
    notes = [note.text for note in job.all(Noted) if "all ranks are at the same place" in note.text]
    assert 4 <= len(notes) <= 5
    assert not job.all(orders.FenceWorker)


def stands_at_devices(job: Job, seconds: float, counts: dict[int, int] | None = None) -> None:
    """Let all wait for their devices for this time."""
    calls = counts or dict.fromkeys(job.ranks, 4)
    job.now += 5000.0
    looks = [
        job.sight(rank, 5, seconds=seconds, waits=True, awaits=observations.DEVICE, counts={"world": calls[rank]})
        for rank in job.ranks
    ]
    job.seen(*looks)


def halt_and_form(job: Job) -> None:
    for rank in job.ranks:
        job.halted(rank, 5)
    job.joined()


def test_a_step_longer_than_all_bounds_is_formed_anew_three_times_and_then_waited_for() -> None:
    job = Job(2).trained(4)
    workers = [job.of(rank) for rank in job.ranks]
    for times, bound in enumerate((90.0, 180.0, 360.0), 1):
        stands_at_devices(job, bound - 1.0)
        assert len(job.all(orders.FormGeneration)) == 2 * times, f"within {bound} s"
        stands_at_devices(job, bound + 1.0)
        halt_and_form(job)
        assert len(job.all(orders.FormGeneration)) == 2 * times + 2
    stands_at_devices(job, 10000.0)
    assert len(job.all(orders.FormGeneration)) == 8
    assert not job.all(orders.FenceWorker)
    assert [job.of(rank) for rank in job.ranks] == workers
    assert "all wait for their devices" in job.all(Noted)[-1].text
    assert [opened.kind for opened in job.all(IncidentOpened)] == ["standstill"]


def test_the_second_time_at_a_step_the_one_that_is_behind_is_replaced() -> None:
    job = Job(2).trained(4)
    culprit = job.of(1)
    stands_at_devices(job, 1000.0, {0: 4, 1: 3})
    assert not job.all(orders.FenceWorker)
    halt_and_form(job)
    stands_at_devices(job, 1000.0, {0: 4, 1: 3})
    assert [fence.worker for fence in job.all(orders.FenceWorker)] == [culprit]


def test_the_only_one_with_a_part_of_the_state_is_not_ended_though_it_is_behind() -> None:
    job = Job(2).trained(4)
    for rank in job.ranks:
        job.machine.roster.workers[job.of(rank)].holding = f"part {rank}"
    for _ in range(2):
        stands_at_devices(job, 1000.0, {0: 4, 1: 3})
        halt_and_form(job)
    assert not job.all(orders.FenceWorker)


def test_steps_like_one_that_was_waited_for_are_not_formed_anew() -> None:
    job = Job(2, hang_timeout=5.0).trained(4)
    for _ in range(3):
        stands_at_devices(job, 6.0)
        halt_and_form(job)
    stands_at_devices(job, 40.0)
    job.stepped(5)
    formed = len(job.all(orders.FormGeneration))
    stands_at_devices(job, 79.0)
    assert len(job.all(orders.FormGeneration)) == formed
    assert not job.all(orders.HaltGeneration)[6:]
    stands_at_devices(job, 81.0)
    assert job.all(orders.HaltGeneration)[6:], "twice as long is something else"
