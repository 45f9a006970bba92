"""An examination: runs probes, judges readings, adds the user's checks; on demand (`doctor.py`) or for an agent.

An agent runs `python -m regrow.health.examination` as a separate process, so that a failure cannot affect the agent;
the process reads its order from standard input and answers on standard output.
"""

import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from regrow.core.config import inherited_environment
from regrow.core.ids import NodeId, Seconds
from regrow.core.messages.health import NodeExamined
from regrow.core.process.priority import step_back
from regrow.core.verdicts import HealthVerdict, Severity, worst
from regrow.health.judging import judge
from regrow.health.plugin import run_check
from regrow.health.readings import NotApplicable, ProbeResult, ProbeSettings
from regrow.health.run import ProbeRunner

_NICE = 10


class Unread(msgspec.Struct, frozen=True):
    """A probe that has nothing to read on this node, and the reason. That is not a fault."""

    source: str
    device: str
    reason: str


class Examination(msgspec.Struct, frozen=True):
    """The result of an examination of a node."""

    node: NodeId
    worst: Severity
    verdicts: list[HealthVerdict]
    not_applicable: list[Unread]
    seconds: Seconds


class ExaminationOrder(msgspec.Struct, frozen=True):
    """An agent's order for an examination. `within`: seconds that each of the user's checks may take."""

    node: NodeId
    occasion: str
    settings: ProbeSettings
    probes: list[str]
    checks: list[str]
    within: Seconds


def examine(
    node: NodeId,
    settings: ProbeSettings,
    probes: Sequence[str],
    checks: Sequence[str],
    environ: Mapping[str, str],
    *,
    within: Seconds,
    busy: bool = False,
) -> Examination:
    """Run these probes and checks; each check may take `within` seconds. `busy`: a training runs too, see `judge`."""
    start = time.monotonic()
    results = ProbeRunner(settings, environ).run(probes)
    verdicts = judge(node, results, busy=busy)
    for check in checks:
        verdicts += run_check(check, node, environ, within=within)
    severity = worst([verdict.severity for verdict in verdicts])
    return Examination(node, severity, verdicts, not_applicable(results), time.monotonic() - start)


def not_applicable(results: Sequence[ProbeResult]) -> list[Unread]:
    """Probes that had nothing to read."""
    return [
        Unread(result.probe, result.reading.device, result.reading.reason)
        for result in results
        if isinstance(result.reading, NotApplicable)
    ]


def main() -> int:
    """Examine the node as ordered, at low priority, and report the verdicts that are not `ok`."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=ExaminationOrder)
    step_back(_NICE)
    found = examine(
        order.node, order.settings, order.probes, order.checks, inherited_environment(), within=order.within, busy=True
    )
    shown = [verdict for verdict in found.verdicts if verdict.severity is not Severity.OK]
    said = NodeExamined(order.node, order.occasion, shown, found.seconds)
    sys.stdout.buffer.write(msgspec.json.encode(said))
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
