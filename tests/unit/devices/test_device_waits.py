"""A device that still has work is shown as waited for, and one that has none is not: its worker computes."""

import threading

import pytest
import torch

from regrow.comm.flight import UNKNOWN, Flights
from regrow.comm.on_device.waits import SHOWN_AFTER_S, STILL_S, DeviceWaits
from regrow.core.messages.observations import DEVICE

HERE = torch.device("meta")


class Worker:
    """One that calls a collective on its device, and shows no progress from then on."""

    def __init__(self) -> None:
        self.flights, self.shown = Flights(), (0, "")
        self.flights.show = lambda count, oldest: setattr(self, "shown", (count, oldest))
        self.asked, self.done, self.fails = 0, threading.Event(), False
        self.waits = DeviceWaits(self.flights, self.finish)
        self.beats: int | None = 1
        self.waits.body_beats = lambda: self.beats
        self.waits.enqueues(HERE)
        self.waits.look(0.0)

    def finish(self, device: torch.device) -> None:
        assert device == HERE
        self.asked += 1
        assert self.done.wait(60)
        if self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def look(self, now: float) -> None:
        for _ in range(2):  # an answer that is there is seen
            if self.done.is_set() and self.waits._asking is not None:
                self.waits._asking.join(60)
            self.waits.look(now)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_who_waits_in_the_driver_is_shown_as_waiting_and_no_more_once_it_goes_on(worker: Worker) -> None:
    worker.look(STILL_S - 1)
    assert worker.waits._asking is None
    worker.look(STILL_S)
    worker.look(STILL_S + SHOWN_AFTER_S - 1)
    assert worker.shown == (UNKNOWN, ""), "a full queue takes a while too"
    worker.look(STILL_S + SHOWN_AFTER_S)
    assert worker.shown == (1, DEVICE)
    worker.beats = 2
    worker.look(STILL_S + SHOWN_AFTER_S + 1)
    assert worker.shown == (UNKNOWN, "")
    worker.done.set()
    worker.look(100.0)
    assert worker.shown == (0, "")


def test_who_computes_on_the_processor_is_known_to_wait_for_nothing(worker: Worker) -> None:
    worker.done.set()
    worker.look(STILL_S)
    assert worker.shown == (0, "")
    for later in range(1, 5):
        worker.look((1 + later) * STILL_S)
    assert (worker.shown, worker.asked) == ((0, ""), 1)
    worker.waits.enqueues(HERE)
    assert worker.shown == (UNKNOWN, "")


def test_a_collective_that_comes_while_the_device_is_asked_is_still_unknown(worker: Worker) -> None:
    worker.look(STILL_S)
    worker.waits.enqueues(HERE)
    worker.done.set()
    worker.look(STILL_S + 1)
    assert worker.shown == (UNKNOWN, "")


def test_an_error_of_the_device_says_nothing_here(worker: Worker) -> None:
    worker.fails = True
    worker.done.set()
    worker.look(STILL_S)
    assert worker.shown == (UNKNOWN, "")


def test_no_device_is_asked_outside_a_body(worker: Worker) -> None:
    worker.beats = None
    for now in (1.0, 1000.0, 2000.0):
        worker.look(now)
    assert worker.waits._asking is None
