"""A worker's batches from the cache: the same as without it, whatever happens to cache and producer."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import regrow
from regrow.core.ids import WorkerId
from regrow.core.messages.data import CacheSettings
from regrow.data.cache import reach
from regrow.data.cache.client import CachedSource, NodeCache
from regrow.data.cache.layout import Encoded
from regrow.data.loader import StepLoader
from regrow.data.walks import ShareWalk


class Counting(Dataset[torch.Tensor]):
    """Counts its readings by process, in a file that is none of the data's."""

    def __init__(self, reads: Path, odd: bool = False) -> None:
        self.reads, self.odd = str(reads), odd

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        log = os.open(f"{self.reads}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{os.getpid()}\n".encode())
        os.close(log)
        return object() if self.odd else index + torch.rand(16)


class Fickle(IterableDataset[torch.Tensor]):
    """Something else each time that it is read."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = torch.Generator().manual_seed(int.from_bytes(os.urandom(6), "little"))
        while True:
            yield torch.rand(4, generator=numbers)


class Worker:
    """A reader that takes part in the training."""

    halted = False
    stepping = True
    moved = False

    def __init__(self) -> None:
        self.wanted: list[int] = []

    def want_producer(self, loader: int) -> None:
        self.wanted.append(loader)

    def beat(self) -> None:
        pass

    def on_halt(self, call: Callable[[], None]) -> None:
        pass


class Node:
    """A node with a cache and, as it happens, no producer yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reads = folder / "reads"
        self.cache = folder / "cache"
        self.cache.mkdir()
        self.worker = Worker()

    def loader(self, *, workers: int = 0, odd: bool = False, **words: Any) -> Any:
        return regrow.DataLoader(Counting(self.reads, odd), batch_size=4, shuffle=True, num_workers=workers, **words)

    def open(self, loader: Any, *, speaks: bool = True, budget: int = 1 << 20, micro: bool = False) -> StepLoader:
        node = NodeCache(
            CacheSettings(str(self.cache), budget),
            str(self.folder),
            WorkerId("w"),
            100,
            speaks=speaks,
            reader=self.worker,
        )
        return StepLoader(loader, seed=3, cache=node.source, micro=micro)

    def readers(self) -> list[int]:
        return [int(line) for line in Path(f"{self.reads}.log").read_text().split()]

    def entries(self) -> list[Path]:
        return sorted(self.cache.rglob("*.entry"))


def source(loader: StepLoader) -> CachedSource:
    found = loader._source
    assert isinstance(found, CachedSource)
    return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_successor_reads_no_sample_that_its_predecessor_has_read(node: Node) -> None:
    first = node.open(node.loader())
    given = [first.batch(step, 1, 2) for step in range(5)]
    records = [first.record]
    first.close()
    count = len(node.readers())
    second = node.open(node.loader())
    again = [second.batch(step, 1, 2) for step in range(5)]
    assert all(torch.equal(before, after) for before, after in zip(given, again, strict=True))
    assert [second.record] == records
    assert len(node.readers()) == count == 20
    assert (source(second).counts.served, source(second).counts.made) == (5, 0)
    second.close()


def test_batches_and_records_are_those_of_a_worker_without_a_cache(node: Node) -> None:
    cached, plain = node.open(node.loader()), StepLoader(node.loader(), seed=3)
    for _ in range(2):  # made first, read from the cache then
        for step in (0, 7, 30):
            assert torch.equal(cached.batch(step, 0, 3), plain.batch(step, 0, 3))
            assert cached.record == plain.record
        cached.close()
        cached = node.open(node.loader())
    cached.close()


def test_what_a_body_writes_into_its_batch_reaches_nobody_else(node: Node) -> None:
    maker = node.open(node.loader())
    expected = maker.batch(2, 0, 1).clone()
    maker.close()
    one, other = node.open(node.loader()), node.open(node.loader())
    one.batch(2, 0, 1).zero_()
    assert torch.equal(other.batch(2, 0, 1), expected)
    assert torch.equal(one.batch(2, 0, 1), expected)
    assert len(node.readers()) == 4
    one.close()
    other.close()


@pytest.mark.parametrize("how", ["flipped", "cut", "emptied"])
def test_a_damaged_entry_is_made_anew_and_counted(node: Node, how: str) -> None:
    maker = node.open(node.loader())
    expected = maker.batch(2, 0, 1).clone()
    maker.close()
    (path,) = node.entries()
    whole = path.read_bytes()
    spoilt = {"flipped": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "cut": whole[:-64], "emptied": b""}
    path.write_bytes(spoilt[how])
    reader = node.open(node.loader())
    assert torch.equal(reader.batch(2, 0, 1), expected)
    assert (source(reader).counts.damaged, source(reader).counts.made) == (1, 1)
    assert path.read_bytes() == whole
    reader.close()


def test_the_next_entry_is_looked_for_ahead_of_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = node.open(node.loader())
    for step in range(3):
        maker.batch(step, 0, 1)
    maker.close()
    looked: list[tuple[int, str]] = []
    real = CachedSource._look

    def look(self: CachedSource, key: Any) -> Any:
        looked.append((key.step, threading.current_thread().name))
        return real(self, key)

    monkeypatch.setattr(CachedSource, "_look", look)
    reader = node.open(node.loader())
    reader.seek(0, 0, 1)
    for step in range(3):
        source(reader)._ahead.idle()
        reader.batch(step, 0, 1)
    reader.close()
    assert {step: thread for step, thread in looked if step < 3} == dict.fromkeys(range(3), "regrow-data")


def test_the_next_share_of_who_reads_several_is_looked_for_ahead_of_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [(step, share, 5) for step in range(3) for share in (1, 2, 4)]
    maker = node.open(node.loader(), micro=True)
    for place in places:
        maker.batch(*place)
    maker.close()
    looked: dict[tuple[int, ...], str] = {}
    real = CachedSource._look

    def look(self: CachedSource, key: Any) -> Any:
        looked[tuple(key)] = threading.current_thread().name
        return real(self, key)

    monkeypatch.setattr(CachedSource, "_look", look)
    reader, plain = node.open(node.loader(), micro=True), StepLoader(node.loader(), seed=3, micro=True)
    reader.follow(ShareWalk((1, 2, 4)))
    reader.seek(*places[0])
    for place in places:
        source(reader)._ahead.idle()
        assert torch.equal(reader.batch(*place), plain.batch(*place))
    assert source(reader).counts.made == 0
    reader.close()
    assert {place: looked[place] for place in places} == dict.fromkeys(places, "regrow-data")


def test_micro_batches_of_an_iterable_are_made_by_each_worker(node: Node) -> None:
    reader = node.open(regrow.cached(DataLoader(Fickle(), batch_size=3)), micro=True)
    assert not isinstance(reader._source, CachedSource)
    assert reader.batch(0, 1, 2).shape == (3, 4)
    assert node.entries() == [] and node.worker.wanted == []
    reader.close()


def test_loader_workers_wait_until_no_producer_is_expected(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = node.open(node.loader(workers=1))
    loader.batch(0, 0, 1)
    assert set(node.readers()) == {os.getpid()}
    monkeypatch.setattr(reach, "EXPECTED_S", 0.0)
    loader.batch(1, 0, 1)
    assert set(node.readers()) - {os.getpid()}
    loader.close()
    assert node.worker.wanted == [source(loader)._loader.number]


def test_what_a_loader_workers_start_prepares_is_there_from_the_first_batch_on(node: Node) -> None:
    loader = node.open(node.loader(workers=1, worker_init_fn=_prepare))
    loader.batch(0, 0, 1)
    assert os.getpid() not in node.readers()
    loader.close()


def test_an_iterable_gives_a_successor_what_it_gave_before(node: Node) -> None:
    plain = DataLoader(Fickle(), batch_size=3)
    first = node.open(regrow.cached(plain))
    given = [first.batch(step, 0, 2).clone() for step in range(4)]
    assert node.worker.wanted == [], "nobody can make these ahead"
    first.close()
    second = node.open(regrow.cached(plain))
    assert all(torch.equal(second.batch(step, 0, 2), given[step]) for step in (3, 0, 1, 2))
    second.close()


@pytest.mark.parametrize("speaks", [True, False])
def test_without_room_training_goes_on_and_one_worker_says_so_once(
    node: Node, speaks: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, encoded: Encoded) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("regrow.data.cache.folder.write", full)
    with caplog.at_level(logging.WARNING):
        cached, plain = node.open(node.loader(), speaks=speaks), StepLoader(node.loader(), seed=3)
        assert all(torch.equal(cached.batch(step, 0, 1), plain.batch(step, 0, 1)) for step in range(4))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == int(speaks)
    assert all("goes on without the data cache" in text and "No space left" in text for text in said)
    cached.close()


def test_batches_that_cannot_be_kept_are_given_all_the_same(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loader = node.open(node.loader(odd=True, collate_fn=_as_they_are))
        assert all(len(loader.batch(step, 0, 1)) == 4 for step in range(3))
    assert ["cannot be kept" in record.getMessage() for record in caplog.records] == [True]
    loader.close()


def test_entries_of_steps_that_all_have_passed_make_room(node: Node) -> None:
    loader = node.open(node.loader(), budget=4000)
    for step in range(20):
        loader.batch(step, 0, 1)
        assert sum(path.stat().st_size for path in node.entries()) <= 4000
    assert {0, 19} <= {int(path.name.split(".")[0]) for path in node.entries()}
    loader.close()


def test_closing_ends_the_thread_and_may_be_done_twice(node: Node) -> None:
    loader = node.open(node.loader())
    loader.batch(0, 0, 1)
    loader.close()
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "regrow-data"]


def _prepare(worker: int) -> None:
    pass


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples
