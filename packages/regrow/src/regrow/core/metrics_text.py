"""Prometheus' text format, version 0.0.4. Pure. docs/monitoring.md has a line for each series."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """One number of a series."""

    labels: Mapping[str, str]
    value: float


class Series(NamedTuple):
    """A metric: its name, type, help text, and samples."""

    name: str
    kind: str
    text: str
    samples: list[Sample]


def series_of(name: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]], kind: str = "gauge") -> Series:
    """A series with these values, each with its labels."""
    return Series(name, kind, text, [Sample(labels, value) for labels, value in samples])


def refusals_of(counts: Mapping[str, int], labels: Mapping[str, str]) -> Series:
    """A series with the number of refused connections, by the endpoint at which they arrived."""
    found = [({**labels, "door": endpoint}, count) for endpoint, count in sorted(counts.items())]
    return series_of("regrow_refused_connections_total", "Connections without the job's token.", found, "counter")


def text_of(found: Iterable[Series]) -> str:
    """The series in Prometheus' format, as the answer to a scrape."""
    return "".join(line + "\n" for each in found for line in _lines(each))


def _lines(each: Series) -> Iterator[str]:
    yield f"# HELP {each.name} {each.text}"
    yield f"# TYPE {each.name} {each.kind}"
    for labels, value in each.samples:
        shown = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        yield f"{each.name}{{{shown}}} {_number(value)}" if shown else f"{each.name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
