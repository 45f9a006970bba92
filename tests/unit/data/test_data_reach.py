"""A worker's way to its producer: what it waits for, for how long, and what it does where there is none."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from regrow.core.errors import GenerationHalted
from regrow.core.ids import WorkerId
from regrow.core.messages.data import producer_given_up, producer_socket
from regrow.data.cache import reach
from regrow.data.cache.layout import Key
from regrow.data.cache.messages import (
    TO_PRODUCER,
    At,
    CannotMake,
    Hello,
    Line,
    Ready,
    Refused,
    ToProducer,
    ToReader,
    Want,
    Welcome,
)
from regrow.data.cache.reach import Reach

KEY, NEXT = Key(4, 1, 2), Key(5, 1, 2)
PATIENCE_S = 60.0


class Worker:
    """A reader that takes part in the training."""

    halted = False
    stepping = True
    moved = False
    beats = 0

    def want_producer(self, loader: int) -> None:
        raise AssertionError("nobody asks for it here")

    def beat(self) -> None:
        self.beats += 1

    def monotonic(self) -> float:
        """A clock by which a second has passed whenever it shows that it is alive."""
        return float(self.beats)

    def on_halt(self, call: Callable[[], None]) -> None:
        raise AssertionError("nobody asks for it here")


class Script:
    """A producer that waits for one message after another, and answers as it is told."""

    def __init__(self, folder: Path) -> None:
        self._address = producer_socket(str(folder), 0)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()
        self.heard: list[ToProducer] = []

    def run(self, *answers: tuple[type[ToProducer], ToReader | None]) -> threading.Thread:
        """Accept somebody; to each message of the given kinds, in this order, the answer. Then hang up at None."""
        thread = threading.Thread(target=self._run, args=(answers,), daemon=True)
        thread.start()
        return thread

    def _run(self, answers: tuple[tuple[type[ToProducer], ToReader | None], ...]) -> None:
        sock, _ = self._listener.accept()
        self.line = Line(sock, TO_PRODUCER)
        for kind, answer in answers:
            self.hear(kind)
            if answer is None:
                self.line.close()
                return
            self.line.send(answer)

    def hear(self, kind: type[ToProducer]) -> ToProducer:
        deadline = time.monotonic() + PATIENCE_S
        while not any(isinstance(message, kind) for message in self.heard):
            assert time.monotonic() < deadline, self.heard
            self.heard += self.line.receive()
            time.sleep(0.001)
        place = next(at for at, message in enumerate(self.heard) if isinstance(message, kind))
        heard = self.heard[place]
        del self.heard[: place + 1]
        return heard

    def end(self) -> None:
        self._listener.close()
        Path(self._address).unlink()


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not answer is slow, as long as a test does not say otherwise."""
    monkeypatch.setattr(reach, "PATIENCE_S", PATIENCE_S)


@pytest.fixture
def way(tmp_path: Path, worker: Worker) -> Iterator[Reach]:
    made = Reach(str(tmp_path), str(tmp_path), 0, Hello(WorkerId("w"), b"i" * 16, {}, 3, 100), worker)
    yield made
    made.close()


def test_nobody_waits_for_a_producer_that_is_not_there(way: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "PATIENCE_S", 600.0)
    began = time.monotonic()
    assert not way.ask(KEY)
    assert time.monotonic() - began < 300.0
    monkeypatch.setattr(reach, "EXPECTED_S", 600.0)
    assert way.expected
    monkeypatch.setattr(reach, "EXPECTED_S", 0.0)
    assert not way.expected


def test_an_entry_that_is_made_is_waited_for(way: Reach, tmp_path: Path) -> None:
    producer = Script(tmp_path)
    thread = producer.run((Hello, Welcome()), (At, Ready(NEXT, 0.1)), (Want, Ready(KEY, 0.1)))
    assert way.ask(KEY)
    thread.join(PATIENCE_S)


def test_who_reads_several_shares_says_which(way: Reach, tmp_path: Path) -> None:
    producer, way.shares = Script(tmp_path), (1, 3)
    thread = producer.run((Hello, Welcome()), (Want, Ready(KEY, 0.1)))
    assert way.ask(KEY)
    thread.join(PATIENCE_S)
    way.note(Key(4, 3, 2))
    at = producer.hear(At)
    assert isinstance(at, At) and at.group == ((1, 3), 2)
    way.shares = ()
    way.note(Key(5, 1, 2))
    alone = producer.hear(At)
    assert isinstance(alone, At) and alone.group == ((1,), 2)


def test_a_rehearsal_does_not_say_where_it_stands(way: Reach, worker: Worker, tmp_path: Path) -> None:
    worker.stepping = False
    producer = Script(tmp_path)
    thread = producer.run((Hello, Welcome()), (Want, Ready(KEY, 0.1)))
    assert way.ask(KEY)
    thread.join(PATIENCE_S)
    assert not any(isinstance(message, At) for message in producer.heard)


@pytest.mark.parametrize("answer", [CannotMake(KEY, "ValueError: broken"), None])
def test_what_cannot_be_made_or_whose_producer_dies_is_made_by_the_worker(
    way: Reach, tmp_path: Path, answer: ToReader | None
) -> None:
    Script(tmp_path).run((Hello, Welcome()), (Want, answer))
    assert not way.ask(KEY)
    assert not way.over


def test_a_new_producer_is_found(way: Reach, tmp_path: Path) -> None:
    first = Script(tmp_path)
    first.run((Hello, Welcome()), (Want, None))
    assert not way.ask(KEY)
    first.end()
    assert not way.ask(KEY)
    second = Script(tmp_path)
    second.run((Hello, Welcome()), (Want, Ready(KEY, 0.1)))
    assert way.ask(KEY)
    assert way.expected


def test_a_producer_that_refuses_is_asked_no_more(way: Reach, tmp_path: Path) -> None:
    Script(tmp_path).run((Hello, Refused("another data set")))
    assert not way.ask(KEY)
    assert way.over
    assert way.refusal == "another data set"
    assert not way.ask(KEY)
    assert not way.expected


def test_what_was_given_up_is_expected_no_more(way: Reach, tmp_path: Path) -> None:
    Path(producer_given_up(str(tmp_path), 0)).write_text("it died too often")
    assert not way.ask(KEY)
    assert way.over
    assert not way.expected


def test_a_halt_ends_the_wait_at_once(
    way: Reach, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATIENCE_S", "_BEAT_S"):  # so that nothing else ends it, nor looks whether it is over
        monkeypatch.setattr(reach, name, 600.0)
    producer = Script(tmp_path)
    thread = producer.run((Hello, Welcome()))

    def halt() -> None:
        thread.join(PATIENCE_S)
        producer.hear(Want)
        worker.halted = True
        way.wake()

    halting = threading.Thread(target=halt)
    halting.start()
    began = time.monotonic()
    with pytest.raises(GenerationHalted):
        way.ask(KEY)
    assert time.monotonic() - began < 300.0
    halting.join(PATIENCE_S)


def test_a_halt_that_is_over_ends_no_later_wait(way: Reach, tmp_path: Path) -> None:
    way.wake()
    Script(tmp_path).run((Hello, Welcome()), (Want, Ready(KEY, 0.1)))
    assert way.ask(KEY)


def test_one_that_does_not_answer_is_waited_for_once_until_it_speaks_again(
    way: Reach, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "time", worker)
    monkeypatch.setattr(reach, "PATIENCE_S", 3.5)
    monkeypatch.setattr(reach, "_BEAT_S", 0.02)
    producer = Script(tmp_path)
    thread = producer.run((Hello, Welcome()))
    assert not way.ask(KEY)
    assert worker.beats == 4
    thread.join(PATIENCE_S)
    assert not way.expected
    assert not way.ask(NEXT)
    assert worker.beats == 4, "it was waited for again"
    monkeypatch.setattr(reach, "time", time)
    monkeypatch.setattr(reach, "PATIENCE_S", PATIENCE_S)
    producer.line.send(Ready(KEY, 0.1))

    def answer() -> None:
        producer.hear(Want)
        producer.line.send(Ready(NEXT, 0.1))

    answering = threading.Thread(target=answer)
    producer.hear(Want)
    answering.start()
    assert way.ask(NEXT)
    answering.join(PATIENCE_S)


def test_slow_entries_are_given_more_time(way: Reach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Script(tmp_path)
    producer.run((Hello, Welcome()), (Want, Ready(KEY, PATIENCE_S)))
    assert way.ask(KEY)
    monkeypatch.setattr(reach, "PATIENCE_S", 0.1)

    def late() -> None:
        producer.hear(Want)
        threading.Event().wait(0.4)
        producer.line.send(Ready(NEXT, 0.1))

    answering = threading.Thread(target=late)
    answering.start()
    assert way.ask(NEXT)
    answering.join(PATIENCE_S)


def test_a_note_is_dropped_where_the_producer_does_not_read(way: Reach, tmp_path: Path) -> None:
    producer = Script(tmp_path)
    thread = producer.run((Hello, Welcome()))
    way.note(KEY)
    thread.join(PATIENCE_S)
    began = time.monotonic()
    for step in range(20_000):
        way.note(Key(step, 0, 1))
    assert time.monotonic() - began < PATIENCE_S
    producer.run()
    assert not way.over
