"""`python -m tests.process.defective …`: regrow, with a coordinator that fails where `REGROW_TEST_DEFECTS` says.

`WorkerExited:1,late WorkerHalted:2`: at the first of these facts before anything is done about it, and at the second of
those when what was decided has not been carried out.
"""

import os
import sys
from collections import Counter

from regrow.cli import main
from regrow.core.ids import Instant
from regrow.core.messages.unions import Fact
from regrow.membership.machine import Membership

VARIABLE = "REGROW_TEST_DEFECTS"


def break_coordinator(plan: str) -> None:
    wanted = [place.strip() for place in plan.split(",")]
    seen: Counter[str] = Counter()
    decide = Membership.decide

    def failing(self: Membership, event: Fact, now: Instant) -> None:
        name = type(event).__name__
        seen[name] += 1
        place = f"{name}:{seen[name]}"
        if place in wanted:
            raise KeyError(place)
        decide(self, event, now)
        if f"late {place}" in wanted:
            raise KeyError(f"late {place}")

    Membership.decide = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    break_coordinator(os.environ[VARIABLE])
    sys.exit(main())
