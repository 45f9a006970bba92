"""The part of a body that is a rank's own: while it waits for nobody."""

import pytest

from regrow.comm import flight
from regrow.comm.flight import Flights
from regrow.train.worker import own_time
from regrow.train.worker.own_time import OwnTime


class Watch:
    def __init__(self) -> None:
        self.now = 10.0
        self.flights = Flights()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(flight, "time", watch)
    watch.flights = Flights()
    monkeypatch.setattr(own_time, "FLIGHT", watch.flights)
    return watch


def test_what_passes_while_a_collective_is_under_way_is_not_its_own(watch: Watch) -> None:
    own = OwnTime(unit=1)
    own.begin()
    watch.now += 1.0
    first = watch.flights.begin()
    watch.now += 5.0
    second = watch.flights.begin()
    watch.flights.end(first)
    watch.now += 5.0
    watch.flights.end(second)
    watch.now += 0.5
    own.end()
    watch.now += 7.0
    own.end()
    assert own.seconds == pytest.approx(1.5)


def test_each_body_begins_anew_and_where_ends_are_not_seen_the_first_collective_ends_it(watch: Watch) -> None:
    own = OwnTime(unit=1)
    own.begin()
    watch.now += 3.0
    own.end()
    watch.flights.begin_unseen()
    own.begin()
    assert own.seconds == 0.0
    watch.now += 2.0
    own.called("allreduce")
    watch.now += 9.0
    own.called("allreduce")
    own.end()
    assert own.seconds == pytest.approx(2.0)


@pytest.mark.parametrize(("unit", "seconds"), [(1, 0.0), (2, 3.0)])
def test_stages_of_a_pipeline_are_judged_where_replicas_are_known(watch: Watch, unit: int, seconds: float) -> None:
    own = OwnTime(unit)
    own.begin()
    own.called("send")
    watch.now += 3.0
    own.end()
    assert own.seconds == seconds
