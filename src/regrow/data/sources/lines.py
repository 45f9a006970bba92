"""Where each line of a text begins, found in one pass and remembered beside it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from regrow.data.sources.files import SourceFile
from regrow.data.sources.local import DerivedFiles, Telling

Offsets = np.ndarray[tuple[int], np.dtype[np.int64]]

_BLOCK = 1 << 23
_MAGIC = b"RGLINES1"
_HEADER = 32
BOM = b"\xef\xbb\xbf"
_NEWLINE, _RETURN = 10, 13
_SPACES = np.frombuffer(b" \t\r\n", dtype=np.uint8)


class LineIndex:
    """Where the lines of one text begin that are not blank; line i is `text[starts[i]:starts[i + 1]]`.

    Kept in a file of `derived` that all processes map; where there is no place for it, in memory. Pickled, it is
    looked up again where it is read.

    Args:
        source: whose text it is.
        text: the text in a local file.
        derived: where the index is kept.
    """

    def __init__(self, source: SourceFile, text: Path, derived: DerivedFiles) -> None:
        self._source, self._text, self._derived = source, text, derived
        self._starts, self._mapped = self._obtain()

    @property
    def starts(self) -> Offsets:
        """int64 [lines + 1]: the first byte of each line, and the end of the text."""
        return self._starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._mapped:
            del state["_starts"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._mapped:
            self._starts, self._mapped = self._obtain()

    def _obtain(self) -> tuple[Offsets, bool]:
        """The index, and whether it is mapped from a file."""
        built: list[Offsets] = []

        def make(file: BinaryIO) -> None:
            built.append(self._build())
            write_index(file, built[0])

        try:
            path = self._derived.obtain(self._source, ".lines", make, whole=lambda path: read_index(path) is not None)
            found = read_index(path)
        except OSError:
            found = (
                None  # The folder is read-only or full. The index is needed all the same; the next process builds it.
            )
        if found is not None:
            return found, True
        return (built[0] if built else self._build()), False

    def _build(self) -> Offsets:
        size = self._text.stat().st_size
        telling = Telling(f"indexing {self._source.name}", size)
        with self._text.open("rb") as file:
            starts = find_lines(file, telling.at)
        self._source.check()  # the index is kept under the name of this version
        return starts


def find_lines(file: BinaryIO, progress: Callable[[int], None] = lambda _: None) -> Offsets:
    """int64 [lines + 1]: the start of each line that is not blank, and the end of the file. About 1 GB/s."""
    found: list[Offsets] = []
    rest, begin = b"", 0
    if (head := file.read(len(BOM))) == BOM:
        begin = len(BOM)
    else:
        rest = head
    while True:
        block = file.read(_BLOCK)
        text = rest + block
        whole = len(text) if not block else text.rfind(b"\n") + 1
        found.append(_starts_in(text[:whole]) + begin)
        rest, begin = text[whole:], begin + whole
        progress(begin)
        if not block:
            return np.concatenate([*found, np.array([begin], dtype=np.int64)])


def _starts_in(text: bytes) -> Offsets:
    """The lines of `text`, of which the last may lack its newline, that are not blank."""
    if not text:
        return np.empty(0, dtype=np.int64)
    data = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(data == _NEWLINE)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends + 1])
    starts = starts[starts < len(data)]
    first = data[starts]
    doubtful = np.flatnonzero(np.isin(first, _SPACES))
    keep = np.ones(len(starts), dtype=bool)
    keep[doubtful] = False
    for line in doubtful[first[doubtful] != _NEWLINE]:
        end = int(starts[line + 1]) if line + 1 < len(starts) else len(text)
        keep[line] = bool(text[starts[line] : end].strip())
    return starts[keep]


def write_index(file: BinaryIO, starts: Offsets) -> None:
    """Write an index with a header by which `read_index` knows that it is whole."""
    body = np.ascontiguousarray(starts, dtype="<i8")
    digest = xxhash.xxh3_64(body.data).intdigest()
    file.write(_MAGIC + len(body).to_bytes(8, "little") + digest.to_bytes(8, "little") + bytes(8))
    file.write(body.data)


def read_index(path: Path) -> Offsets | None:
    """The index in a file, mapped; None where there is none that is whole."""
    try:
        with path.open("rb") as file:
            header, size = file.read(_HEADER), os.fstat(file.fileno()).st_size
            count = int.from_bytes(header[8:16], "little")
            if len(header) < _HEADER or header[:8] != _MAGIC or count < 1 or size != _HEADER + 8 * count:
                return None
            starts = np.memmap(file, dtype="<i8", mode="r", offset=_HEADER, shape=(count,))
    except OSError:
        return None
    if xxhash.xxh3_64(starts.data).intdigest() != int.from_bytes(header[16:24], "little"):
        return None
    return starts
