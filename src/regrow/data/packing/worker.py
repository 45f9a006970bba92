"""A process that makes shards, one after another, as it is told through a pipe."""

import errno
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

from regrow.core.errors import RegrowError
from regrow.core.ids import Seconds
from regrow.data.packing.corpus import Recipe, Shard
from regrow.data.packing.parts import Part
from regrow.data.packing.shard import make_shard
from regrow.data.packing.tokenizing import load_tokenizer

_EVERY: Seconds = 0.1


@dataclass(frozen=True)
class At:
    """How far the piece at work is: bytes, tokens, documents."""

    done: int
    tokens: int
    documents: int


@dataclass(frozen=True)
class Failed:
    """The piece could not be packed; `full`: for want of space."""

    cause: str
    hint: str
    full: bool = False


Answer = At | Shard | Failed


def serve(pipe: Connection, folder: Path, recipe: Recipe, tokenizer: str) -> None:
    """Pack each `Part` that comes through the pipe, until it ends: with the packer, whatever that one dies of."""
    # Ctrl-C reaches every process of a terminal; the packer decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        recv_handle(pipe)  # the lock of the folder, held until this process ends
        loaded = load_tokenizer(tokenizer)
        while True:
            part: Part = pipe.recv()
            pipe.send(_pack(part, folder, recipe, loaded, pipe))
    except RegrowError as error:
        pipe.send(Failed(error.cause, error.hint))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _pack(part: Part, folder: Path, recipe: Recipe, tokenizer: object, pipe: Connection) -> Shard | Failed:
    told = time.monotonic()

    def progress(done: int, tokens: int, documents: int) -> None:
        nonlocal told
        if (now := time.monotonic()) - told >= _EVERY:
            told = now
            pipe.send(At(done, tokens, documents))

    try:
        return make_shard(part, folder, recipe, tokenizer, progress)  # type: ignore[arg-type]
    except RegrowError as error:
        return Failed(error.cause, error.hint)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except OSError as error:
        place = error.filename or folder
        return Failed(
            f"{place}: {error.strerror or error}", "", full=error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        )
