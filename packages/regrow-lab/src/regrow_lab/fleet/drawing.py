"""Draws a simulation: goodput of each policy, and the use of the other rank-seconds.

Needs matplotlib (`pip install 'regrow-lab[plot]'`), and keeps none of its global state.
"""

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line
from regrow.observe.goodput import Spent
from regrow_lab.fleet.summary import PolicySummary, SimulationReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GREY, _LINE = "#22262b", "#6b7280", "#1f4e79"
_COLOURS = (
    "#c2330a",
    "#b86e00",
    "#d9a300",
    "#00805e",
    "#1f4e79",
    "#8a4fa3",
    "#5b6b7a",
    "#a3b1bf",
    "#444b52",
    "#cdb38b",
)
_HATCHES = ("", "//", "..", "xx", "", "\\\\", "", "--", "oo", "++")
"""Hatches, so that the bars can be told apart without colours too."""
_SETTINGS = {
    "font.size": 9.0,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "regrow",
}


def render_simulation(report: SimulationReport, kind: str) -> bytes:
    """Draw the figure; returns the file's content.

    Args:
        report: the results to show.
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
            f"a plot needs matplotlib, which cannot be imported: {error}",
            hint=install_line("plot", package="regrow-lab"),
        ) from error
    rows, content = report.policies, BytesIO()
    with rc_context(_SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(10.5, 1.9 + 0.34 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        goodput, lost = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": (1.0, 1.5)})
        _draw_goodput(goodput, rows)
        _draw_lost(lost, rows)
        figure.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)
        if report.title:
            figure.suptitle(report.title, fontsize=10.5)
        figure.savefig(content, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()


def _draw_goodput(panel: "Axes", rows: Sequence[PolicySummary]) -> None:
    places = range(len(rows))
    values = [100 * each.goodput.mean for each in rows]
    widths = [100 * each.goodput.within if each.seeds > 1 else 0.0 for each in rows]
    panel.errorbar(values, list(places), xerr=widths, fmt="o", color=_LINE, ecolor=_GREY, capsize=3, markersize=5)
    for place, value in zip(places, values, strict=True):
        panel.annotate(
            f"{value:.1f}", (value, place), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    panel.set_yticks(list(places), [f"{each.policy}, {each.ranks:,} ranks" for each in rows])
    panel.set_ylim(len(rows) - 0.5, -0.6)
    low = min(values)
    panel.set_xlim(max(0.0, low - 0.12 * (100 - low) - 1), 100.5)
    panel.set_xlabel("goodput (%)")
    panel.grid(axis="x", color="#e5e7eb", linewidth=0.7)
    panel.set_axisbelow(True)


def _draw_lost(panel: "Axes", rows: Sequence[PolicySummary]) -> None:
    left = [0.0] * len(rows)
    names = [
        name for name in Spent if name is not Spent.PRODUCTIVE and any(each.shares[name] > 0.0002 for each in rows)
    ]
    for number, name in enumerate(names):
        parts = [100 * each.shares[name] for each in rows]
        panel.barh(
            range(len(rows)),
            parts,
            left=left,
            height=0.62,
            color=_COLOURS[number],
            hatch=_HATCHES[number],
            edgecolor="white",
            linewidth=0.4,
            label=name.value,
        )
        left = [before + part for before, part in zip(left, parts, strict=True)]
    panel.set_xlabel("rank-seconds that were not productive (%), spares included")
    panel.grid(axis="x", color="#e5e7eb", linewidth=0.7)
    panel.set_axisbelow(True)
