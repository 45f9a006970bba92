"""Turns files into rows of tokens on disk: once for each node, in a separate process, before the workers start.

A folder of rows has `tokens.npy`, `labels.npy` (-100: not to be predicted), `positions.npy` (counted from 0 in each
document) and `used.npy` (length of a row without padding), of shape [rows, length]; pairs have [rows, 2, length].
"""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from regrow.core.config import cache_home
from regrow.core.errors import DataError, UsageError
from regrow_recipes.recipes.documents import ChatTokenizer, Document, Encoder
from regrow_recipes.recipes.packing import pack, split
from regrow_recipes.recipes.records import records
from regrow_recipes.recipes.schema import TrainingRecipe
from regrow_recipes.recipes.shapes import Record, detect, renamed

LEFT_OUT = -100
"""The label of a token that is not predicted."""
_DONE = "about.json"


class AboutRows(msgspec.Struct, frozen=True):
    """Description of a folder of rows."""

    format: str
    rows: int
    records: int
    documents: int
    """Documents and pieces of documents; attention does not cross them."""
    tokens: int
    counted: int
    cut: int
    """Documents that were longer than a row and were truncated."""
    turns_left_out: int
    first: str
    """The first record as the model sees it: the predicted part is in [[ ]]."""


class RowsOrder(msgspec.Struct, frozen=True):
    """Parameters of preparing rows."""

    files: list[str]
    format: str
    method: str
    length: int
    pack: bool
    tokenizer: str
    columns: dict[str, str] = {}
    """The records' names for keys of their format."""
    reading: int = 2
    """Version of reading records: rows of another version are made again."""


def data_files(patterns: Sequence[str], key: str = "data.train") -> list[str]:
    """The files that match the patterns. Raises `UsageError` for a pattern without a match."""
    found: list[str] = []
    for pattern in patterns:
        here = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        if not here:
            raise UsageError(f"{key}: no file matches {pattern}", hint=f"looked from {Path.cwd()}")
        found += [str(Path(path).absolute()) for path in here]
    return found


def prepared(recipe: TrainingRecipe, files: Sequence[str]) -> tuple[Path, AboutRows]:
    """The rows of these files, made if they do not exist. Raises `UsageError` that names the error in a file."""
    order = RowsOrder(
        files=list(files),
        format=recipe.data.format,
        method=recipe.method,
        length=recipe.data.length,
        pack=recipe.data.pack,
        tokenizer=str(Path(recipe.tokenizer).expanduser().absolute()),
        columns=recipe.data.columns,
    )
    folder = cache_home() / "recipes" / _identity(order)
    if not (folder / _DONE).exists():
        command = [sys.executable, "-m", "regrow_recipes.recipes.preparing", str(folder)]
        done = subprocess.run(command, input=msgspec.json.encode(order), capture_output=True, check=False)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {done.returncode}"]
            raise UsageError(f"the data could not be prepared: {said[-1]}")
    return folder, about(folder)


def about(folder: Path) -> AboutRows:
    """Read the description of a folder of rows."""
    return msgspec.json.decode((folder / _DONE).read_bytes(), type=AboutRows)


def _identity(order: RowsOrder) -> str:
    """Digest of the parameters, and of the size and modification time of each input file."""
    total = xxhash.xxh3_128(msgspec.json.encode(order))
    for path in [*map(Path, order.files), *sorted(Path(order.tokenizer).glob("*token*")), *_templates(order)]:
        status = path.stat()
        total.update(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode())
    return total.hexdigest()


def _templates(order: RowsOrder) -> list[Path]:
    return sorted(Path(order.tokenizer).glob("chat_template*"))


# --- in the preparing process --------------------------------------------------------------------------------------


def prepare(order: RowsOrder, tokenizer: ChatTokenizer, folder: Path) -> None:
    """Write the rows into a folder. Raises `DataError`."""
    gathered = _Gathered(order, tokenizer)
    for path in order.files:
        for place, record in records(path):
            try:
                gathered.add(record)
            except DataError as error:
                raise DataError(f"{place}: {error}") from error
    if not gathered.documents:
        raise DataError(f"no record in the data has anything to predict{gathered.nothing_counts()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix="making-"))
    try:
        gathered.write(making)
        if not folder.exists():
            making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


class _Gathered:
    """Documents that wait to be written."""

    def __init__(self, order: RowsOrder, tokenizer: ChatTokenizer) -> None:
        self._order, self._tokenizer = order, tokenizer
        self._encoder: Encoder | None = None
        self._format = order.format
        self.documents: list[Document] = []
        """For pairs: two adjacent documents each."""
        self._records = self._cut = 0

    def nothing_counts(self) -> str:
        """Reason why there is no token to predict, if it is known; else empty."""
        return self._encoder.nothing_counts() if self._encoder else ""

    def add(self, record: Record) -> None:
        """Encode a record."""
        order = self._order
        record = renamed(record, order.columns)
        if self._encoder is None:
            self._format = detect(record) if order.format == "auto" else order.format
            _check_format(self._format, order.method)
            self._encoder = Encoder(self._tokenizer, self._format)
        self._records += 1
        if self._format == "preference":
            pair = self._encoder.pair(record)
            self._cut += any(len(document.tokens) > order.length for document in pair)
            # A prompt that fills the row leaves no answer to compare.
            cut = [_without_first(document.cut(order.length)) for document in pair]
            if all(any(document.counted) for document in cut):
                self.documents += cut
            return
        document = self._encoder.document(record)
        if self._format == "text" or (self._format == "tokens" and order.method == "pretrain"):
            pieces = split(len(document.tokens), order.length)
            parts = [Document(document.tokens[a:b], document.counted[a:b]) for a, b in pieces]
        else:
            self._cut += len(document.tokens) > order.length
            parts = [document.cut(order.length)]
        parts = [_without_first(part) for part in parts]
        self.documents += [part for part in parts if any(part.counted)]

    def write(self, folder: Path) -> None:
        """Pack the documents into rows, and write them."""
        order, room = self._order, self._order.length
        lengths = [len(document.tokens) for document in self.documents]
        if self._format == "preference":
            places = [[at] for at in range(len(lengths))]
        else:
            places = pack(lengths, room) if order.pack else [[at] for at in range(len(lengths))]
        pad = self._tokenizer.pad_token_id
        filler = pad if pad is not None else (self._tokenizer.eos_token_id or 0)
        tokens = np.full((len(places), room), filler, dtype=np.int32)
        labels = np.full_like(tokens, LEFT_OUT)
        positions = np.zeros_like(tokens)
        used = np.zeros(len(places), dtype=np.int32)
        for row, inside in enumerate(places):
            at = 0
            for number in inside:
                document = self.documents[number]
                end = at + len(document.tokens)
                tokens[row, at:end] = document.tokens
                labels[row, at:end] = np.where(document.counted, document.tokens, LEFT_OUT)
                positions[row, at:end] = np.arange(end - at)
                at = end
            used[row] = at
            positions[row, at:] = np.arange(room - at)  # padding counts as a document without predicted tokens
        each = (-1, 2) if self._format == "preference" else (-1,)
        for name, array in (("tokens", tokens), ("labels", labels), ("positions", positions)):
            np.save(folder / f"{name}.npy", array.reshape(*each, room))
        np.save(folder / "used.npy", used.reshape(each))
        facts = AboutRows(
            format=self._format,
            rows=len(tokens) // (2 if self._format == "preference" else 1),
            records=self._records,
            documents=len(lengths),
            tokens=sum(lengths),
            counted=sum(sum(document.counted) for document in self.documents),
            cut=self._cut,
            turns_left_out=self._encoder.turns_left_out if self._encoder else 0,
            first=shown(self._tokenizer, self.documents[0]),
        )
        (folder / _DONE).write_bytes(msgspec.json.encode(facts))


def _check_format(format: str, method: str) -> None:
    if (format == "preference") != (method == "dpo"):
        raise DataError(
            f"the records are of the format {format}, which {method} does not train on",
            hint="dpo takes prompt, chosen and rejected; the others text, messages, or prompt and completion",
        )
    if method == "pretrain" and format not in ("text", "tokens"):
        raise DataError(
            f"the first record is of the format {format}",
            hint="pretrain takes text or input_ids; full and lora take conversations and answers",
        )


def _without_first(document: Document) -> Document:
    """Mark the first token of a document as not predicted, since no token precedes it."""
    return Document(document.tokens, [False, *document.counted[1:]])


def shown(tokenizer: ChatTokenizer, document: Document) -> str:
    """The text of a document, with the predicted part in [[ ]]."""
    text, start = "", 0
    for at in range(1, len(document.tokens) + 1):
        if at == len(document.tokens) or document.counted[at] != document.counted[start]:
            part = tokenizer.decode(document.tokens[start:at])
            text += f"[[{part}]]" if document.counted[start] else part
            start = at
    return text


def main(folder: str) -> int:
    """Prepare the rows of the order on standard input."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=RowsOrder)
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(order.tokenizer, local_files_only=True)
        prepare(order, tokenizer, Path(folder))
    except (DataError, OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
