"""Reads records from Parquet, Arrow, CSV and JSON Lines files, gzipped or not, folders of these, and data sets.

Each place is read in the same order each time. Parquet and Arrow need pyarrow, data sets of the Hugging Face hub need
`datasets`; both are read in batches, never as a whole.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader, RawIOBase, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, cast

from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line
from regrow_batch.places import local_path, open_to_read, reached
from regrow_batch.tables.making import Record

LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc")
SEPARATED = {".csv": ",", ".tsv": "\t"}
KNOWN = (*LINES, *PARQUET, *ARROW, *SEPARATED)
ROWS = 1024
"""Records of a batch."""
_HUB = "hf://"
_HUB_FILES = ("hf://datasets/", "hf://models/", "hf://spaces/", "hf://buckets/")
_LARGEST_FIELD = 1 << 30
_BLOCK = 1 << 18
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""First half of a surrogate pair in a JSON escape."""
_BEYOND = "\0beyond the header"


def suffix_of(place: str) -> str:
    """Suffix of a place's name, without that of a compression."""
    return Path(unpacked_name(place)).suffix.lower()


def unpacked_name(place: str) -> str:
    """The name without `.gz`."""
    return place[: -len(".gz")] if place.lower().endswith(".gz") else place


def open_unpacked(place: str) -> BinaryIO:
    """Open a file that may be gzipped. Raises `UsageError`, `BatchStopped`."""
    stream = open_to_read(place)
    if not place.lower().endswith(".gz"):
        return stream
    return cast(BinaryIO, BufferedReader(_Unpacked(place, gzip.GzipFile(fileobj=stream, mode="rb")), _BLOCK))


class _Unpacked(RawIOBase):
    """A gzipped file; damaged data raises an error for the user."""

    def __init__(self, place: str, stream: gzip.GzipFile) -> None:
        self._place, self._stream = place, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read1(len(buffer))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UsageError(f"{self._place} cannot be unpacked: {error}") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def is_table(place: str) -> bool:
    """True if a place contains records, and not lines of OpenAI's batch format."""
    path = local_path(place)
    if path is not None and path.is_dir():
        return True
    if is_data_set(place):
        return True
    return suffix_of(place) in (*PARQUET, *ARROW, *SEPARATED)


def is_data_set(place: str) -> bool:
    """True if a place is a data set of the hub, and not a single file in one."""
    return place.startswith(_HUB) and not place.startswith(_HUB_FILES)


@dataclass(frozen=True)
class Table:
    """A place that contains records.

    Attributes:
        place: its path or URL.
        split: of a data set.
    """

    place: str
    split: str = "train"

    def batches(self) -> Iterator[Sequence[Record]]:
        """The records in batches. Raises `UsageError`, `BatchStopped`."""
        path = local_path(self.place)
        if is_data_set(self.place):
            yield from _data_set(self.place, lambda: _from_hub(self.place, self.split))
        elif path is not None and path.is_dir():
            if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
                yield from _data_set(self.place, lambda: _from_disk(path, self.split))
                return
            for file in files_of(path):
                yield from _file(str(file))
        else:
            yield from _file(self.place)

    def schema(self) -> Any:
        """The columns as a pyarrow schema; None: this kind of place has none."""
        path = local_path(self.place)
        if is_data_set(self.place):
            return reached(self.place, "read", lambda: _from_hub(self.place, self.split)).features.arrow_schema
        if path is None or not path.is_dir():
            return _schema(self.place)
        if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
            return _from_disk(path, self.split).features.arrow_schema
        found = [_schema(str(file)) for file in files_of(path)]
        if None in found:
            return None
        arrow = _pyarrow(self.place)
        try:
            return arrow.unify_schemas(found, promote_options="permissive")
        except (arrow.ArrowInvalid, arrow.ArrowTypeError):
            return None  # the files differ: types are then inferred from the values

    def records(self) -> Iterator[Record]:
        """The records one by one."""
        for batch in self.batches():
            yield from batch


def files_of(folder: Path) -> list[Path]:
    """The files of a folder, and of folders in it, that contain records, in the order of their names."""
    found = sorted(each for each in folder.rglob("*") if suffix_of(str(each)) in KNOWN and each.is_file())
    if not found:
        raise UsageError(f"{folder} has no file of {', '.join(KNOWN)}, gzipped or not")
    return found


def hold_apart(place: str, written: Sequence[Path]) -> None:
    """Raise `UsageError` if a batch would write over its input, or into it, or one of its files over another.

    Args:
        place: the input.
        written: all files that the batch writes.
    """
    source = local_path(place)
    folder = source.resolve() if source is not None and source.is_dir() else None
    known = set() if source is None or folder is not None else {source.resolve()}
    for path in written:
        found = path.resolve()
        if folder is not None and found.is_relative_to(folder):
            raise UsageError(
                f"{path} is inside the input {place}, of which all files are read", hint="choose another place with -o"
            )
        if found in known:
            raise UsageError(
                f"{path} is needed twice: as input, output, journal, or what the batch writes beside these",
                hint="choose another name with -o or --journal",
            )
        known.add(found)


def _file(place: str) -> Iterator[Sequence[Record]]:
    suffix = suffix_of(place)
    try:
        if suffix in PARQUET:
            yield from _parquet(place)
        elif suffix in ARROW:
            yield from _arrow(place)
        elif suffix in SEPARATED:
            yield from _separated(place, SEPARATED[suffix])
        else:
            yield from _lines(place)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{place} cannot be read: {error}") from error


def _lines(place: str) -> Iterator[Sequence[Record]]:
    batch: list[Record] = []
    with open_unpacked(place) as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if _HALF.search(line):
                    json.dumps(record, ensure_ascii=False).encode()  # half a surrogate pair cannot be sent or written
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{place}, line {number}: is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise UsageError(f"{place}, line {number}: is no JSON object, whose fields would be columns")
            batch.append(record)
            if len(batch) == ROWS:
                yield batch
                batch = []
    if batch:
        yield batch


def _separated(place: str, delimiter: str) -> Iterator[Sequence[Record]]:
    csv.field_size_limit(_LARGEST_FIELD)
    batch: list[Record] = []
    with open_unpacked(place) as stream, TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        table = csv.DictReader(text, delimiter=delimiter, strict=True, restkey=_BEYOND)
        names = table.fieldnames or ()
        if twice := sorted({name for name in names if name and names.count(name) > 1}):  # from trailing commas
            raise UsageError(f"{place} has two columns {twice[0]!r}", hint="give each a name of its own")
        for record in table:
            if _BEYOND in record:
                raise UsageError(
                    f"{place} has more fields in line {table.line_num} than its header has names ({len(names)})",
                    hint="quote fields that contain the separator",
                )
            batch.append(dict(record))
            if len(batch) == ROWS:
                yield batch
                batch = []
    if batch:
        yield batch


def _parquet(place: str) -> Iterator[Sequence[Record]]:
    arrow = _pyarrow(place)
    from pyarrow import parquet

    with open_to_read(place) as stream:
        try:
            for batch in parquet.ParquetFile(stream).iter_batches(ROWS):
                yield batch.to_pylist()
        except arrow.ArrowInvalid as error:
            raise UsageError(f"{place} cannot be read as Parquet: {error}") from error


def _schema(place: str) -> Any:
    """The columns of one file as a pyarrow schema; None: it has none."""
    if suffix_of(place) not in (*PARQUET, *ARROW):
        return None
    arrow = _pyarrow(place)
    with open_to_read(place) as stream:
        try:
            return arrow.parquet.read_schema(stream) if suffix_of(place) in PARQUET else _opened(arrow, stream).schema
        except arrow.ArrowInvalid as error:
            raise UsageError(f"{place} cannot be read: {error}") from error


def _arrow(place: str) -> Iterator[Sequence[Record]]:
    arrow = _pyarrow(place)
    with open_to_read(place) as stream:
        try:
            yield from (batch.to_pylist() for batch in _arrow_batches(arrow, stream))
        except arrow.ArrowInvalid as error:
            raise UsageError(f"{place} cannot be read as Arrow: {error}") from error


def _opened(arrow: Any, stream: BinaryIO) -> Any:
    """A reader of an Arrow file, or of an Arrow stream, the format of `datasets`."""
    try:
        return arrow.ipc.open_file(stream)
    except arrow.ArrowInvalid:
        stream.seek(0)
        return arrow.ipc.open_stream(stream)


def _arrow_batches(arrow: Any, stream: BinaryIO) -> Iterator[Any]:
    """A file has its batches by index, a stream one after the other."""
    found = _opened(arrow, stream)
    if not hasattr(found, "num_record_batches"):
        yield from found
        return
    for number in range(found.num_record_batches):
        yield found.get_batch(number)


def _data_set(place: str, load: Callable[[], Any]) -> Iterator[Sequence[Record]]:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{place} needs datasets, which is not installed", hint=install_line("tables", package="regrow-batch")
        ) from error
    del datasets
    found = reached(place, "read", load)
    for start in range(0, len(found), ROWS):
        columns = found[start : start + ROWS]
        names = list(columns)
        yield [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _from_hub(place: str, split: str) -> Any:
    import datasets

    name, _, revision = place.removeprefix(_HUB).partition("@")
    parts = name.split("/")
    more = {"revision": revision} if revision else {}
    return datasets.load_dataset("/".join(parts[:2]), *parts[2:3], split=split, **more)


def _from_disk(path: Path, split: str) -> Any:
    import datasets

    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise UsageError(f"{path} has no split {split!r}", hint=f"give --split: {', '.join(found)}")
        return found[split]
    return found


def _pyarrow(place: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"{place} needs pyarrow, which is not installed", hint=install_line("tables", package="regrow-batch")
        ) from error
    return pyarrow
