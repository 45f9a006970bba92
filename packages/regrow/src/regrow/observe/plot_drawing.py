"""Draws the series of `plot_series`: three panels with a common x axis, and incidents marked across all of them.

Needs matplotlib (`pip install 'regrow[plot]'`), whose global state it leaves unchanged.
"""

import math
from collections.abc import Sequence
from io import BytesIO
from statistics import median
from typing import TYPE_CHECKING, Literal

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds
from regrow.core.process.extras import install_line
from regrow.observe.plot_series import Axis, Kind, Mark, Picture, Stairs
from regrow.observe.story import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (9.0, 6.3)
_DOTS = 150
_INK, _GREY, _LINE = "#22262b", "#6b7280", "#1f4e79"
_STYLES: dict[Kind, tuple[str, Literal["-", "--", "-.", ":"], str]] = {
    Kind.GROW: ("^", "-", "#00805e"),
    Kind.SHRINK: ("v", "--", "#b86e00"),
    Kind.PREEMPT: ("D", "-.", "#8a4fa3"),
    Kind.MOVE: ("s", "--", "#1f6f8b"),
    Kind.FAULT: ("X", ":", "#c2330a"),
}
"""Marker, line style and colour of each kind; kinds differ in marker and colour."""
_SETTINGS = {
    "font.size": 9.0,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "regrow",
}
_LETTER = 0.0092
"""Width of a letter above the panels, as a fraction of their width."""


def render(picture: Picture, kind: str) -> bytes:
    """The figure as a file's content.

    Args:
        picture: the data to draw.
        kind: `png` or `svg`.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            f"a plot needs matplotlib, which cannot be imported: {error}", hint=install_line("plot")
        ) from error
    content = BytesIO()
    with rc_context(_SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=_SIZE)
        FigureCanvasAgg(figure)
        _draw(figure, picture)
        figure.savefig(content, format=kind, dpi=_DOTS, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()


def _draw(figure: "Figure", picture: Picture) -> None:
    panels: Sequence[Axes] = figure.subplots(
        3,
        1,
        sharex=True,
        gridspec_kw={
            "height_ratios": (1.0, 1.7, 1.7),
            "hspace": 0.13,
            "left": 0.095,
            "right": 0.975,
            "top": 0.815 if picture.marks else 0.88,
            "bottom": 0.08,
        },
    )
    unit, divisor = _time_unit(picture.wall) if picture.axis is Axis.TIME else ("step", 1.0)
    world, rate, metric = panels
    _draw_world(world, picture, divisor)
    _draw_rate(rate, picture, divisor)
    _draw_metric(metric, picture, divisor)
    metric.set_xlabel("step" if picture.axis is Axis.STEP else f"time since the start ({unit})")
    for panel in panels:
        panel.grid(axis="y", color="#e5e7eb", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(length=3)
    figure.align_ylabels(list(panels))
    right = max([*picture.world.edges[-1:], *picture.rate.edges[-1:], *picture.curve.x[-1:], 0.0]) / divisor
    left = min([*picture.world.edges[:1], *picture.rate.edges[:1], *picture.curve.x[:1]], default=0.0) / divisor
    left = 0.0 if left < 0.5 * right else left
    margin = 0.01 * (right - left) or 0.5
    world.set_xlim(left - margin, right + margin)
    _draw_marks(panels, picture.marks, divisor)
    _draw_heading(figure, picture)


def _time_unit(wall: Seconds) -> tuple[str, float]:
    if wall < 300:
        return "s", 1.0
    return ("min", 60.0) if wall < 3 * 3600 else ("h", 3600.0)


# --- panels ------------------------------------------------------------------------------------------------------


def _stairs(panel: "Axes", stairs: Stairs, divisor: float) -> None:
    if stairs.values:
        edges = [edge / divisor for edge in stairs.edges]
        panel.stairs(stairs.values, edges, baseline=None, color=_LINE, linewidth=1.4)
        panel.stairs(stairs.values, edges, fill=True, color=_LINE, alpha=0.10, linewidth=0)


def _draw_world(panel: "Axes", picture: Picture, divisor: float) -> None:
    from matplotlib.ticker import MaxNLocator

    _stairs(panel, picture.world, divisor)
    panel.set_ylabel(f"world size\n({picture.world_unit})")
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    panel.set_ylim(0, 1.15 * max(picture.world.values, default=1.0))


def _draw_rate(panel: "Axes", picture: Picture, divisor: float) -> None:
    from matplotlib.ticker import EngFormatter

    _stairs(panel, picture.rate, divisor)
    panel.set_ylabel(f"throughput\n({picture.rate_unit}/s)")
    panel.yaxis.set_major_formatter(EngFormatter(sep="", places=None))
    panel.set_ylim(0, 1.15 * _usual_top(picture.rate.values))


def _usual_top(values: Sequence[float]) -> float:
    """The largest value; in a long run without the few outliers that a burst of late commits causes."""
    ordered = sorted(values)
    if not ordered or ordered[-1] <= 0:
        return 1.0
    usual = ordered[int(0.97 * (len(ordered) - 1))]
    return ordered[-1] if len(ordered) < 30 or ordered[-1] <= 1.5 * usual or usual <= 0 else usual


def _draw_metric(panel: "Axes", picture: Picture, divisor: float) -> None:
    curve = picture.curve
    panel.set_ylabel(picture.metric)
    if not curve.x:
        panel.text(
            0.5, 0.5, f"no step has logged {picture.metric}", transform=panel.transAxes, ha="center", color=_GREY
        )
        return
    x = [each / divisor for each in curve.x]
    if curve.each > 1:
        panel.fill_between(x, curve.low, curve.high, color=_LINE, alpha=0.18, linewidth=0)
    few = len(x) <= 40
    panel.plot(x, curve.mean, color=_LINE, linewidth=1.4, marker="." if few else "", markersize=5)
    if curve.gaps:
        gaps = [each / divisor for each in curve.gaps]
        bottom = panel.get_xaxis_transform()
        panel.plot(gaps, [0.05] * len(gaps), "x", transform=bottom, color=_INK, markersize=5)
        count = f"{len(gaps)} {'step' if len(gaps) == 1 else 'steps'}"
        panel.text(
            0.995,
            0.94,
            f"×  not finite, {count}",
            transform=panel.transAxes,
            ha="right",
            va="top",
            fontsize=8,
            color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    if curve.each > 1:
        panel.set_ylabel(f"{picture.metric}\n(mean, range of {curve.each} steps)")


# --- incidents ---------------------------------------------------------------------------------------------------


def _draw_marks(panels: Sequence["Axes"], marks: Sequence[Mark], divisor: float) -> None:
    top = panels[0]
    left, right = top.get_xlim()
    many = len(marks) > 25
    for mark in marks:
        marker, line, colour = _STYLES[mark.kind]
        start, end = mark.start / divisor, mark.end / divisor
        for panel in panels:
            panel.axvspan(start, end, color=colour, alpha=0.13, linewidth=0)
            width, alpha = (0.7, 0.55) if many else (1.0, 0.9)
            panel.axvline(start, color=colour, linestyle=line, linewidth=width, alpha=alpha)
        top.plot(
            [start], [1.08], marker, transform=top.get_xaxis_transform(), color=colour, markersize=4.5 if many else 6,
            markeredgewidth=0, clip_on=False,
        )  # fmt: skip
    words = ["open" if mark.pause is None else seconds(mark.pause) for mark in marks]
    places = _room_for(words, [(mark.start / divisor - left) / (right - left) for mark in marks])
    for mark, word, (middle, row) in zip(marks, words, places, strict=False):
        top.text(
            middle, 1.19 + 0.17 * row, word, transform=top.transAxes, ha="center", va="bottom", fontsize=8,
            color=_STYLES[mark.kind][2],
        )  # fmt: skip


def _room_for(words: Sequence[str], places: Sequence[float]) -> list[tuple[float, int]]:
    """Center and row of each word above the panel, in the lower of two rows if it fits; empty if not all fit."""
    ends = [-1.0, -1.0]
    found = []
    for word, at in zip(words, places, strict=True):
        half = _LETTER * len(word) / 2
        middle = min(max(at, half), 1.0 - half)
        row = next((row for row, end in enumerate(ends) if middle - half > end), None)
        if row is None:
            return []
        ends[row] = middle + half + _LETTER
        found.append((middle, row))
    return found


def _draw_heading(figure: "Figure", picture: Picture) -> None:
    from matplotlib.lines import Line2D

    figure.text(0.022, 0.972, picture.job, fontsize=12, fontweight="bold", va="top")
    figure.text(0.022, 0.931, _subtitle(picture), fontsize=9, color=_GREY, va="top")
    handles = []
    for kind, (marker, line, colour) in _STYLES.items():
        marks = [mark for mark in picture.marks if mark.kind is kind]
        if marks:
            handles.append(
                Line2D([], [], color=colour, linestyle=line, marker=marker, markersize=6, markeredgewidth=0,
                       linewidth=1.0, label=_count_of(kind, marks))
            )  # fmt: skip
    if handles:
        figure.legend(
            handles=handles, loc="upper right", bbox_to_anchor=(0.98, 0.985), ncols=2, frameon=False, fontsize=8.5,
            handlelength=2.6, columnspacing=1.4,
        )  # fmt: skip


def _subtitle(picture: Picture) -> str:
    words = [f"{picture.steps:,} {'step' if picture.steps == 1 else 'steps'} in {_duration(picture.wall)}"]
    if picture.partial:
        words.append(f"{picture.partial:,} of them not reported by every rank")
    return ", ".join(words)


def _duration(wall: Seconds) -> str:
    if wall < 5999:
        return seconds(wall)
    return f"{int(wall) // 3600}:{int(wall) % 3600 // 60:02d} h"


def _count_of(kind: Kind, marks: Sequence[Mark]) -> str:
    pauses = [mark.pause for mark in marks if mark.pause is not None and math.isfinite(mark.pause)]
    if not pauses:
        return f"{kind} × {len(marks)}"
    if len(marks) == 1:
        return f"{kind}, {seconds(pauses[0])}"
    return f"{kind} × {len(marks)}, median {seconds(median(pauses))}"
