"""A segment of shared memory says itself whether it holds a whole copy, and whose."""

import os
import resource
import signal
from pathlib import Path

import pytest

from regrow.core.errors import NoMemoryForCopy, Torn
from regrow.core.ids import Rank, StepNo
from regrow.hydration.copies import segment as segments
from regrow.hydration.copies.segment import Segment, chunk_count, chunks_of, layout

RANK = Rank(2)


def written(step: int = 5, payload: bytes = b"state" * 1000) -> Segment:
    segment = Segment.create()
    segment.begin(RANK, "half", b"inventory", len(payload))[:] = payload
    segment.publish(StepNo(step))
    return segment


def seen_by_another(segment: Segment) -> Segment:
    return Segment.attach(f"/proc/{os.getpid()}/fd/{segment.descriptor}")


def test_what_one_writes_another_reads() -> None:
    reader = seen_by_another(written())
    head = reader.head()
    assert (head.rank, head.step, head.holding, head.inventory) == (RANK, 5, "half", b"inventory")
    assert bytes(reader.payload()) == b"state" * 1000


def test_a_segment_that_is_being_written_is_no_copy() -> None:
    segment = written()
    reader = seen_by_another(segment)
    segment.begin(RANK, "half", b"inventory", 100)
    assert reader.step == -1
    with pytest.raises(Torn, match="no whole copy"):
        reader.head()


def test_the_death_of_the_writer_leaves_no_copy_that_says_it_is_whole() -> None:
    segment = Segment.create()
    pid = os.fork()
    if pid == 0:
        segment.begin(RANK, "half", b"inventory", 1 << 20)[:10] = b"0123456789"
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    segment.refresh()
    assert segment.step == -1
    with pytest.raises(Torn):
        segment.head()


def test_a_flipped_bit_in_the_description_is_seen() -> None:
    segment = written()
    raw = os.pread(segment.descriptor, 1, 66)
    os.pwrite(segment.descriptor, bytes([raw[0] ^ 1]), 66)
    with pytest.raises(Torn, match="checksum"):
        segment.head()


def test_a_reader_follows_a_segment_that_grows() -> None:
    segment = written()
    reader = seen_by_another(segment)
    bigger = b"x" * (5 << 20)
    segment.begin(RANK, "half", b"inventory", len(bigger))[:] = bigger
    segment.publish(StepNo(6))
    with pytest.raises(Torn):
        reader.head()
    reader.refresh()
    assert reader.head().step == 6 and bytes(reader.payload()) == bigger


def test_nobody_can_take_pages_away_from_under_a_reader() -> None:
    segment = written()
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.descriptor, 10)


def test_a_file_is_no_segment(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10000)
    with pytest.raises(Torn, match="no segment"):
        Segment.attach(str(tmp_path / "file"))
    segment = os.memfd_create("other")
    with pytest.raises(Torn, match="no segment"):
        Segment.attach(f"/proc/self/fd/{segment}")
    os.close(segment)


def test_memory_that_is_not_there_is_refused_before_anything_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = written()
    monkeypatch.setattr(segments, "room_for_copies", lambda: 1 << 20)
    with pytest.raises(NoMemoryForCopy, match="8 MiB more"):
        segment.begin(RANK, "half", b"", 10 << 20)
    assert segment.head().step == 5 and bytes(segment.payload()) == b"state" * 1000


def test_a_kernel_that_gives_no_more_memory_is_an_error_and_no_death() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, before[1]))
    try:
        with pytest.raises(NoMemoryForCopy, match="cannot be had"):
            Segment.create().begin(RANK, "half", b"", 10 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_and_descriptors_are_given_back_with_the_last_reference() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(50):
        segment = written()
        reader = seen_by_another(segment)
        view = reader.payload()
        del segment, reader, view
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_tensors_are_laid_out_at_multiples_of_64() -> None:
    assert layout([10, 0, 64, 65]) == ([0, 64, 64, 128], 256)
    assert layout([]) == ([], 0)


def test_checksums_cover_a_mebibyte_each() -> None:
    assert list(chunks_of((1 << 20) + 5)) == [(0, 1 << 20), (1 << 20, (1 << 20) + 5)]
    assert chunk_count((1 << 20) + 5) == 2 and chunk_count(0) == 0
