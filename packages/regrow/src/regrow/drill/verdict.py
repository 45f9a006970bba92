"""Results of checks, and the verdict over all of them. Pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from regrow.core.ids import Seconds

UNFIT = 1
"""Exit code if a check has failed."""


class CheckStatus(StrEnum):
    """Status of a check."""

    OK = "ok"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    """The check cannot run on this machine; this does not count as passed."""


class Judgement(NamedTuple):
    """Judgement of a check. `figure`: the measurement; `cause`: reason why it is not ok."""

    status: CheckStatus
    figure: str = ""
    cause: str = ""


def ok(figure: str) -> Judgement:
    """The judgement of a check that has passed."""
    return Judgement(CheckStatus.OK, figure)


def failed(cause: str, figure: str = "") -> Judgement:
    """The judgement of a check that has failed."""
    return Judgement(CheckStatus.FAILED, figure, cause)


def not_applicable(cause: str) -> Judgement:
    """The judgement of a check that cannot run on this machine."""
    return Judgement(CheckStatus.NOT_APPLICABLE, cause=cause)


class CheckResult(msgspec.Struct, frozen=True):
    """One check in the report. `output`: the last output of its jobs, if it has failed."""

    check: str
    status: CheckStatus
    figure: str
    seconds: Seconds
    cause: str
    output: str = msgspec.field(default="", name="words")

    @property
    def line(self) -> str:
        """The result as one line of text."""
        said = "; ".join(filter(None, (self.cause, self.figure)))
        return f"{self.status:<14}  {self.check:<11}  {self.seconds:5.1f} s  {said}"


class DrillReport(msgspec.Struct, frozen=True):
    """A report to attach to an issue. `versions`: of packages and limits, by name; `node`: rank of this node."""

    verdict: str
    code: int
    versions: Mapping[str, str]
    node: int
    nodes: int
    seconds: Seconds
    checks: Sequence[CheckResult]


def code_of(results: Sequence[CheckResult]) -> int:
    """The exit code: 0 if no check has failed and at least one was ok."""
    statuses = {each.status for each in results}
    return 0 if CheckStatus.FAILED not in statuses and CheckStatus.OK in statuses else UNFIT


def conclude(results: Sequence[CheckResult], *, begun: int) -> str:
    """The verdict in words. `begun`: number of chosen checks; with fewer results the session was interrupted."""
    by = {status: [each.check for each in results if each.status is status] for status in CheckStatus}
    said = [f"{len(by[CheckStatus.OK])} of {begun} checks are ok"]
    if by[CheckStatus.FAILED]:
        said.append(f"FAILED: {', '.join(by[CheckStatus.FAILED])}")
    if by[CheckStatus.NOT_APPLICABLE]:
        said.append(f"not applicable here, so not shown: {', '.join(by[CheckStatus.NOT_APPLICABLE])}")
    if len(results) < begun:
        said.append(f"interrupted: {begun - len(results)} not carried out")
    if not by[CheckStatus.FAILED] and not by[CheckStatus.OK]:
        said.append("nothing was shown")
    return "; ".join(said)
