"""`python -m tests.durations REPORT.xml … docs/tests.md`: how long the tests take, file by file, from JUnit reports."""

import datetime
import hashlib
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

_HEAD = """# How long the tests take

Written by `tests/durations.py` from reports of all but the soak tests, run four at a time (`make test-times`); do not
edit. Seconds are those of the tests themselves, fixtures included; their sum is four times the time that passed.

"""
LONG_S, LONGEST_S = 60.0, 200.0


class File(NamedTuple):
    """The tests of one file."""

    name: str
    tests: int
    seconds: float
    slowest: str
    slowest_s: float


def files(*reports: str) -> list[File]:
    """Of JUnit reports, the files of tests, the slowest first."""
    cases: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for report in reports:
        for case in ElementTree.fromstring(report).iter("testcase"):
            name = case.get("classname", "").replace(".", "/") + ".py"
            cases[name].append((float(case.get("time", "0")), case.get("name", "")))
    found = [
        File(name, len(each), sum(seconds for seconds, _ in each), max(each)[1], max(each)[0])
        for name, each in cases.items()
    ]
    return sorted(found, key=lambda file: -file.seconds)


def page(found: list[File], passed_s: float, when: datetime.date, cores: int) -> str:
    """The Markdown page."""
    tests, spent_s = sum(file.tests for file in found), sum(file.seconds for file in found)
    rows = [f"| {f.name} | {f.tests} | {f.seconds:.1f} | {f.slowest} ({f.slowest_s:.1f}) |" for f in found]
    return "\n".join(
        [
            f"{_HEAD}{when}, {cores} cores: {tests} tests, {passed_s / 60:.1f} minutes, {spent_s / 60:.1f} of tests.",
            "",
            "| file | tests | seconds | the slowest |",
            "| --- | --: | --: | --- |",
            *rows,
            "",
        ]
    )


def seconds(text: str) -> dict[str, float]:
    """Of the page's text, how long the tests of each file take."""
    rows = (line.split("|") for line in text.splitlines() if line.startswith(("| tests/", "| packages/")))
    return {row[1].strip(): float(row[3]) for row in rows}


def place(test: str, seconds: Mapping[str, float], seed: str | None = None) -> tuple[float, bytes]:
    """Position of a test's file in the order, by how long the tests of each file take.

    The longest come first; in the order of a seed long ones are in the first half, or even quarter.
    """
    file = test.split("::")[0]
    took = seconds.get(file, LONG_S)
    if seed is None:
        return -took, file.encode()
    drawn = hashlib.sha256(f"{seed} {file}".encode()).digest()
    return drawn[0] // (4 if took > LONGEST_S else 2 if took > LONG_S else 1), drawn


def main(reports: list[Path], out: Path) -> None:
    """Write the page."""
    texts = [report.read_text(encoding="utf-8") for report in reports]
    suites = [next(ElementTree.fromstring(text).iter("testsuite")) for text in texts]
    when = datetime.datetime.fromisoformat(suites[0].get("timestamp", "1970-01-01")).date()
    passed_s = sum(float(suite.get("time", "0")) for suite in suites)
    out.write_text(page(files(*texts), passed_s, when, os.cpu_count() or 0), encoding="utf-8")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:-1]], Path(sys.argv[-1]))
