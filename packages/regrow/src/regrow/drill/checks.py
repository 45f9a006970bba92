"""The checks of `regrow doctor --train`, in the order in which they run. Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds


class DrillCheck(NamedTuple):
    """One check.

    Attributes:
        name: name for `--check` and the report.
        shows: statement that is true if the check is ok.
        limit: most seconds that it may take.
        quick: True if it also runs with `--quick`.
        jobs: most jobs over all nodes that it starts; each job has its own port.
        accelerator: True if it applies to accelerators only.
    """

    name: str
    shows: str
    limit: Seconds
    quick: bool = False
    jobs: int = 0
    accelerator: bool = False


CHECKS: Final = (
    DrillCheck("facts", "versions, limits and memory are enough", 60.0, quick=True),
    DrillCheck("network", "rate between two ranks over each address", 90.0, quick=True, jobs=1),
    DrillCheck("groups", "groups are aborted and formed again 5 times, and leak nothing", 120.0, quick=True, jobs=1),
    DrillCheck("kills-ddp", "DDP: a killed rank changes no bit", 180.0, quick=True, jobs=2),
    DrillCheck("kills-hsdp", "HSDP: a killed rank changes no bit", 240.0, jobs=2),
    DrillCheck("hang", "a rank that hangs is noticed and replaced", 150.0, quick=True, jobs=2),
    DrillCheck(
        "sick-device", "a device that fails for good is left, and the job goes on", 90.0, jobs=2, accelerator=True
    ),
    DrillCheck("memory", "memory of a killed rank comes back in time for the next", 90.0, jobs=2, accelerator=True),
    DrillCheck("steady", "a step takes no longer than with torch alone", 120.0),
    DrillCheck("node", "a lost node is replaced, and no bit changes", 150.0, jobs=2),
)
BUDGET: Final[Seconds] = 600.0
"""Time for all checks together."""


def chosen(names: Sequence[str], *, quick: bool) -> list[DrillCheck]:
    """The checks with these names, in the order of the table; without names all checks, or all those of `--quick`.

    Raises:
        UsageError: a name is unknown.
    """
    known = [each.name for each in CHECKS]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"there is no check {unknown[0]!r}", hint=f"they are {', '.join(known)}")
    if names:
        return [each for each in CHECKS if each.name in names]
    return [each for each in CHECKS if each.quick or not quick]


def first_port(check: DrillCheck) -> int:
    """Offset from the endpoint's port to the port of a check's first job, independent of the chosen checks."""
    return sum(each.jobs for each in CHECKS[: CHECKS.index(check)])
