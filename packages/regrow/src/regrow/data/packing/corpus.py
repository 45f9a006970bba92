"""The folder of a corpus: its format, its manifest, and a check that it is complete."""

from pathlib import Path

import msgspec

from regrow.core.errors import DataError, UsageError

FORMAT = 1
MANIFEST = "corpus.json"
WORK = "packing"
"""Subfolder with the intermediate results of an unfinished packing."""


class Input(msgspec.Struct, frozen=True):
    """One input file, as it was at the start of packing; `version`: its modification time, or a store's tag."""

    name: str
    size: int
    version: str


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the bytes of a corpus.

    `tokenizer`: its name, for messages; `tokenizer_digest`: for comparison; `append_eos`: the token after each
    document; `dtype`: uint16 or uint32; `shard_bytes`: a shard ends with the document that reaches this size.
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


class Corpus(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest, `corpus.json`. `dtype` equals the recipe's."""

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
    """Bytes per token."""
    return {"uint16": 2, "uint32": 4}[dtype]


def read_corpus(folder: Path) -> Corpus:
    """Read the manifest of a folder. Raises `UsageError` if the folder is no corpus, or an unfinished one."""
    path = folder / MANIFEST
    if not path.exists():
        if (folder / WORK).exists():
            raise UsageError(f"the corpus {folder} is not finished", hint="run the same `regrow data pack` again")
        raise UsageError(f"{folder} is no corpus: it has no {MANIFEST}", hint="make one with `regrow data pack`")
    try:
        corpus = msgspec.json.decode(path.read_bytes(), type=Corpus)
    except msgspec.MsgspecError as error:
        raise DataError(
            f"{path} is damaged, or of another version of regrow: {error}", hint="make the corpus in another folder"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if corpus.format != FORMAT or corpus.dtype not in ("uint16", "uint32"):
        raise UsageError(
            f"{path} is of format {corpus.format} with {corpus.dtype} tokens; this regrow reads format {FORMAT}",
            hint="make it anew with this version",
        )
    return corpus


def damage(folder: Path, shard: Shard, dtype: str) -> str:
    """Describe a missing file of a shard, or a file of the wrong size; empty if there is none."""
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
