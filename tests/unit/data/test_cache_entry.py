"""An entry is whole or it is none: cut, flipped or mistaken, it is removed and never served."""

import errno
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regrow.core.errors import Damaged, NotCacheable
from regrow.data.cache import layout
from regrow.data.cache.entry import Encoded, Key, digest_of, encode, open_entry, write
from regrow.data.cache.layout import key_of, name_of, writer_of

IDENTITY = bytes(range(16))
OTHER = bytes(16)
KEY = Key(7, 1, 4)
SHM = Path("/dev/shm")


def entry_of(batch: object, key: Key = KEY) -> Encoded:
    return encode(batch, identity=IDENTITY, key=key, samples="0123456789abcdef")


def opened(folder: Path, key: Key = KEY) -> Any:
    entry = open_entry(folder, key, IDENTITY)
    assert entry is not None
    return entry


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


@pytest.fixture
def shm() -> Iterator[Path]:
    if not os.access(SHM, os.W_OK):
        pytest.skip("there is no /dev/shm")
    import tempfile

    with tempfile.TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


def test_an_entry_says_what_it_was_told(tmp_path: Path) -> None:
    batch: dict[str, Any] = {"x": torch.arange(5), "y": [1, "two"]}
    encoded = entry_of(batch)
    assert write(tmp_path / "new", encoded) == encoded.nbytes == (tmp_path / "new" / name_of(KEY)).stat().st_size
    entry = opened(tmp_path / "new")
    assert (entry.key, entry.samples, entry.nbytes) == (KEY, "0123456789abcdef", encoded.nbytes)
    assert entry.digest == encoded.digest == digest_of(batch)
    assert re.fullmatch("[0-9a-f]{16}", entry.digest)
    back = entry.batch()
    assert torch.equal(back["x"], batch["x"]) and back["y"] == [1, "two"]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / name_of(KEY)).stat().st_mode & 0o777 == 0o600


def test_the_digest_is_of_the_content_alone() -> None:
    batch = {"x": torch.arange(5)}
    elsewhere = encode(batch, identity=OTHER, key=Key(8, 0, 1), samples="")
    assert elsewhere.digest == entry_of(batch).digest == digest_of({"x": torch.arange(5)})
    others = [{"x": torch.arange(6)}, {"x": torch.arange(5).int()}, {"y": torch.arange(5)}, [torch.arange(5)]]
    others += [
        {"x": torch.arange(5).reshape(5, 1)},
        {"x": torch.arange(5).numpy()},
        {"x": torch.tensor([0, 1, 2, 3, 5])},
    ]
    assert len({digest_of(other) for other in others} | {digest_of(batch)}) == len(others) + 1
    assert digest_of({1, 2}) == ""


def test_an_entry_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert open_entry(tmp_path, KEY, IDENTITY) is None
    assert open_entry(tmp_path / "missing", KEY, IDENTITY) is None
    (tmp_path / "file").touch()
    assert open_entry(tmp_path / "file", KEY, IDENTITY) is None


def test_an_entry_cut_at_any_length_is_removed(tmp_path: Path) -> None:
    path = tmp_path / name_of(KEY)
    write(tmp_path, entry_of({"x": torch.arange(9), "y": "text"}))
    whole = path.read_bytes()
    assert len(whole) % 64 == 0
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(Damaged, match=re.escape(str(path))):
            open_entry(tmp_path, KEY, IDENTITY)
        assert not path.exists()
    path.write_bytes(whole + b"\0")
    with pytest.raises(Damaged):
        open_entry(tmp_path, KEY, IDENTITY)


def test_an_entry_with_any_bit_flipped_is_removed(tmp_path: Path) -> None:
    path = tmp_path / name_of(KEY)
    write(tmp_path, entry_of({"x": torch.arange(3)}))
    whole = bytearray(path.read_bytes())
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        path.write_bytes(whole)
        with pytest.raises(Damaged):
            open_entry(tmp_path, KEY, IDENTITY)
        assert not path.exists()
        whole[bit // 8] ^= 1 << bit % 8
    path.write_bytes(whole)
    assert opened(tmp_path).batch()["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("hole", [(0, 64), (64, 128), (128, 192), (4096, 8192)])
def test_an_entry_with_a_block_of_zeros_is_removed(tmp_path: Path, hole: tuple[int, int]) -> None:
    path = tmp_path / name_of(KEY)
    write(tmp_path, entry_of(torch.randint(1, 256, (10_000,), dtype=torch.uint8)))
    whole = path.read_bytes()
    path.write_bytes(whole[: hole[0]] + bytes(hole[1] - hole[0]) + whole[hole[1] :])
    with pytest.raises(Damaged):
        open_entry(tmp_path, KEY, IDENTITY)


def test_an_entry_of_another_identity_or_key_is_not_served(tmp_path: Path) -> None:
    encoded = entry_of([1])
    write(tmp_path, encoded)
    with pytest.raises(Damaged, match="identity"):
        open_entry(tmp_path, KEY, OTHER)
    assert files(tmp_path) == []
    for key in (Key(8, 1, 4), Key(7, 0, 4), Key(7, 1, 5)):
        write(tmp_path, encoded)
        (tmp_path / name_of(KEY)).rename(tmp_path / name_of(key))
        with pytest.raises(Damaged, match="step 7, share 1 of 4"):
            open_entry(tmp_path, key, IDENTITY)
        assert files(tmp_path) == []


def test_an_entry_of_a_later_format_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(layout, "FORMAT", layout.FORMAT + 1)
        write(tmp_path, entry_of([1]))
    with pytest.raises(Damaged, match="format 2"):
        open_entry(tmp_path, KEY, IDENTITY)


def test_no_link_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "real", entry_of([1]))
    (tmp_path / name_of(KEY)).symlink_to(tmp_path / "real" / name_of(KEY))
    with pytest.raises(OSError):
        open_entry(tmp_path, KEY, IDENTITY)


# --- reading copies nothing -----------------------------------------------------------------------------------------


def _mapping_of(address: int) -> tuple[str, str]:
    """Permissions and file of the mapping of this process that holds the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            words = line.split()
            return words[1], words[5] if len(words) > 5 else ""
    raise LookupError(hex(address))


def _anonymous_kib() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def test_tensors_lie_in_the_private_mapping_of_the_file(shm: Path) -> None:
    batch = {"t": torch.arange(100.0), "a": np.arange(100), "strided": torch.randn(4, 6).t()}
    write(shm, entry_of(batch))
    entry = opened(shm)
    back = entry.batch()
    for address in (back["t"].data_ptr(), back["a"].ctypes.data, back["strided"].data_ptr()):
        permissions, file = _mapping_of(address)
        assert permissions == "rw-p" and file == str(shm / name_of(KEY))
        assert address % 64 == 0
    assert back["t"].untyped_storage().nbytes() == 400


def test_reading_a_batch_takes_no_memory_and_writing_takes_only_what_is_written(shm: Path) -> None:
    mib = 64
    write(shm, entry_of(torch.ones(mib << 18)))
    entry = opened(shm)
    gc.collect()
    before = _anonymous_kib()
    tensor = entry.batch()
    assert float(tensor.sum()) == mib << 18
    assert _anonymous_kib() - before < 8 << 10
    tensor[: 16 << 18] = 2
    assert 15 << 10 < _anonymous_kib() - before < 24 << 10


def test_a_write_reaches_neither_the_file_nor_who_opens_it_later(tmp_path: Path) -> None:
    write(tmp_path, entry_of({"t": torch.zeros(5), "a": np.zeros(5)}))
    before = (tmp_path / name_of(KEY)).read_bytes()
    first = opened(tmp_path).batch()
    first["t"] += 1
    first["a"] += 1
    first["new"] = 1
    assert (tmp_path / name_of(KEY)).read_bytes() == before
    second = opened(tmp_path).batch()
    assert second["t"].tolist() == [0] * 5 and second["a"].tolist() == [0] * 5 and set(second) == {"t", "a"}
    assert first["t"].tolist() == [1] * 5


@pytest.mark.parametrize("take", ["t", "a"])
def test_a_tensor_outlives_its_entry_and_the_file(tmp_path: Path, take: str) -> None:
    write(tmp_path, entry_of({"t": torch.arange(50_000), "a": np.arange(50_000)}))
    kept = opened(tmp_path).batch()[take][10_000:20_000]
    (tmp_path / name_of(KEY)).unlink()
    gc.collect()
    assert int(kept.sum()) == sum(range(10_000, 20_000))


def test_the_mapping_goes_with_the_last_tensor(tmp_path: Path) -> None:
    write(tmp_path, entry_of(torch.arange(50_000)))
    name = str(tmp_path / name_of(KEY))
    tensor = opened(tmp_path).batch()
    assert name in Path("/proc/self/maps").read_text()
    del tensor
    gc.collect()
    assert name not in Path("/proc/self/maps").read_text()


# --- writing --------------------------------------------------------------------------------------------------------


def test_writing_over_an_entry_leaves_its_readers_alone(tmp_path: Path) -> None:
    write(tmp_path, entry_of(torch.zeros(50_000)))
    old = opened(tmp_path).batch()
    write(tmp_path, entry_of(torch.ones(50_000)))
    assert float(old.sum()) == 0 and float(opened(tmp_path).batch().sum()) == 50_000
    assert files(tmp_path) == [name_of(KEY)]


def test_many_tensors_are_written_in_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = os.writev

    def short(descriptor: int, buffers: list[memoryview]) -> int:
        calls.append(len(buffers))
        return (
            real(descriptor, [buffers[0][: max(1, len(buffers[0]) // 2)]])
            if len(calls) % 3
            else real(descriptor, buffers)
        )

    monkeypatch.setattr(os, "writev", short)
    batch = [torch.full((number % 40,), number) for number in range(1500)]
    write(tmp_path, entry_of(batch))
    assert max(calls) <= 1024
    assert all(torch.equal(*pair) for pair in zip(opened(tmp_path).batch(), batch, strict=True))


@pytest.mark.parametrize("call", ["posix_fallocate", "writev", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_where_writing_fails_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    write(tmp_path, entry_of([1], Key(1, 0, 1)))

    def fail(*_: object) -> None:
        raise OSError(number, "no")

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no") as failed:
        write(tmp_path, entry_of([2]))
    assert failed.value.errno == number
    assert files(tmp_path) == [name_of(Key(1, 0, 1))]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_where_room_cannot_be_reserved_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    write(tmp_path, entry_of([2]))
    assert opened(tmp_path).batch() == [2]


def test_a_folder_whose_cache_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "gone" / "identity", entry_of([1]))
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("identity", "key", "samples"),
    [
        (b"short", KEY, ""),
        (IDENTITY, Key(2**63, 0, 1), ""),
        (IDENTITY, Key(0, -1, 1), ""),
        (IDENTITY, KEY, "x" * 33),
    ],
)
def test_what_the_header_has_no_room_for_is_an_error(identity: bytes, key: Key, samples: str) -> None:
    with pytest.raises(ValueError, match="header"):
        encode([1], identity=identity, key=key, samples=samples)


def test_a_batch_that_cannot_be_kept_is_refused_before_anything_is_written() -> None:
    with pytest.raises(NotCacheable):
        entry_of({"x": object()})


@pytest.mark.parametrize("key", [KEY, Key(0, 0, 1), Key(10**10, 7, 8), Key(123456789, 1023, 1024)])
def test_a_name_says_whose_entry_it_is(key: Key) -> None:
    assert key_of(name_of(key)) == key


@pytest.mark.parametrize(
    "name", ["", "7.1.4.entry", "0000000007.1.4", "0000000007.01.4.entry", "0000000007.1.4.entry.1.tmp"]
)
def test_other_names_are_no_entries(name: str) -> None:
    assert key_of(name) is None


def test_a_temporary_name_says_who_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        seen.extend(files(tmp_path))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    write(tmp_path, entry_of([1]))
    assert len(seen) == 1 and writer_of(seen[0]) == os.getpid() and key_of(seen[0]) is None
    assert writer_of(name_of(KEY)) is None
