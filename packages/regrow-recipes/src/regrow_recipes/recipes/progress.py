"""Progress of a training recipe: a line every few steps, with speed and time left. *Pure* except for its clock."""

from collections.abc import Callable, Mapping
from typing import Final

from regrow_recipes.recipes.planning import in_bytes

PEAKS: Final[dict[str, float]] = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}
"""Peak dense bf16 FLOP/s of a device, by a part of its name, from the maker. The first match counts."""


def peak_of(device: str) -> float | None:
    """The peak FLOP/s of a device by its name; None: not known."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)


class Progress:
    """Makes the progress lines of a training.

    Args:
        steps: their total number.
        tokens: of a step, on all ranks, padding included.
        flops: of a token, for the model, without recomputation.
        every: steps between two lines.
        device: the device's name; empty on CPUs.
        half: whether the forward pass is in bf16, to which the peaks apply.
        clock: returns seconds.
        memory: returns the peak bytes of this rank's device; None: there is no device.
    """

    def __init__(
        self,
        *,
        steps: int,
        tokens: int,
        flops: float,
        every: int,
        device: str,
        half: bool,
        clock: Callable[[], float],
        memory: Callable[[], int] | None = None,
    ) -> None:
        self._steps, self._tokens, self._flops, self._every = steps, tokens, flops, every
        self._peak = peak_of(device) if half else None
        self._clock, self._memory = clock, memory
        self._since: tuple[int, float] | None = None

    def line(self, number: int, numbers: Mapping[str, float], *, lr: float, world: int) -> str:
        """The line after that step; empty: none is due."""
        done = number + 1
        if self._since is None:
            self._since = (done, self._clock())
        due = done % self._every == 0 or done == self._steps or done == 1
        if not due:
            return ""
        parts = [f"step {done}/{self._steps}"]
        parts += [f"{name} {numbers[name]:.4g}" for name in ("loss", "grad_norm") if name in numbers]
        parts.append(f"lr {lr:.3g}")
        before, at = self._since
        now = self._clock()
        if done > before and now > at:
            a_step = (now - at) / (done - before)
            parts += self._speeds(a_step, world)
            if done < self._steps:
                parts.append(f"{span((self._steps - done) * a_step)} left")
            self._since = (done, now)
        return "  ".join(parts)

    def _speeds(self, a_step: float, world: int) -> list[str]:
        tokens = self._tokens / a_step
        each = tokens * self._flops / world
        said = [f"{tokens:,.0f} tokens/s", f"{each / 1e12:.3g} TFLOP/s a rank"]
        if self._peak is not None:
            said.append(f"MFU {100 * each / self._peak:.1f}%")
        if self._memory is not None:
            said.append(f"{in_bytes(self._memory())} at most")
        return said


def span(seconds: float) -> str:
    """Format seconds as 1h 02min, 3min 20s or 12s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02}min"
    return f"{whole // 60}min {whole % 60:02}s" if whole >= 60 else f"{whole}s"
