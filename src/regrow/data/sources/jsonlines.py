"""JSON Lines as a map-style data set."""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from regrow.core.errors import DataError, UsageError
from regrow.data.sources.files import Paths, SourceFile, digest_of_files, find_files
from regrow.data.sources.lines import LineIndex
from regrow.data.sources.local import DerivedFiles, local_text
from regrow.data.sources.records import line_number, malformed, parse_record

_MOST_OPEN = 64


class JsonLines(Dataset[Any]):
    """The lines of JSON Lines files, each a dict; blank lines are left out.

    Sample i is the i-th line of all files, in the order given (those of a glob by name). A line is read when it is
    asked for. Where the lines begin is found in one pass and kept in the cache folder, so that the next start needs
    none. What is compressed (`.gz`) or behind a URL is copied there once, uncompressed. May be pickled and forked; each
    process opens files of its own.

    Args:
        paths: a path, a glob, a URL that fsspec knows (`s3://…`, `memory://…`), or a list of them.
        transform: what a sample is passed through.
        cache_dir: the folder for indexes and copies; default `$XDG_CACHE_HOME/regrow/data`, `~/.cache` without it.
        storage_options: what fsspec needs to open URLs.

    Raises `UsageError` for files that are missing or have no lines; `DataError`, with file and line, where a line is
    asked for that is no JSON object, or whose file has changed since.
    """

    def __init__(
        self,
        paths: Paths,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.transform = transform
        self._files = find_files(paths, storage_options)
        derived = DerivedFiles(cache_dir)
        texts = [local_text(source, derived) for source in self._files]
        self._lines = [LineIndex(*pair, derived) for pair in zip(self._files, texts, strict=True)]
        self._ends = list(accumulate(len(lines) for lines in self._lines))
        if self._ends[-1] == 0:
            raise UsageError(f"no lines in {_listed(self._files)}", hint="look where they come from")
        self._open_files = _OpenTexts(self._files, texts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self._ends, at)
        lines = self._lines[number]
        line = at - (self._ends[number - 1] if number else 0)
        begin, end = int(lines.starts[line]), int(lines.starts[line + 1])
        text = self._open_files.read(number, begin, end)
        try:
            record = parse_record(text)
        except ValueError as error:
            raise self._open_files.error_at(number, begin, text, str(error)) from error
        return record if self.transform is None else self.transform(record)

    def fingerprint(self) -> str:
        """Changes with the names, sizes and times of change of the files. The transform is no part of it."""
        return digest_of_files("JsonLines", self._files)


class _OpenTexts:
    """Reads from local texts at any position, through descriptors of this thread and process alone."""

    def __init__(self, sources: list[SourceFile], texts: list[Path]) -> None:
        self._sources, self._texts = sources, texts
        self._sizes = [text.stat().st_size for text in texts]
        self._own = _Descriptors()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_own"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own = _Descriptors()

    def read(self, number: int, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`. Raises `DataError` where the file no longer has them."""
        descriptor = self._own.get(number)
        if descriptor is None:
            self._check(number)
            descriptor = self._own.add(number, self._texts[number])
        text = os.pread(descriptor.number, end - begin, begin)
        while len(text) < end - begin:
            more = os.pread(descriptor.number, end - begin - len(text), begin + len(text))
            if not more:
                self._check(number)
                raise DataError(f"{self._texts[number]} ended at byte {begin + len(text)} while it was read")
            text += more
        return text

    def error_at(self, number: int, begin: int, text: bytes, why: str) -> DataError:
        """What is wrong with the line at `begin`: the file may have been changed, else the line is malformed."""
        self._check(number)
        with self._texts[number].open("rb") as file:
            return malformed(self._sources[number], line_number(file, begin), text, why)

    def _check(self, number: int) -> None:
        source, text = self._sources[number], self._texts[number]
        if str(text) == source.name:
            source.check()
            return
        size = text.stat().st_size if text.exists() else -1
        if size != self._sizes[number]:
            found = f"has {size} bytes" if size >= 0 else "is gone"
            raise DataError(
                f"{text}, the copy of {source.name}, {found}; it had {self._sizes[number]} bytes",
                hint="start again: it will be made anew",
            )


class _Descriptor:
    """An open file; closed when nobody has this any more, as when its thread has ended."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "number"):
            close(self.number)


class _Descriptors(threading.local):
    """Files that this thread has open, the last used ones."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._open: OrderedDict[int, _Descriptor] = OrderedDict()

    def get(self, number: int) -> _Descriptor | None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._open.clear()
        descriptor = self._open.get(number)
        if descriptor is not None:
            self._open.move_to_end(number)
        return descriptor

    def add(self, number: int, path: Path) -> _Descriptor:
        descriptor = self._open[number] = _Descriptor(path)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return descriptor


def _listed(files: list[SourceFile]) -> str:
    names = [source.name for source in files[:3]]
    return ", ".join(names) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
