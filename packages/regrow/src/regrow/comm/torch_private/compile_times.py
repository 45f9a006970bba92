"""Time that torch has spent on compiling in this process."""

import sys

from regrow.core.ids import Seconds

_WHOLE = "_compile.compile_inner"
"""torch's own name for the compiling of one frame, all of it."""


def compiled() -> Seconds:
    """Seconds so far; 0 where nothing was compiled, or this torch does not tell."""
    module = sys.modules.get("torch._dynamo.utils")
    return float(sum(getattr(module, "compilation_time_metrics", {}).get(_WHOLE, ())))
