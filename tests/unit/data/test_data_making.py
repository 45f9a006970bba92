"""Entries that a producer makes, their order, and its behaviour when it cannot."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import regrow
from regrow.core.errors import Unfit
from regrow.core.ids import WorkerId
from regrow.core.messages.data import CacheSettings
from regrow.data.cache import folder as cache_folder
from regrow.data.cache import layout, making
from regrow.data.cache.entry import open_entry
from regrow.data.cache.identity import described
from regrow.data.cache.layout import Encoded, Key
from regrow.data.cache.making import Making
from regrow.data.cache.messages import At, Hello, Want
from regrow.data.described import cached_loader
from regrow.data.loader import StepLoader
from regrow.data.order import order_of

BATCH = 2


class Noisy(Dataset[torch.Tensor]):
    """Counts its readings in a file, as loader workers read too."""

    def __init__(
        self, reads: Path, bad: int = -1, odd: bool = False, dies_at_read: int = -1, slow_process: int = -1
    ) -> None:
        self.reads, self.bad, self.odd = str(reads), bad, odd
        self.dies_at_read, self.slow_process = dies_at_read, slow_process

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError(f"sample {index} is broken")
        log = os.open(self.reads + ".log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{index:3}\n".encode())
        count = os.lseek(log, 0, os.SEEK_END) // 4
        os.close(log)
        if 0 <= self.dies_at_read <= count:  # two may count at the same moment
            with contextlib.suppress(FileExistsError), open(f"{self.reads}.died", "x"):
                os.kill(os.getpid(), signal.SIGKILL)
        self._dawdle()
        return object() if self.odd else index + torch.rand(32)

    def _dawdle(self) -> None:
        """The first process that comes here waits until the test has seen enough."""
        if self.slow_process < 0:
            return
        with contextlib.suppress(FileExistsError):
            os.symlink(str(os.getpid()), f"{self.reads}.slow")
        deadline = time.monotonic() + 60.0
        while os.readlink(f"{self.reads}.slow") == str(os.getpid()) and not os.path.exists(f"{self.reads}.enough"):
            assert time.monotonic() < deadline, "the fast ones waited for the slow one"
            time.sleep(0.01)


class Here:
    """A producer's making, and a look into its cache."""

    def __init__(
        self,
        folder: Path,
        *,
        budget: int = 1 << 20,
        workers: int = 0,
        until: int = 100,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **words: Any,
    ) -> None:
        self.dataset = Noisy(folder / "reads", **words)
        self.loader = regrow.DataLoader(
            self.dataset, batch_size=BATCH, shuffle=True, num_workers=workers, collate_fn=collate_fn
        )
        self.cache = folder / "cache"
        self.cache.mkdir()
        loader = cached_loader(self.loader, seed=7)
        assert loader is not None
        self.identity = described(loader)
        self.making = Making(self.loader, CacheSettings(str(self.cache), budget), alone=["a file"])
        self.until = until
        self.making.check(self.hello())

    def hello(self, **changes: Any) -> Hello:
        words: dict[str, Any] = {"identity": self.identity.value, "parts": self.identity.parts, "seed": 7}
        return Hello(WorkerId("w"), until=self.until, **(words | changes))

    def make(
        self, *positions: Key, wants: tuple[Key, ...] = (), shares: tuple[int, ...] = (), most: int = 1000
    ) -> list[Key]:
        """Make entries, one after the other, for readers at these positions that read these shares in each step."""
        self.making.stand([At(key, shares) for key in positions], [Want(key, shares) for key in wants])
        made: list[Key] = []
        while len(made) < most:
            made += (news := self.making.make())
            if not news and not self.making.busy and self.making.rest is None:
                if not self.making.descriptors:
                    break
                select.select(self.making.descriptors, [], [], 10.0)
        return made

    def batch(self, key: Key) -> Any:
        entry = open_entry(self.cache / self.identity.value.hex(), key, self.identity.value)
        assert entry is not None
        return entry.batch()

    def there(self) -> set[Key]:
        found = (path.name.split(".") for path in self.cache.rglob("*.entry"))
        return {Key(int(step), int(share), int(shares)) for step, share, shares, _ in found}

    def reads(self) -> int:
        return len(Path(self.dataset.reads + ".log").read_text().splitlines())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans follow each other without a pause."""
    monkeypatch.setattr(making, "_PLAN_S", 0.0)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    made = Here(tmp_path)
    yield made
    made.making.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_entries_are_those_that_a_worker_would_make_itself(tmp_path: Path, workers: int) -> None:
    here = Here(tmp_path, workers=workers, until=6)
    made = sorted(here.make(Key(0, 0, 2), Key(0, 1, 2)))
    assert made == [Key(step, share, 2) for step in range(6) for share in (0, 1)]
    alone = StepLoader(here.loader, seed=7)
    for key in sorted(here.there()):
        assert torch.equal(here.batch(key), alone.batch(*key))
    alone.close()
    here.making.close()


def test_what_is_needed_first_is_made_first_side_by_side(here: Here) -> None:
    made = here.make(Key(10, 0, 2), Key(12, 1, 2), most=8)
    assert made[:4] == [Key(10, 0, 2), Key(12, 1, 2), Key(11, 0, 2), Key(13, 1, 2)]


def test_a_reader_of_several_shares_has_them_made_in_its_order(here: Here) -> None:
    shares = (1, 2, 4)
    made = here.make(Key(7, 2, 5), shares=shares, most=6)
    assert made == [Key(7, 2, 5), Key(7, 4, 5), *(Key(8, share, 5) for share in shares), Key(9, 1, 5)]
    assert len(here.making._served) == 1, "loader workers for each share"


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_are_those_that_a_worker_would_make_itself(tmp_path: Path, workers: int) -> None:
    here = Here(tmp_path, workers=workers, until=3)
    made = sorted(here.make(Key(0, 0, 6), Key(0, 3, 6), shares=(0, 1, 2)))
    assert made == [Key(step, share, 6) for step in range(3) for share in range(4)]
    alone = StepLoader(here.loader, seed=7, micro=True)
    for key in sorted(here.there()):
        assert torch.equal(here.batch(key), alone.batch(*key))
    alone.close()
    here.making.close()


def test_shares_that_are_dealt_anew_are_made_for_who_reads_them_now_and_what_is_there_stays(tmp_path: Path) -> None:
    here = Here(tmp_path, until=4)
    here.make(Key(0, 0, 4), shares=(0, 1, 2, 3))
    reads = here.reads()
    assert here.making.make() == []
    here.making.stand([At(Key(2, 0, 4), (0, 1)), At(Key(2, 2, 4), (2, 3))], ())
    assert [here.making.make() for _ in range(3)] == [[]] * 3 and not here.making.busy
    assert list(here.making._served) == [((0, 1), 4), ((2, 3), 4)], "the group that is read no more is still there"
    assert here.reads() == reads
    here.making.close()


def test_what_somebody_waits_for_comes_before_all_else(here: Here) -> None:
    here.make(Key(0, 0, 1), most=2)
    assert here.make(Key(0, 0, 1), wants=(Key(50, 0, 1),), most=1) == [Key(50, 0, 1)]


def test_nothing_is_made_twice_and_nothing_past_the_end(tmp_path: Path) -> None:
    here = Here(tmp_path, until=5)
    here.make(Key(0, 0, 1))
    here.make(Key(2, 0, 1))
    assert here.there() == {Key(step, 0, 1) for step in range(5)}
    assert here.reads() == 5 * BATCH


def test_a_successor_makes_only_what_is_missing(tmp_path: Path) -> None:
    here = Here(tmp_path, until=9)
    here.make(Key(0, 0, 1))
    (here.cache / here.identity.value.hex() / "0000000004.0.1.entry").unlink()
    following = Making(here.loader, CacheSettings(str(here.cache), 1 << 20), alone=["a file"])
    following.check(here.hello())
    following.stand([At(Key(2, 0, 1))], ())
    assert [key for _ in range(20) for key in following.make()] == [Key(4, 0, 1)]


def test_an_entry_that_a_worker_has_written_meanwhile_is_not_made_again(here: Here) -> None:
    here.make(Key(0, 0, 1), most=1)
    known = here.cache / here.identity.value.hex()
    for step in (1, 2):  # what is in them does not matter here
        (known / f"{step:010d}.0.1.entry").write_bytes(b"x" * 512)
    assert here.make(Key(0, 0, 1), most=1) == [Key(3, 0, 1)]


def test_the_budget_holds_and_the_first_step_stays_for_newcomers(tmp_path: Path) -> None:
    here = Here(tmp_path, budget=6000)
    here.make(Key(0, 0, 1))
    for step in range(1, 40):
        here.make(Key(step, 0, 1))
        taken = sum(path.stat().st_size for path in here.cache.rglob("*.entry"))
        assert taken <= 6000
        assert {Key(0, 0, 1), Key(step, 0, 1), Key(step + 1, 0, 1)} <= here.there()
    assert here.reads() <= 50 * BATCH, "what was made was made again"
    here.making.close()


def test_what_readers_need_at_once_and_has_no_room_is_left_to_them(tmp_path: Path) -> None:
    here = Here(tmp_path, budget=700)
    here.make(Key(4, 0, 2), Key(4, 1, 2))
    wants = (Key(4, 0, 2), Key(4, 1, 2))
    news = here.make(*wants, wants=wants, most=2)
    there = here.there()
    for key in wants:
        assert key in there or (key in news and "no room" in str(here.making.failed(key)))
    assert len(there) == 1
    here.making.close()


def test_a_share_of_a_world_that_is_no_more_is_dropped(here: Here) -> None:
    here.make(Key(0, 0, 2), Key(0, 1, 2), most=4)
    assert {key.shares for key in here.make(Key(3, 0, 1), most=20)} == {1}


def test_a_share_whose_reader_has_died_goes_on_for_its_successor(here: Here) -> None:
    here.make(Key(0, 0, 2), Key(0, 1, 2), most=2)
    assert Key(3, 1, 2) in here.make(Key(0, 0, 2), most=12)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_told_and_tried_again_only_when_it_is_wanted(
    tmp_path: Path, workers: int
) -> None:
    spec = cached_loader(regrow.DataLoader(Noisy(tmp_path / "x"), batch_size=BATCH, shuffle=True), seed=7)
    assert spec is not None
    bad = order_of(spec.spec, 1).addresses(3)[1][1]
    here = Here(tmp_path, workers=workers, bad=bad)
    made = here.make(Key(0, 0, 1))
    assert Key(3, 0, 1) in made
    assert Key(3, 0, 1) not in here.there()
    assert "is broken" in str(here.making.failed(Key(3, 0, 1)))
    assert here.make(Key(0, 0, 1)) == []
    here.making.try_again(Key(3, 0, 1))
    assert here.making.failed(Key(3, 0, 1)) is None
    assert Key(3, 0, 1) in here.make(Key(3, 0, 1), wants=(Key(3, 0, 1),), most=5)
    assert "is broken" in str(here.making.failed(Key(3, 0, 1)))
    here.making.close()


def test_a_loader_worker_that_is_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "_CHECK_S", 0.0)
    here = Here(tmp_path, workers=2, until=12, dies_at_read=9)
    made = here.make(Key(0, 0, 1))
    (missed,) = [key for key in made if here.making.failed(key)]
    here.making.try_again(missed)
    here.make(Key(0, 0, 1), wants=(missed,))
    assert here.there() == {Key(step, 0, 1) for step in range(12)}
    here.making.close()


def test_what_loader_workers_had_made_and_nobody_took_does_not_stay(tmp_path: Path) -> None:
    here = Here(tmp_path, workers=2)
    here.make(Key(0, 0, 1), most=1)
    deadline = time.monotonic() + 60.0
    while not list(here.cache.rglob("*.tmp")):  # they work ahead
        assert time.monotonic() < deadline
        time.sleep(0.005)
    here.making.close()
    assert list(here.cache.rglob("*.tmp")) == []
    assert here.there()


def test_a_slow_share_does_not_hold_up_the_others(tmp_path: Path) -> None:
    here = Here(tmp_path, workers=1, until=8, slow_process=0)
    made = here.make(Key(0, 0, 2), Key(0, 1, 2), most=5)
    assert len({key.share for key in made}) == 1 and not [key for key in made if here.making.failed(key)]
    Path(f"{here.dataset.reads}.enough").touch()
    here.making.close()


def test_a_worker_whose_data_differ_is_told_what_differs(here: Here) -> None:
    other = here.identity.parts | {"the data set's length": "399"}
    with pytest.raises(Unfit, match="the data set's length: 400 → 399"):
        here.making.check(here.hello(identity=b"0" * 16, parts=other))


def test_batches_that_cannot_be_kept_end_the_producer(tmp_path: Path) -> None:
    here = Here(tmp_path, odd=True, collate_fn=_as_they_are)
    here.make(Key(0, 0, 1))
    assert "cannot be kept" in here.making.refusal
    with pytest.raises(Unfit, match="cannot be kept"):
        here.making.check(here.hello())


def test_a_full_disk_costs_what_nobody_needs_and_then_the_cache(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.make(Key(0, 0, 1), most=30)
    real, room = layout.write, [sum(path.stat().st_size for path in here.cache.rglob("*.entry"))]

    def full(path: Path, encoded: Encoded) -> int:
        if sum(entry.stat().st_size for entry in here.cache.rglob("*.entry")) + encoded.nbytes > room[0]:
            raise OSError(28, "No space left on device")
        return real(path, encoded)

    monkeypatch.setattr(cache_folder, "write", full)
    assert here.make(Key(25, 0, 1), most=5)
    assert here.making.refusal == ""
    room[0] = 0
    here.make(Key(90, 0, 1))
    assert "takes no more" in here.making.refusal


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples
