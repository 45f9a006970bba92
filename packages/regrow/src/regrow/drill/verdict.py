"""Results of checks, and the verdict that they come to. Pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from regrow.core.ids import Seconds

UNFIT = 1
"""Exit code where a check has failed."""


class CheckStatus(StrEnum):
    """Status of a check."""

    OK = "ok"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    """It cannot be done here, which is no pass."""


class Judgement(NamedTuple):
    """Judgement of a check. `figure`: what was measured; `cause`: why it is not ok."""

    status: CheckStatus
    figure: str = ""
    cause: str = ""


def ok(figure: str) -> Judgement:
    """The check has shown what it is to show."""
    return Judgement(CheckStatus.OK, figure)


def failed(cause: str, figure: str = "") -> Judgement:
    """It has not."""
    return Judgement(CheckStatus.FAILED, figure, cause)


def not_applicable(cause: str) -> Judgement:
    """It cannot be done here."""
    return Judgement(CheckStatus.NOT_APPLICABLE, cause=cause)


class CheckResult(msgspec.Struct, frozen=True):
    """One check in the report. `output`: the last output of what it ran, where it has failed."""

    check: str
    status: CheckStatus
    figure: str
    seconds: Seconds
    cause: str
    output: str = msgspec.field(default="", name="words")

    @property
    def line(self) -> str:
        """One line for people."""
        said = "; ".join(filter(None, (self.cause, self.figure)))
        return f"{self.status:<14}  {self.check:<11}  {self.seconds:5.1f} s  {said}"


class DrillReport(msgspec.Struct, frozen=True):
    """Report for an issue. `versions`: of what was used, by name; `node`: this one's number, of `nodes`."""

    verdict: str
    code: int
    versions: Mapping[str, str]
    node: int
    nodes: int
    seconds: Seconds
    checks: Sequence[CheckResult]


def code_of(results: Sequence[CheckResult]) -> int:
    """The exit code: 0 where no check has failed, and at least one was ok."""
    statuses = {each.status for each in results}
    return 0 if CheckStatus.FAILED not in statuses and CheckStatus.OK in statuses else UNFIT


def conclude(results: Sequence[CheckResult], *, begun: int) -> str:
    """The verdict in words. `begun`: how many checks were chosen; with fewer results it was interrupted."""
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
