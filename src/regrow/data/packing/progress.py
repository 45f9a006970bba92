"""How far a packing is: a bar on a terminal, lines elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column

from regrow.core.ids import Instant, Seconds


class PackingView(Protocol):
    """What shows a packing. Entered before it, left after it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def at(self, done: int, tokens: int, shards: int) -> None:
        """So many bytes of input, tokens and shards are done, those of earlier runs included. Called often."""
        ...


def open_view(console: Console, *, total: int, before: int, shards: int) -> PackingView:
    """The bar on a terminal, lines elsewhere.

    Args:
        console: where to show it.
        total: bytes of all inputs.
        before: bytes that earlier runs have packed.
        shards: how many there will be.
    """
    if console.is_terminal:
        return BarView(console, total=total, before=before, shards=shards)
    return LineView(console, total=total, before=before, shards=shards)


class BarView:
    """A bar with bytes a second and the time that is left. Arguments as of `open_view`."""

    def __init__(self, console: Console, *, total: int, before: int, shards: int) -> None:
        self._shards = shards
        whole = Column(no_wrap=True)
        self._progress = Progress(
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # what the others leave
            DownloadColumn(table_column=whole),
            TransferSpeedColumn(table_column=whole),
            TextColumn("{task.fields[what]}", table_column=whole),
            TimeRemainingColumn(compact=True, table_column=whole),
            console=console,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("packing", total=total, completed=before, what="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def at(self, done: int, tokens: int, shards: int) -> None:
        """Move the bar."""
        what = f"{rounded(tokens)} tokens, {shards}/{self._shards} shards"
        self._progress.update(self._task, completed=done, what=what)


class LineView:
    """A line every few seconds. Arguments as of `open_view`; `every`: seconds; `clock`: monotonic."""

    def __init__(
        self,
        console: Console,
        *,
        total: int,
        before: int,
        shards: int,
        every: Seconds = 5.0,
        clock: Callable[[], Instant] = time.monotonic,
    ) -> None:
        self._console, self._total, self._before, self._shards = console, total, before, shards
        self._every, self._clock = every, clock
        self._began = self._told = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left to show."""

    def at(self, done: int, tokens: int, shards: int) -> None:
        """A line, if the last one is some time ago."""
        now = self._clock()
        if now - self._told < self._every:
            return
        self._told = now
        rate = (done - self._before) / (now - self._began)
        left = f", {(self._total - done) / rate:.0f} s left" if rate > 0 else ""
        text = (
            f"packing: {sized(done)} of {sized(self._total)}, {sized(rate)}/s, {counted(tokens, 'token')}, "
            f"{shards}/{self._shards} shards{left}"
        )
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def sized(count: float) -> str:
    """Bytes for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def rounded(count: int) -> str:
    """A number in few letters."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def counted(count: int, what: str) -> str:
    """A number of things, in words."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
