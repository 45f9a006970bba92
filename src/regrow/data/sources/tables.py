"""What Parquet and Arrow files have in common as map-style data sets."""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from regrow.core.errors import UsageError
from regrow.data.sources.blocks import Blocks, TableFile
from regrow.data.sources.files import Paths, digest_of_files, find_files


class Tables(Dataset[Any]):
    """The rows of table files, each a dict of Python values by column name.

    Args:
        paths: a path, a glob, a URL that fsspec knows, or a list of them.
        transform: what a sample is passed through.
        suffixes: the ends that the files' names may have.
        columns: which to read; None: all.
        cache_dir: where remote files are copied to, if they have to be.
        storage_options: what fsspec needs to open URLs.
        keep: decoded blocks that each process keeps.
    """

    def __init__(
        self,
        paths: Paths,
        transform: Callable[[dict[str, Any]], Any] | None,
        *,
        suffixes: tuple[str, ...],
        columns: Sequence[str] | None,
        cache_dir: str | os.PathLike[str] | None,
        storage_options: Mapping[str, Any] | None,
        keep: int,
    ) -> None:
        if keep < 1:
            raise UsageError(f"{keep} blocks cannot be kept", hint="keep at least 1")
        self.transform = transform
        self._keep = keep
        wanted = None if columns is None else tuple(columns)
        local = None if cache_dir is None else os.fspath(cache_dir)
        self._files = [TableFile(source, wanted, local) for source in find_files(paths, storage_options)]
        for file in self._files:
            if file.source.suffix not in suffixes:
                raise UsageError(f"{file.source.name} is none of {', '.join(suffixes)}", hint="check the path")
        self._blocks: list[tuple[int, int]] = []
        rows: list[int] = []
        for number, file in enumerate(self._files):
            counts = file.open().rows
            self._blocks += [(number, block) for block in range(len(counts))]
            rows += counts
        self._ends = list(accumulate(rows))
        if not self._ends or self._ends[-1] == 0:
            names = ", ".join(file.source.name for file in self._files[:3])
            raise UsageError(f"no rows in {names}", hint="look where they come from")
        self._own = _Opened()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        place, row = self._place(index)
        (record,) = self._table(place).slice(row, 1).to_pylist()
        return record if self.transform is None else self.transform(record)

    # A property, so that it is not there where there is a transform: the random numbers of a batch that is read at
    # once depend on the whole batch, those of a sample on the sample alone.
    @property
    def __getitems__(self) -> Callable[[list[int]], list[Any]]:
        """Reads a whole batch, each block of it once. Not there where there is a transform."""
        if self.transform is not None:
            raise AttributeError("__getitems__")
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_own"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own = _Opened()

    def fingerprint(self) -> str:
        """Changes with the files' names, sizes and times of change, and the columns; not with the transform."""
        sources = [file.source for file in self._files]
        return digest_of_files(type(self).__name__, sources, self._files[0].columns)

    def _rows(self, indices: list[int]) -> list[Any]:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for position, index in enumerate(indices):
            place, row = self._place(index)
            wanted.setdefault(place, []).append((position, row))
        records: list[Any] = [None] * len(indices)
        for place, rows in wanted.items():
            table = self._table(place)
            for position, row in rows:  # slices: `take` of few rows costs more
                (records[position],) = table.slice(row, 1).to_pylist()
        return records

    def _place(self, index: int) -> tuple[int, int]:
        """The block and the row in it."""
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        place = bisect_right(self._ends, at)
        return place, at - (self._ends[place - 1] if place else 0)

    def _table(self, place: int) -> Any:
        own = self._own.here()
        table = own.tables.get(place)
        if table is not None:
            own.tables.move_to_end(place)
            return table
        number, block = self._blocks[place]
        blocks = own.files.get(number)
        if blocks is None:
            blocks = own.files[number] = self._files[number].open()
            while len(own.files) > _MOST_OPEN:
                own.files.popitem(last=False)
        table = own.tables[place] = blocks.read(block)
        while len(own.tables) > self._keep:
            own.tables.popitem(last=False)
        return table


_MOST_OPEN = 64


class _Opened(threading.local):
    """What a thread of a process has opened: pyarrow's readers are not to be used across a fork."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.files: OrderedDict[int, Blocks] = OrderedDict()
        self.tables: OrderedDict[int, Any] = OrderedDict()

    def here(self) -> "_Opened":
        """This, emptied after a fork."""
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc]
        return self
