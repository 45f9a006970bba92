"""`regrow data pack`: makes a corpus from input files, with Hugging Face `datasets` and several processes."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from rich.console import Console

from regrow.core.errors import RegrowError, UsageError
from regrow.data.packing.corpus import MANIFEST, WORK, Corpus, Input, Recipe, damage, item_size, read_corpus
from regrow.data.packing.tokenizing import Tokenizer, load_tokenizer
from regrow.data.packing.writing import Documents, write_corpus
from regrow.data.sources.files import SourceFile, find_files

_TRIES, _PAUSE_S = 100, 0.05


@dataclass(frozen=True)
class PackOptions:
    """The user's arguments. `tokenizer`: `bytes`, a path, or `module:function`; `append_eos`: a number or a token."""

    inputs: Sequence[str]
    out: Path
    tokenizer: str
    column: str = "text"
    workers: int = 0
    append_eos: str | None = None
    dtype: str | None = None
    shard_bytes: int = 1 << 26


def pack(options: PackOptions, console: Console) -> Corpus:
    """Make the corpus, or find that it is complete; prints the result on `console`.

    Its bytes depend only on the inputs and the options. It is complete once its manifest exists, which is written last;
    results of reading and tokenizing from before an interruption are reused. Raises `UsageError` if the folder holds
    anything else, `DataError` for a malformed document, `RegrowError` if the corpus cannot be written.
    """
    tokenizer, inputs = load_tokenizer(options.tokenizer), find_files(list(options.inputs))
    recipe = _recipe(options, tokenizer, [Input(each.name, each.size, each.version) for each in inputs])
    with _alone_in(options.out):
        corpus = _found(options.out, recipe)
        try:
            corpus = corpus or write_corpus(
                options.out, recipe, _documents(options, recipe, tokenizer, inputs, console)
            )
        except OSError as error:
            raise RegrowError(
                f"{options.out} cannot be written: {error}", hint="make room, then run it again"
            ) from error
        except RuntimeError as error:  # raised by `datasets`
            raise RegrowError(
                f"a worker died while it packed: {error}", hint="out of memory? try --workers 1"
            ) from error
        shutil.rmtree(options.out / WORK, ignore_errors=True)
    size = f"{corpus.dtype}, {corpus.tokens * item_size(corpus.dtype) / 1e6:,.1f} MB"
    what = f"{corpus.tokens:,} tokens ({size}) of {corpus.documents:,} documents in {len(corpus.shards)} shards"
    console.print(f"{options.out} is complete: {what}", soft_wrap=True, highlight=False)
    return corpus


def _recipe(options: PackOptions, tokenizer: Tokenizer, inputs: list[Input]) -> Recipe:
    eos, given = None, options.append_eos
    if given is not None:
        eos = int(given) if given.isdecimal() else tokenizer.id_of(given)
        if eos is None:
            raise UsageError(f"--append-eos {given}: {tokenizer.name} has no such token", hint="give its number")
    above = None if tokenizer.vocabulary is None else max(tokenizer.vocabulary, 0 if eos is None else eos + 1)
    dtype = options.dtype or ("uint16" if above is not None and above <= 1 << 16 else "uint32")
    if eos is not None and eos > np.iinfo(dtype).max:
        raise UsageError(f"--append-eos {eos} does not fit into {dtype}")
    return Recipe(
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        column=options.column,
        append_eos=eos,
        dtype=dtype,
        shard_bytes=options.shard_bytes,
        inputs=inputs,
    )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Make the folder, and lock it against a second packer.

    Workers hold the lock too: workers of a killed packer end within moments, so locking is retried for a while.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be used: {error.strerror}") from error
    try:
        for _ in range(_TRIES):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_PAUSE_S)
        else:
            raise UsageError(f"another process is packing into {folder}", hint="wait for it, or end it")
        yield
    finally:
        os.close(lock)


def _found(folder: Path, recipe: Recipe) -> Corpus | None:
    """The corpus, if it is complete; else None. Raises `UsageError` if the folder holds something else."""
    for name in sorted(os.listdir(folder)):
        if name != WORK and not name.startswith((MANIFEST, "tokens-")):
            hint = "give --out a folder that is empty or not there"
            raise UsageError(f"{folder} holds {name} and is no corpus", hint=hint)
    if not (folder / MANIFEST).exists():
        return None
    corpus = read_corpus(folder)
    was, now = msgspec.to_builtins(corpus.recipe), msgspec.to_builtins(recipe)
    differs = [f"{name} was {was[name]}, not {now[name]}" for name in now if was[name] != now[name]]
    if differs:
        hint = "give --out another folder, or remove this one"
        raise UsageError(f"{folder} is a corpus of something else: {'; '.join(differs)}", hint=hint)
    if not any(damage(folder, shard, corpus.dtype) for shard in corpus.shards):
        return corpus
    (folder / MANIFEST).unlink()
    return None


def _documents(
    options: PackOptions, recipe: Recipe, tokenizer: Tokenizer, inputs: list[SourceFile], console: Console
) -> Iterator[Documents]:
    """The tokenized documents of all inputs in order. Intermediate results stay in a folder named after the recipe."""
    from regrow.data.packing.encoding import Encoding, progress_bars
    from regrow.data.sources.rows import column_of, lines_of

    progress_bars(console.is_terminal)
    work = options.out / WORK / xxhash.xxh3_128_hexdigest(msgspec.json.encode(recipe))
    for other in options.out.glob(f"{WORK}/*"):
        if other != work:
            shutil.rmtree(other)  # results of another recipe, for example from before an input was corrected
    for number, (is_table, group) in enumerate(groupby(inputs, lambda file: file.is_table)):
        files = list(group)
        rows = column_of(files, options.column, work) if is_table else lines_of(files, work)
        encoding = Encoding(tokenizer, recipe, [file.name for file in files])
        yield from encoding.of(rows, options.workers or len(os.sched_getaffinity(0)), work / f"{number}.arrow")
