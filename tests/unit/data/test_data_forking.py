"""Reasons that keep a data set from being read by several forked processes at once."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from regrow.data.cache.forking import open_descriptors, shared_positions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "samples"
    made.write_bytes(bytes(4096))
    return made


def test_a_file_that_is_read_by_seeking_is_shared(path: Path) -> None:
    before = open_descriptors()
    with path.open("rb"):
        assert shared_positions(before) == [str(path)]
    assert shared_positions(before) == []


def test_a_connection_is_shared() -> None:
    before = open_descriptors()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert len(shared_positions(before)) == 2


def test_what_is_mapped_or_only_written_is_not(path: Path) -> None:
    before = open_descriptors()
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    with path.with_suffix(".log").open("a"):
        assert shared_positions(before) == []
    assert mapped[0] == 0


def test_what_was_open_before_does_not_count(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert shared_positions(open_descriptors()) == []
    finally:
        os.close(descriptor)
