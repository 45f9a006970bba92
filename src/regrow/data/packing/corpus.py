"""The folder of a corpus: what is in it, and whether it is whole."""

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from regrow.core.errors import DataError, UsageError

FORMAT = 1
MANIFEST = "corpus.json"
RECIPE = "packing.json"
"""There until the corpus is whole: what it is being made of."""
DONE = ".done"
TEMPORARY = ".tmp"


class Input(msgspec.Struct, frozen=True):
    """One input file as it was when the packing began; `version`: the time of its last change, or a store's tag."""

    name: str
    size: int
    version: str


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """All that the bytes of a corpus depend on.

    `tokenizer` for people, `tokenizer_digest` for comparison; `append_eos`: the token after each document; `dtype`:
    uint16 or uint32; `shard_bytes`: about how much input goes into a shard.
    """

    format: int = FORMAT
    tokenizer: str
    tokenizer_digest: str
    column: str
    append_eos: int | None
    dtype: str
    shard_bytes: int
    inputs: list[Input]


class Shard(msgspec.Struct, frozen=True):
    """One shard: `name` without `.bin` and `.idx`, and the xxh3 of these two files."""

    name: str
    tokens: int
    documents: int
    digest: str
    index_digest: str


class Done(msgspec.Struct, frozen=True):
    """The note that a shard is there in full: of which piece of which input it was made (`parts.Part`)."""

    shard: Shard
    source: Input
    begin: int
    end: int


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest, `corpus.json`. `dtype` and the recipe's are the same."""

    format: int = FORMAT
    dtype: str
    tokens: int
    documents: int
    recipe: Recipe
    shards: list[Shard]


def shard_name(number: int) -> str:
    """The name of a shard without its suffix."""
    return f"tokens-{number:06}"


def item_size(dtype: str) -> int:
    """Bytes a token."""
    return {"uint16": 2, "uint32": 4}[dtype]


def read_corpus(folder: Path) -> Corpus:
    """The manifest of a folder. Raises `UsageError` where it is no corpus, or is not finished."""
    path = folder / MANIFEST
    if not path.exists():
        if (folder / RECIPE).exists():
            raise UsageError(f"the corpus {folder} is not finished", hint="run the same `regrow data pack` again")
        raise UsageError(f"{folder} is no corpus: it has no {MANIFEST}", hint="make one with `regrow data pack`")
    corpus = _read(path, Corpus)
    if corpus.format != FORMAT or corpus.dtype not in ("uint16", "uint32"):
        raise UsageError(
            f"{path} is of format {corpus.format} with {corpus.dtype} tokens; this regrow reads format {FORMAT}",
            hint="make it anew with this version",
        )
    return corpus


def read_recipe(folder: Path) -> Recipe | None:
    """What the corpus in a folder is made of, be it finished or not; None where there is nothing of a corpus."""
    if (folder / MANIFEST).exists():
        return read_corpus(folder).recipe
    path = folder / RECIPE
    return _read(path, Recipe) if path.exists() else None


def read_done(folder: Path, number: int) -> Done | None:
    """The note that a shard is done; None where it is not, or not whole."""
    try:
        return msgspec.json.decode((folder / f"{shard_name(number)}{DONE}").read_bytes(), type=Done)
    except (OSError, msgspec.MsgspecError):
        return None  # it will be made; a torn note cannot come from a rename


Known = TypeVar("Known", Corpus, Recipe)


def _read(path: Path, kind: type[Known]) -> Known:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise DataError(
            f"{path} is damaged, or of another version of regrow: {error}", hint="make the corpus in another folder"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def damage(folder: Path, shard: Shard, dtype: str) -> str:
    """What is wrong with the sizes of a shard's files, in words; empty where nothing is."""
    expected = {".bin": shard.tokens * item_size(dtype), ".idx": shard.documents * 8}
    for suffix, size in expected.items():
        path = folder / f"{shard.name}{suffix}"
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            return f"{path} is missing"
        if found != size:
            return f"{path} has {found} bytes instead of {size}"
    return ""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there in full or not at all, also after a power failure."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
