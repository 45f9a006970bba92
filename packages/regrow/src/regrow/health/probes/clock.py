"""Reads the difference between this node's wall clock and the coordinator's."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from regrow.core import tls
from regrow.core.ids import Seconds
from regrow.health.readings import ClockReading, NotApplicable, ProbeAt, ProbeSettings, Reading

_ROUNDS = 3
_TIMEOUT_S: Seconds = 2.0


def read(settings: ProbeSettings) -> Iterator[ProbeAt | Reading]:
    """Yield the reading of the shortest of a few round trips, which is the most exact one."""
    if not settings.clock:
        yield NotApplicable("there is no job, so no coordinator, to compare with")
        return
    yield ProbeAt("clock")
    try:
        yield min((_ask(settings) for _ in range(_ROUNDS)), key=lambda each: each.uncertainty)
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield NotApplicable(f"the coordinator did not send its time: {error}")


def _ask(settings: ProbeSettings) -> ClockReading:
    request = urllib.request.Request(settings.clock, headers={"Authorization": f"Bearer {settings.token}"})
    # No proxy: the coordinator is reached directly, whatever proxy the environment sets.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls.calling())
    )
    before = time.time()
    with opener.open(request, timeout=_TIMEOUT_S) as response:
        theirs = float(json.loads(response.read(1024))["time"])
    after = time.time()
    return ClockReading(theirs - (before + after) / 2, (after - before) / 2)
