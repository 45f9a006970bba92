"""Runs a script that clips its gradients as it is, but slower until there is a file `hurry`.

    paced.py PACE STEPS SCRIPT words of the script…

PACE: seconds that its first step lasts more, see pacing.py. STEPS: how many it makes.
"""

import runpy
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch
from pacing import pause  # type: ignore[import-not-found]  # beside this script

pace, steps, script = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
clip, bodies = torch.nn.utils.clip_grad_norm_, count()


def clip_later(*given: Any, **more: Any) -> Any:
    """Result of `torch.nn.utils.clip_grad_norm_`, after the pause of a step."""
    if number := next(bodies):  # the first body is the rehearsal
        pause(pace, number - 1, steps)
    return clip(*given, **more)


torch.nn.utils.clip_grad_norm_ = clip_later
sys.argv[:] = sys.argv[3:]
sys.path.insert(0, str(Path(script).parent))
runpy.run_path(script, run_name="__main__")
