import mmap
import os
from collections.abc import Iterator

import pytest

from regrow.agent.workers.early_exit import EarlyExit
from regrow.core.board import BOARD_BYTES, OWN_MOST, BatchShown, Board
from regrow.core.ids import Generation, StepNo
from regrow.core.messages.data import BatchRecord
from regrow.core.messages.replicas import OwnValues
from regrow.core.phase import Phase

RECORD = BatchRecord(2, 4, "0123456789abcdef", "fedcba9876543210")
PLACE = (Generation(3), StepNo(17))


@pytest.fixture
def pages() -> Iterator[tuple[Board, Board]]:
    reader, descriptor = Board.create()
    writer = Board.attach(descriptor)
    os.close(descriptor)
    yield writer, reader
    writer.close()
    reader.close()


@pytest.mark.parametrize("record", [RECORD, BatchRecord(0, 1), BatchRecord(0, 1, samples="0" * 16)])
def test_what_a_worker_has_read_is_seen_by_its_agent(pages: tuple[Board, Board], record: BatchRecord) -> None:
    writer, reader = pages
    assert reader.read_batch() is None
    writer.show_batch(*PLACE, record)
    assert reader.read_batch() == BatchShown(*PLACE, record)


def test_progress_and_what_was_read_leave_each_other_alone(pages: tuple[Board, Board]) -> None:
    writer, reader = pages
    writer.show_batch(*PLACE, RECORD)
    writer.enter(Phase.COMPUTING, step=18, generation=4)
    assert reader.read_batch() == BatchShown(*PLACE, RECORD)
    assert (reader.read().step, reader.read().phase) == (18, Phase.COMPUTING)


def test_a_record_of_which_any_byte_is_not_written_yet_is_not_seen() -> None:
    whole = Board.create()
    whole[0].show_batch(*PLACE, RECORD)
    before = Board.create()
    before[0].show_batch(Generation(3), StepNo(16), BatchRecord(1, 3, "a" * 16, "b" * 16))
    new, old = os.pread(whole[1], 256, 0), os.pread(before[1], 256, 0)
    differing = [at for at in range(256) if new[at] != old[at]]
    seen = {}
    for written in range(len(differing)):
        torn = bytearray(old)
        for at in differing[:written]:
            torn[at] = new[at]
        os.pwrite(before[1], torn, 0)
        seen[written] = before[0].read_batch()
    assert len(differing) > 30
    assert seen.pop(0) is not None, "nothing of the new one is written: the old one stands"
    assert set(seen.values()) == {None}


def test_values_of_the_last_two_steps_are_found_and_none_of_which_a_byte_is_not_written(
    pages: tuple[Board, Board],
) -> None:
    writer, reader = pages
    assert reader.read_own() == []
    told = [OwnValues(StepNo(step), bytes([step]) * size, step != 6) for step, size in ((4, 9), (5, OWN_MOST), (6, 30))]
    for own in told:
        writer.show_own(own)
    assert reader.read_own() == [told[2], told[1]]
    whole = Board.create()
    whole[0].show_own(OwnValues(StepNo(8), b"8" * 30))
    new, size = os.pread(whole[1], 2 * OWN_MOST, 0), 0
    for size in range(BOARD_BYTES, BOARD_BYTES + 64):
        page = Board.create()
        page[0].show_own(told[2])
        os.pwrite(page[1], new[BOARD_BYTES:size], BOARD_BYTES)
        assert page[0].read_own() in ([], [told[2]], [OwnValues(StepNo(8), b"8" * 30)])
        page[0].close()
        os.close(page[1])
    whole[0].close()
    os.close(whole[1])


def test_a_digest_of_another_length_is_refused(pages: tuple[Board, Board]) -> None:
    with pytest.raises(ValueError, match="not a digest of 16 digits"):
        pages[0].show_batch(*PLACE, BatchRecord(0, 1, "abc"))


def test_counts_of_many_groups_leave_the_mutex_alone_that_shows_an_early_end() -> None:
    board, descriptor = Board.create()
    pulse = EarlyExit(descriptor)
    with mmap.mmap(descriptor, BOARD_BYTES) as page:
        mutex = slice(BOARD_BYTES // 2 - 8, BOARD_BYTES // 2 + 64)
        before = page[mutex]
        for place in range(200):
            board.show_count(place, 1 + place, 7)
        assert page[mutex] == before
    assert set(board.read_counts().values()) == {7}
    assert len(board.read_counts()) >= 100
    pulse.close()
    board.close()
    os.close(descriptor)
