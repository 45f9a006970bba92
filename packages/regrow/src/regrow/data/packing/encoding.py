"""Converts rows of a `datasets.Dataset` to tokens, with `map` in several processes that end with this one."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features, LargeList, Value, disable_progress_bars, enable_progress_bars

from regrow.core.errors import DataError
from regrow.data.packing.corpus import Recipe
from regrow.data.packing.tokenizing import Tokenizer, Tokens
from regrow.data.packing.writing import Documents
from regrow.data.sources.records import kind_of, malformed, parse_record

_AT_ONCE = 256
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5


def progress_bars(shown: bool) -> None:
    """Switch the progress bars of `datasets` on or off."""
    (enable_progress_bars if shown else disable_progress_bars)()


class Encoding:
    """Encodes rows into documents. `names`: names of the files to which the rows refer by number."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe, names: list[str]) -> None:
        self._tokenizer, self._recipe, self._names = tokenizer, recipe, names

    def of(self, rows: Any, workers: int, path: Path) -> Iterator[Documents]:
        """The documents in order, tokenized by `workers` processes; cached at `path` for the next run."""
        if not len(rows):
            return
        with _forks_end_with_us(), _interrupts_kept():
            encoded = rows.with_format("arrow").map(
                self,
                batched=True,
                batch_size=_AT_ONCE,
                num_proc=workers if workers > 1 else None,
                remove_columns=rows.column_names,
                features=Features(tokens=LargeList(Value(self._recipe.dtype))),
                cache_file_name=str(path),
                load_from_cache_file=True,
                new_fingerprint=path.parent.name + path.stem,
                desc="tokenizing",
            )
        for table in encoded.iter(_AT_ONCE):
            column = table.column("tokens").combine_chunks()
            yield column.flatten().to_numpy(), column.value_lengths().to_numpy()

    def __call__(self, table: pa.Table) -> pa.Table:
        """Encode a table for `map`. Raises `DataError` with file and line if a document is malformed."""
        tokens = [self._tokens(row) for row in table.to_pylist()]
        offsets = pa.array(np.cumsum([0, *map(len, tokens)]))
        return pa.table({"tokens": pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(tokens)))})

    def _tokens(self, row: dict[str, Any]) -> Tokens:
        name, at, line = self._names[row["file"]], row["at"], row.get("line")
        place = f"{name}, {'row' if line is None else 'line'} {at}"
        try:
            text = _text_in(row, self._recipe.column)
        except ValueError as error:
            raise (DataError(f"{place}: {error}") if line is None else malformed(name, at, line, str(error))) from None
        try:
            tokens = self._tokenizer.encode(text)
        except Exception as error:  # a tokenizer may raise any error; the user needs the location of its text
            raise DataError(f"{place}: the tokenizer failed: {error!r}") from error
        for extreme in (tokens.min(), tokens.max()) if tokens.size else ():
            if not 0 <= extreme <= np.iinfo(self._recipe.dtype).max:
                raise DataError(
                    f"{place}: token {extreme} does not fit into {self._recipe.dtype}",
                    hint="the tokenizer's vocabulary is larger than it reports",
                )
        end = [] if self._recipe.append_eos is None else [self._recipe.append_eos]
        return np.concatenate([tokens, end]).astype(self._recipe.dtype)


def _text_in(row: dict[str, Any], column: str) -> str:
    """The document in a row. Raises `ValueError` with a description of the mistake."""
    if "line" not in row:
        text = row["value"]
    else:
        record = parse_record(row["line"])
        if column not in record:
            raise ValueError(f"it has no {column!r}, but {', '.join(map(repr, record)) or 'nothing'}; see --column")
        text = record[column]
    if not isinstance(text, str):
        raise ValueError(f"its {column!r} is {kind_of(text)}, not a string")
    return text


@contextmanager
def _forks_end_with_us() -> Iterator[None]:
    """Forks made in this block are killed when this process ends; otherwise those of `datasets` would wait forever."""
    if not _packer:
        os.register_at_fork(before=_note_thread, after_in_child=_end_with_packer)
    _packer[:] = [os.getpid()]
    try:
        yield
    finally:
        _packer[:] = [0]


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Raise `KeyboardInterrupt` after an interruption, which `datasets` reports as workers that do not answer."""
    try:
        yield
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


_packer: list[int] = []
_by_main_thread: list[bool] = [True]


def _note_thread() -> None:
    _by_main_thread[:] = [threading.current_thread() is threading.main_thread()]


def _end_with_packer() -> None:
    if not _packer[0] or sys.platform != "linux":
        return
    if _by_main_thread[0]:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != _packer[0]:
            os._exit(1)
    else:
        # The pool's thread forks the replacements of dead workers. A death signal is sent when this thread ends, which
        # is before the process does: it could kill a fork that holds the lock of the work queue, for good.
        threading.Thread(target=_watch_packer, args=(_packer[0],), daemon=True).start()


def _watch_packer(packer: int) -> None:
    while os.getppid() == packer:
        time.sleep(_LOOK_S)
    os._exit(1)
