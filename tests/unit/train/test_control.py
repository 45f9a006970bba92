"""Reports of a worker that is halted, whichever of its threads comes first."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from regrow.core.errors import DeadlineExceeded
from regrow.core.ids import Generation, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.orders import HaltGeneration
from regrow.core.messages.unions import WorkerFact
from regrow.train.worker.control import Control

WORKER = WorkerId("node0.w0")


class SlowLink:
    """Takes its time with the first fact, so that another thread may overtake the one that says it."""

    def __init__(self) -> None:
        self.env = SimpleNamespace(worker=WORKER, patience=0.0)
        self.said: list[WorkerFact] = []
        self.begun, self.overtaken = threading.Event(), threading.Event()

    def orders(self) -> Iterator[HaltGeneration]:
        yield HaltGeneration(WORKER, Generation(0), "another rank was lost")
        threading.Event().wait()  # a worker whose orders end has lost its agent, and ends

    def send(self, fact: WorkerFact) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self.overtaken.wait(0.3)
        else:
            self.overtaken.set()
        self.said.append(fact)


def test_a_script_that_waits_is_never_said_to_do_so_before_it_is_said_not_to() -> None:
    link: Any = SlowLink()
    control = Control(link, stop=lambda: None, arm=lambda fault: None, stored=lambda copy: None)
    control.start()
    assert link.begun.wait(60)
    with pytest.raises(DeadlineExceeded):
        control.peek_form()
    deadline = time.monotonic() + 60
    while len(link.said) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [fact.stands for fact in link.said if isinstance(fact, facts.WorkerHalted)] == [False, True]
