"""Shows a running job: as a full-screen view on a terminal, as lines elsewhere."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from regrow.core.ids import Instant, Rank, Seconds
from regrow.core.records import GenerationFormed, IncidentClosed, IncidentOpened, Record, StepCommitted
from regrow.observe.curve import draw_curve
from regrow.observe.scene import Scene, WorkerSeen, WorkerState
from regrow.observe.story import describe, ranks, seconds
from regrow.observe.tail import RecordTail

_COLOURS = {
    WorkerState.STARTING: "blue",
    WorkerState.WARM: "cyan",
    WorkerState.TRAINING: "green",
    WorkerState.MENDING: "yellow",
    WorkerState.LOST: "bold red",
    WorkerState.DONE: "dim",
}
_RANKS_WIDTH = 49
_REST = 9.0
"""Pause after a look at the records, as a multiple of the CPU time of that look."""


class View(Protocol):
    """A display of a job, used as a context manager around all its records."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def feed(self, records: Sequence[Record]) -> None:
        """Show new records. Called often, also without records, to update the clock."""
        ...


def open_view(
    console: Console,
    *,
    plain: bool,
    title: str = "",
    until: int | None = None,
    unit: str = "samples",
    per_step: int = 0,
) -> "LiveView | PlainView":
    """A `LiveView` on a terminal; a `PlainView` elsewhere, or if `plain`. Other arguments as for `LiveView`."""
    if plain or not console.is_terminal:
        return PlainView(console, until=until, unit=unit, per_step=per_step)
    return LiveView(console, title=title, until=until, unit=unit, per_step=per_step)


def follow(job_dir: Path, view: View, *, running: Callable[[], bool], every: Seconds = 0.2) -> None:
    """Feed an entered view from a job's files until `running()` is false and everything is read.

    Args:
        job_dir: the job's folder, which may appear later.
        view: shows the records.
        running: returns True while records may still be written; the caller is responsible for a deadline.
        every: least seconds between two looks; long looks are spaced further apart, to use at most a tenth of a CPU.
    """
    tail = RecordTail(job_dir)
    while running():
        since = time.thread_time()
        view.feed(tail.poll())
        time.sleep(max(every, _REST * (time.thread_time() - since)))
    view.feed(tail.poll())


class PlainView:
    """Prints lines: each event as it happens, and the progress every few seconds.

    Args:
        console: console on which it prints.
        until: number of steps that the job will run, if known.
        unit, per_step: unit of the throughput, and units in a step of the whole world; 0: the ranks count them.
        every: seconds between two lines about progress.
        clock: the monotonic clock.
    """

    def __init__(
        self,
        console: Console,
        *,
        until: int | None = None,
        unit: str = "samples",
        per_step: int = 0,
        every: Seconds = 5.0,
        clock: Callable[[], Instant] = time.monotonic,
    ) -> None:
        self.scene = Scene()
        self._console = console
        self._until = until
        self._unit = unit
        self._per_step = per_step
        self._every = every
        self._clock = clock
        self._described = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def feed(self, records: Sequence[Record]) -> None:
        """Print a line for each record of interest, and periodically one about progress."""
        for record in records:
            self.scene.add(record)
            line = None if isinstance(record, GenerationFormed) else describe(record)
            if line is not None:
                self._print(line, record.at)
        now = self._clock()
        if now - self._described >= self._every and self.scene.ledger.commits and self.scene.ledger.ended is None:
            self._described = now
            self._print(self._progress(), now)

    def _print(self, line: str, at: Instant) -> None:
        self._console.print(f"[{self.scene.elapsed(at):6.1f} s] {line}", markup=False, highlight=False, soft_wrap=True)

    def _progress(self) -> str:
        scene = self.scene
        parts = [f"step {scene.step}" + (f" of {self._until}" if self._until else "")]
        if curve := scene.ledger.curve():
            parts.append(f"loss {curve[-1][1]:.4f}")
        parts += _speed(scene, self._unit, self._per_step)
        return ", ".join([*parts, f"goodput {scene.ledger.goodput:.1%}"])


class LiveView:
    """A full-screen view: the worker of each rank, the loss, and incidents with the duration of each recovery stage.

    Fits into 80 by 24 characters, and uses larger terminals fully.

    Args:
        console: a terminal.
        title: a short description of the training.
        until: number of steps that the job will run, if known.
        unit, per_step: unit of the throughput, and units in a step of the whole world; 0: the ranks count them.
        clock: the monotonic clock.
    """

    def __init__(
        self,
        console: Console,
        *,
        title: str = "",
        until: int | None = None,
        unit: str = "samples",
        per_step: int = 0,
        clock: Callable[[], Instant] = time.monotonic,
    ) -> None:
        self.scene = Scene()
        self._console = console
        self._title = title
        self._until = until
        self._unit = unit
        self._per_step = per_step
        self._clock = clock
        self._last_line = ""
        self._live = Live(console=console, screen=True, auto_refresh=False, get_renderable=self.draw)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def feed(self, records: Sequence[Record]) -> None:
        """Add new records and redraw."""
        for record in records:
            self.scene.add(record)
            if not isinstance(record, StepCommitted) and (line := describe(record)) is not None:
                self._last_line = line
        self._live.refresh()

    def draw(self) -> RenderableType:
        """The whole view at the console's size."""
        width, height = self._console.size
        ranks = self._ranks()
        rows = len(self.scene.places) + len(self.scene.standbys) + 3
        top = max(9, height // 2 - 2, min(rows, height - 12))
        layout = Layout()
        layout.split_column(
            Layout(self._header(), size=2),
            Layout(name="top", size=top),
            Layout(self._incidents(height - top - 6), name="incidents"),
            Layout(Text(self._last_line or " ", style="dim", no_wrap=True, overflow="ellipsis"), size=1),
        )
        layout["top"].split_row(
            Layout(self._panel(ranks), size=_RANKS_WIDTH), Layout(self._curve(width - _RANKS_WIDTH - 4, top - 2))
        )
        return layout

    def _header(self) -> RenderableType:
        scene, ledger = self.scene, self.scene.ledger
        line = Table.grid(expand=True, padding=(0, 1))
        line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        line.add_column(justify="right", no_wrap=True)
        name = ledger.started.job if ledger.started is not None else "starting"
        generation = ledger.generations[-1].generation if ledger.generations else 0
        facts = [*_speed(scene, self._unit, self._per_step), f"generation {generation}"]
        facts += [f"goodput {ledger.goodput:.1%}", _clock_text(scene.elapsed(self._clock()))]
        line.add_row(
            Text.assemble(("regrow ", "bold green"), (name, "bold"), (f"  {self._title}", "dim")),
            Text("  ".join(facts)),
        )
        progress = Table.grid(expand=True, padding=(0, 1))
        progress.add_column(ratio=1)
        progress.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=self._until, completed=scene.step, pulse=self._until is None)
        progress.add_row(bar, f"step {scene.step}" + (f" of {self._until}" if self._until else ""))
        return Group(line, progress)

    def _ranks(self) -> RenderableType:
        table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
        for column in ("rank", "worker", "pid", "gen", "state", "step", "time"):
            table.add_column(column, justify="left" if column in ("worker", "state") else "right", no_wrap=True)
        for rank in sorted(self.scene.places):
            table.add_row(str(rank), *_worker_cells(self.scene.places[rank]))
        for worker in self.scene.standbys:
            table.add_row("·", *_worker_cells(worker), style="dim")
        return table

    def _panel(self, ranks: RenderableType) -> Panel:
        ledger = self.scene.ledger
        known = Text(ledger.replaceable, style="yellow" if ledger.refuted else "dim")
        return Panel(
            ranks, title="ranks", title_align="left", subtitle=known, subtitle_align="left", border_style="dim"
        )

    def _curve(self, width: int, height: int) -> RenderableType:
        values = [value for _, value in self.scene.ledger.curve()]
        title = f"loss {values[-1]:.4f}" if values else "loss"
        marks = [f"{mark:.3g}" for mark in (max(values), min(values))] if values else ["", ""]
        margin = max(map(len, marks)) + 1
        lines = draw_curve(values, width=max(1, width - margin), height=max(2, height))
        text = Text(no_wrap=True)
        for row, line in enumerate(lines):
            mark = marks[0] if row == 0 else marks[1] if row == len(lines) - 1 else ""
            text.append(f"{mark:<{margin}}", style="dim")
            text.append(line + "\n", style="cyan")
        return Panel(text, title=title, title_align="left", border_style="dim")

    def _incidents(self, rows: int) -> RenderableType:
        table = incident_table(self.scene.ledger.incidents[-max(1, rows - len(self.scene.ledger.open_incidents)) :])
        for opened in self.scene.ledger.open_incidents.values():
            table.add_row(*_open_cells(opened, self._clock()), style="yellow")
        ended = self.scene.ledger.incidents
        faults = sum(bool(each.faults) for each in ended)
        title = f"incidents: {faults}, changes: {len(ended) - faults}, steps lost: {self.scene.ledger.steps_lost}"
        return Panel(table, title=title, title_align="left", border_style="dim")


def incident_table(incidents: Sequence[IncidentClosed]) -> Table:
    """A table with a row for each incident and the duration of each recovery stage."""
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    for column in ("#", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what", no_wrap=True, overflow="ellipsis", ratio=1)
    for stage in ("detect", "abort", "regroup", "hydrate", "redo", "total"):
        table.add_column(stage, justify="right", no_wrap=True)
    table.add_column("rung", no_wrap=True)
    for i in incidents:
        times = map(seconds, (i.detect, i.abort, i.regroup, i.hydrate, i.redo))
        total = Text(seconds(i.total), style="bold")
        table.add_row(str(i.incident), str(i.step), _what(i.ranks, i.cause), *times, total, i.rung)
    return table


def _open_cells(opened: IncidentOpened, now: Instant) -> list[str | Text]:
    what = _what(opened.ranks, opened.cause)
    return [str(opened.incident), str(opened.step), what, *[""] * 5, seconds(max(0.0, now - opened.at)), "…"]


def _what(which: Sequence[Rank], cause: str) -> Text:
    """The cause of an incident, preceded by the ranks unless the cause names them itself."""
    line = cause.partition("\n")[0]
    # As `Text`: in a string, rich would parse square brackets as markup.
    return Text(line if not which or line.startswith("rank") else f"{ranks(list(which))}: {line}")


def _worker_cells(worker: WorkerSeen) -> list[str | Text]:
    return [
        Text(worker.worker),
        str(worker.pid) if worker.pid is not None else "–",
        str(worker.generation) if worker.generation is not None else "–",
        Text(worker.state, style=_COLOURS[worker.state]),
        str(worker.step) if worker.step is not None else "–",
        seconds(worker.step_s) if worker.step_s is not None else "–",
    ]


def _speed(scene: Scene, unit: str, per_step: int) -> list[str]:
    """The throughput as one text; empty if it is unknown."""
    speed, counted = scene.steps_per_second(), per_step or scene.samples_per_step()
    return [f"{speed * counted:,.0f} {unit}/s"] if speed is not None and counted else []


def _clock_text(elapsed: Seconds) -> str:
    whole = int(elapsed)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
