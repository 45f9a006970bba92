"""`regrow data pack`: from input files to a corpus, by several processes; run again, it goes on from where it was."""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from regrow.core.errors import RegrowError, UsageError
from regrow.core.ids import Seconds
from regrow.data.packing.corpus import (
    DONE,
    MANIFEST,
    RECIPE,
    TEMPORARY,
    Corpus,
    Input,
    Recipe,
    Shard,
    damage,
    item_size,
    read_corpus,
    read_done,
    read_recipe,
    shard_name,
    write_whole,
)
from regrow.data.packing.parts import Part, split
from regrow.data.packing.pool import ShardPool
from regrow.data.packing.progress import counted, open_view, sized
from regrow.data.packing.tokenizing import Tokenizer, load_tokenizer
from regrow.data.sources.files import SourceFile, find_files

_PATIENCE: Seconds = 5.0


@dataclass(frozen=True)
class PackWords:
    """What the user asks for. `tokenizer`: `bytes`, a path, or `module:function`; `append_eos`: a number or a token."""

    inputs: Sequence[str]
    out: Path
    tokenizer: str
    column: str = "text"
    workers: int = 0
    append_eos: str | None = None
    dtype: str | None = None
    shard_bytes: int = 1 << 26


def pack(words: PackWords, console: Console) -> Corpus:
    """Make the corpus, or finish it, or find that it is whole; says so on `console`.

    The bytes of the corpus depend on the inputs and the words alone, not on the number of workers and not on how often
    it was interrupted. Raises `UsageError` where the folder holds anything else, or a corpus of other inputs or another
    tokenizer; `DataError` for a malformed document; `RegrowError` where it cannot be written. Whatever is raised,
    finished shards stay.
    """
    tokenizer = load_tokenizer(words.tokenizer)
    inputs = find_files(list(words.inputs))
    recipe = _recipe(words, tokenizer, [Input(each.name, each.size, each.version) for each in inputs])
    with _alone_in(words.out) as lock:
        try:
            return _pack_alone(words, recipe, inputs, lock, console)
        except OSError as error:
            raise RegrowError(
                f"{error.filename or words.out} cannot be written: {error.strerror or error}",
                hint="what is done stays; run it again when it can",
            ) from error


def _pack_alone(words: PackWords, recipe: Recipe, inputs: list[SourceFile], lock: int, console: Console) -> Corpus:
    changed = _refuse_another(words.out, recipe)
    for name in changed:
        console.print(f"input {name} was changed: its shards are made anew", soft_wrap=True, highlight=False)
    parts = split(inputs, recipe.column, recipe.shard_bytes)
    if not parts:
        raise UsageError(f"{', '.join(each.name for each in inputs[:3])}: nothing in it", hint="check the inputs")
    done = _shards_done(words.out, recipe, parts)
    corpus = read_corpus(words.out) if (words.out / MANIFEST).exists() else None
    if corpus is not None and len(done) == len(corpus.shards):
        _sweep(words.out)
    else:
        if corpus is not None:
            _reopen(words.out, recipe, parts, done)
        else:
            write_whole(words.out / RECIPE, msgspec.json.encode(recipe))
        corpus = _finish(words.out, recipe, _make(words, recipe, parts, done, lock, console))
    console.print(f"{words.out} is complete: {_described(corpus)}", soft_wrap=True, highlight=False)
    return corpus


def _recipe(words: PackWords, tokenizer: Tokenizer, inputs: list[Input]) -> Recipe:
    eos = _eos(words.append_eos, tokenizer)
    above = None if tokenizer.vocabulary is None else max(tokenizer.vocabulary, -1 if eos is None else eos + 1)
    dtype = words.dtype or ("uint16" if above is not None and above <= 1 << 16 else "uint32")
    if eos is not None and eos >= 1 << {"uint16": 16, "uint32": 32}[dtype]:
        raise UsageError(f"--append-eos {eos} does not fit into {dtype}")
    return Recipe(
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        column=words.column,
        append_eos=eos,
        dtype=dtype,
        shard_bytes=words.shard_bytes,
        inputs=inputs,
    )


def _eos(given: str | None, tokenizer: Tokenizer) -> int | None:
    if given is None or given.isdecimal():
        return None if given is None else int(given)
    number = tokenizer.id_of(given)
    if number is None:
        raise UsageError(
            f"--append-eos {given}: {tokenizer.name} has no such token", hint="give the number of the token"
        )
    return number


@contextmanager
def _alone_in(folder: Path) -> Iterator[int]:
    """Makes the folder, and lets no second packer into it; gives the descriptor that holds the lock.

    Workers hold it too, so that those of a packer that was killed have ended before anybody else writes there. That
    takes them moments, which are waited for. The kernel takes the lock from processes that die.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be used: {error.strerror}") from error
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise UsageError(f"another process is packing into {folder}", hint="wait for it, or end it")
            time.sleep(0.05)
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refuse_another(folder: Path, recipe: Recipe) -> list[str]:
    """Raises `UsageError` where the folder holds anything but a part of this corpus.

    As long as it is not finished an input may be corrected (a malformed line); returns those that were.
    """
    before = read_recipe(folder)
    if before is None:
        names = [name for name in os.listdir(folder) if not name.endswith(TEMPORARY)]
        if names:
            raise UsageError(
                f"{folder} holds {names[0]} and is no corpus", hint="give --out a folder that is empty or not there"
            )
        return []
    finished = (folder / MANIFEST).exists()
    if not finished and not any(folder.glob(f"*{DONE}")):
        return []  # nothing would be lost
    differences, changed = list(_differences(before, recipe)), _changed_inputs(before.inputs, recipe.inputs)
    if finished:
        differences += changed.values()
    if differences:
        raise UsageError(
            f"{folder} is a corpus of something else: {'; '.join(differences)}",
            hint="give --out another folder, or remove this one",
        )
    return [] if finished else list(changed)


def _differences(before: Recipe, now: Recipe) -> Iterator[str]:
    if before.format != now.format:
        yield f"its format is {before.format}, this regrow writes {now.format}"
    if (before.tokenizer, before.tokenizer_digest) != (now.tokenizer, now.tokenizer_digest):
        same = before.tokenizer == now.tokenizer
        yield f"tokenizer {before.tokenizer}{', changed since' if same else f', not {now.tokenizer}'}"
    for name in ("column", "append_eos", "dtype", "shard_bytes"):
        if (was := getattr(before, name)) != (wanted := getattr(now, name)):
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} {'not given' if was is None else was}, not {'left out' if wanted is None else wanted}"
    yield from _other_inputs(before.inputs, now.inputs)


def _other_inputs(before: list[Input], now: list[Input]) -> Iterator[str]:
    old, new = [each.name for each in before], [each.name for each in now]
    yield from (f"input {name} is not given" for name in old if name not in new)
    yield from (f"input {name} is new" for name in new if name not in old)
    if sorted(old) == sorted(new) and old != new:
        yield "the inputs come in another order"


def _changed_inputs(before: list[Input], now: list[Input]) -> dict[str, str]:
    """The inputs that are not what they were, and in words what they are."""
    old = {each.name: each for each in before}
    changed = {}
    for each in now:
        was = old.get(each.name, each)
        if was.size != each.size:
            changed[each.name] = f"input {each.name} has {each.size} bytes now, had {was.size}"
        elif was != each:
            changed[each.name] = f"input {each.name} was changed since"
    return changed


def _shards_done(folder: Path, recipe: Recipe, parts: list[Part]) -> dict[int, Shard]:
    """The shards that are there in full, by number."""
    if (folder / MANIFEST).exists():
        known = dict(enumerate(read_corpus(folder).shards))
    else:
        notes = {part.number: read_done(folder, part.number) for part in parts}
        known = {
            part.number: note.shard for part in parts if (note := notes[part.number]) and note == part.done(note.shard)
        }
    return {number: shard for number, shard in known.items() if not damage(folder, shard, recipe.dtype)}


def _reopen(folder: Path, recipe: Recipe, parts: list[Part], done: dict[int, Shard]) -> None:
    """A finished corpus that has lost files: back to where only they are missing."""
    for number, shard in done.items():
        write_whole(folder / f"{shard_name(number)}{DONE}", msgspec.json.encode(parts[number].done(shard)))
    write_whole(folder / RECIPE, msgspec.json.encode(recipe))
    (folder / MANIFEST).unlink()


def _make(
    words: PackWords, recipe: Recipe, parts: list[Part], done: dict[int, Shard], lock: int, console: Console
) -> dict[int, Shard]:
    """Make the shards that are missing; all of them by number."""
    _sweep_temporary(words.out)
    _sweep_others(words.out, parts)
    missing = [part for part in parts if part.number not in done]
    total = sum(part.weight for part in parts)
    before = total - sum(part.weight for part in missing)
    workers = max(1, min(words.workers or len(os.sched_getaffinity(0)), len(missing)))
    if done:
        console.print(f"going on: {len(done)} of {len(parts)} shards are done", highlight=False)
    shards = dict(done)
    if not missing:
        return shards
    view = open_view(console, total=total, before=before, shards=len(parts))
    tokens = sum(shard.tokens for shard in done.values())
    try:
        with ShardPool(workers, words.out, recipe, words.tokenizer, lock=lock) as pool, view:
            for state in pool.work(missing):
                shards.update(state.finished)
                view.at(before + state.bytes, tokens + state.tokens, len(shards))
    except (RegrowError, KeyboardInterrupt) as error:
        _sweep_temporary(words.out)
        if isinstance(error, KeyboardInterrupt) or shards:
            console.print(
                f"{len(shards)} of {len(parts)} shards are done and stay; the same command goes on from there",
                soft_wrap=True,
                highlight=False,
            )
        raise
    return shards


def _finish(folder: Path, recipe: Recipe, shards: dict[int, Shard]) -> Corpus:
    """Write the manifest, which makes it a corpus; then the notes are not needed any more."""
    listed = [shards[number] for number in sorted(shards)]
    corpus = Corpus(
        dtype=recipe.dtype,
        tokens=sum(shard.tokens for shard in listed),
        documents=sum(shard.documents for shard in listed),
        recipe=recipe,
        shards=listed,
    )
    if not corpus.tokens:
        raise UsageError("the inputs have no tokens", hint="look where they come from, and at --column")
    write_whole(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(corpus), indent=1) + b"\n")
    _sweep(folder)
    return corpus


def _sweep(folder: Path) -> None:
    """Remove what a finished corpus does not need."""
    _sweep_temporary(folder)
    for path in folder.glob(f"*{DONE}"):
        path.unlink()
    (folder / RECIPE).unlink(missing_ok=True)


def _sweep_others(folder: Path, parts: list[Part]) -> None:
    """Remove shards that were made of an input as it was before it was corrected, beyond those that it has now."""
    names = {shard_name(part.number) for part in parts}
    for path in folder.glob("tokens-*.*"):
        if path.name.partition(".")[0] not in names:
            path.unlink()


def _sweep_temporary(folder: Path) -> None:
    for path in folder.glob(f"*{TEMPORARY}"):
        path.unlink(missing_ok=True)


def _described(corpus: Corpus) -> str:
    size = sized(corpus.tokens * item_size(corpus.dtype))
    return (
        f"{counted(corpus.tokens, 'token')} ({corpus.dtype}, {size}) of {counted(corpus.documents, 'document')} "
        f"in {counted(len(corpus.shards), 'shard')}"
    )
