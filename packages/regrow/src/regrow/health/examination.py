"""An examination: probes run, readings judged, the user's checks added. By hand (`doctor.py`), or for an agent.

`python -m regrow.health.examination` is what an agent starts, told by its standard input, so that nothing of it can
touch the agent; it answers on standard output.
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
    """A probe that has nothing to read here, and why: no fault."""

    source: str
    device: str
    reason: str


class Examination(msgspec.Struct, frozen=True):
    """All that was found on a node."""

    node: NodeId
    worst: Severity
    verdicts: list[HealthVerdict]
    not_applicable: list[Unread]
    seconds: Seconds


class ExaminationOrder(msgspec.Struct, frozen=True):
    """Order of an agent for an examination. `within`: how long each of the user's checks may take."""

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
    """Run these probes and checks; a check may take `within` seconds. `busy`: beside a training, see `judge`."""
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
    """Examine as ordered, out of the way of workers; say what is not `ok`."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=ExaminationOrder)
    step_back(_NICE)
    found = examine(
        order.node,
        order.settings,
        order.probes,
        order.checks,
        inherited_environment(),
        within=order.within,
        busy=True,
    )
    shown = [verdict for verdict in found.verdicts if verdict.severity is not Severity.OK]
    said = NodeExamined(order.node, order.occasion, shown, found.seconds)
    sys.stdout.buffer.write(msgspec.json.encode(said))
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
