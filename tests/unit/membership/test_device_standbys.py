"""Standbys of a node whose ranks use all its devices: they take no memory there unless that was asked for."""

from typing import Any

import pytest
from tests.unit.membership.membership_job import Job

from regrow.core.messages import orders
from regrow.core.messages.vocabulary import Role, Warmth
from regrow.core.records import Noted

LOWERED, TWICE = "standbys wait before the script", "a standby has built on a device that a rank uses"


def trained(*, taken: bool, **spec: Any) -> Job:
    job = Job(2, **spec)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, devices_taken=taken)
    return job.joined().stepped(0)


def warmths(job: Job) -> list[Warmth | None]:
    return [each.warmth for each in job.all(orders.SpawnWorker) if each.role is Role.STANDBY]


def said(job: Job) -> list[str]:
    texts = [note.text for note in job.all(Noted)]
    return [known for known in (LOWERED, TWICE) for text in texts if text.startswith(known)]


def test_they_wait_before_the_script_and_it_is_said_once() -> None:
    job = trained(taken=True, standbys=2)
    assert warmths(job) == [Warmth.IMPORTS] * 2
    assert said(job) == [LOWERED]


@pytest.mark.parametrize(
    ("taken", "spec", "expected"),
    [
        (False, {"standbys": 1}, [None]),
        (True, {"standbys": 0}, []),
        (True, {"standbys": 1, "warmth": Warmth.IMPORTS}, [None]),
    ],
)
def test_nothing_is_changed_where_there_is_room_or_nobody_to_be_lowered(
    taken: bool, spec: dict[str, Any], expected: list[Warmth | None]
) -> None:
    job = trained(taken=taken, **spec)
    assert warmths(job) == expected
    assert said(job) == []


def test_who_asks_for_built_ones_has_them_and_is_told() -> None:
    job = trained(taken=True, standbys=1, warmth_asked=True)
    assert warmths(job) == [None]
    assert said(job) == []
    job.ready(job.standby(), devices_taken=True)
    assert said(job) == [TWICE]


def test_devices_of_a_spare_node_are_no_ranks() -> None:
    job = Job(2, nodes=2, spares=1, standbys=0).trained(0)
    spares = [each.worker for each in job.all(orders.SpawnWorker) if each.role is Role.STANDBY]
    assert spares
    job.ready(spares[0], devices_taken=True)
    assert said(job) == []
