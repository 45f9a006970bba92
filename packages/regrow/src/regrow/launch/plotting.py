"""`regrow plot`: draws a run into image files."""

from collections.abc import Sequence
from pathlib import Path

from regrow.core.errors import UsageError
from regrow.launch.verifying import find_run_on_one_clock, locate
from regrow.observe.plot_drawing import render
from regrow.observe.plot_series import Axis, picture

KINDS = ("png", "svg")
_NAME = "plot"


def plot(jobs_home: Path, job: str | None, *, out: Path | None, axis: Axis, metric: str) -> Sequence[Path]:
    """Draw a run; returns the files that were written.

    Args:
        jobs_home: parent folder of all jobs.
        job: a name, a folder, or a file of records; None: the running job, else the newest.
        out: a file that ends in `.png` or `.svg`, or a folder for both; None: the folder of the records.
        axis: quantity on the x axis.
        metric: name of a number that steps have logged.

    Raises:
        UsageError: there is no such job, it has no records, no step has logged the metric, `out` has another ending or
            cannot be written, or matplotlib is not installed.
        ProtocolError: a record is not one of this version.
    """
    records = locate(jobs_home, job)
    paths = _paths(out, records)
    run = find_run_on_one_clock(jobs_home, job)
    shown = picture(run, axis=axis, metric=metric)
    if not shown.curve.x and metric != "loss":
        raise UsageError(f"no step of {shown.job} has logged {metric!r}", hint=_what_there_is(shown.metrics))
    for path in paths:
        content = render(shown, path.suffix.removeprefix("."))
        try:
            path.write_bytes(content)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror or error}", hint="choose another place with --out"
            ) from error
    return paths


def _paths(out: Path | None, records: Path) -> Sequence[Path]:
    folder = out if out is not None else records if records.is_dir() else records.parent
    if out is None or out.is_dir():
        return [folder / f"{_NAME}.{kind}" for kind in KINDS]
    if out.suffix.removeprefix(".") not in KINDS:
        raise UsageError(f"--out {out} is no figure's name", hint="end it in .png or .svg, or name a folder")
    return [out]


def _what_there_is(metrics: Sequence[str]) -> str:
    return f"there are: {', '.join(metrics)}" if metrics else "it has no metrics: log some with step.log()"
