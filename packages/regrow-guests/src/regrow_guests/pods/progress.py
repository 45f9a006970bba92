"""Progress in the format of a TrainJob's status. Pure.

The body and its limits: github.com/kubeflow/trainer `docs/user-guides/trainjob-progress.md` and
`pkg/apis/trainer/v1alpha1/trainjob_types.go` (2.3; the feature gate TrainJobStatus is alpha).
"""

import datetime
from typing import Any

from regrow.core.ids import Seconds
from regrow.observe.watch.present import JobFigures


class TrainJobProgress:
    """Computes progress and speed since the first report. `steps`: length of the training; 0: unknown."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: tuple[Seconds, int] | None = None

    def body(self, seen: JobFigures, now: Seconds, at: datetime.datetime) -> dict[str, Any]:
        """Body of one request. `now`: by a monotonic clock; `at`: the time of day, with its zone."""
        first = self._first = self._first or (now, seen.step)
        metrics = {"step": str(max(0, seen.step)), "incidents": str(seen.incidents)}
        if seen.goodput is not None:
            metrics["goodput"] = f"{seen.goodput:.4f}"
        status: dict[str, Any] = {
            "lastUpdatedTime": at.isoformat(timespec="seconds"),
            "metrics": [{"name": name, "value": text} for name, text in metrics.items()],
        }
        if self._steps:
            done = min(max(0, seen.step), self._steps)
            status["progressPercentage"] = 100 * done // self._steps
            speed = (seen.step - first[1]) / (now - first[0]) if now > first[0] else 0.0
            if speed > 0:
                status["estimatedRemainingSeconds"] = round((self._steps - done) / speed)
        return {"trainerStatus": status}
