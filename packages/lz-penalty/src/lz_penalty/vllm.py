"""The penalty for vLLM: `--logits-processors lz_penalty.vllm:LZVllmProcessor`.

A request asks for it by `extra_args={"lz_strength": 0.15}` in its `SamplingParams` (over HTTP `vllm_xargs`), and may
also set `lz_mode`, `lz_window`, `lz_lookback` and `lz_min_match`. Other requests are not touched.
Log-probabilities are those before the penalty, as for all of vLLM's logits processors.

One class implements both of vLLM's interfaces, that of the V1 model runner and that of Model Runner V2, if they exist.
It is named on the command line and not installed as an entry point, since the loader of one interface refuses a plugin
of the other. Written from the public sources of vLLM 0.15 to 0.32. **It has not been run under vLLM**, only
against stubs of the two interfaces.
"""

from importlib import import_module
from typing import Any

from lz_penalty.parameters import LZParameters
from lz_penalty.vllm_batches import SlotBatch, StepBatch

WIDTH = 512
"""Tokens that are kept for each request; a request may ask for a narrower window."""

_V1 = "vllm.v1.sample.logits_processor"
_V2 = "vllm.v1.worker.gpu.sample.logits_processor"


def _interfaces() -> tuple[type, ...]:
    """The base classes of this vLLM. Raises ImportError if it has none."""
    found: list[type] = []
    missing = []
    for name in (_V1, _V2):
        try:
            found.append(import_module(name).LogitsProcessor)
        except ImportError as error:
            missing.append(f"{name}: {error}")
    if not found:
        raise ImportError(f"LZ penalty: no vLLM with logits processors is installed ({'; '.join(missing)})")
    return tuple(found)


class LZVllmProcessor(*_interfaces()):  # type: ignore[misc]
    """Subtracts the LZ penalty from the logits of the requests that ask for it.

    Args:
        vllm_config: vLLM's configuration.
        where: the device (V1), or the state of the requests (V2), which has the device.
        is_pin_memory: V1 only.
    """

    def __init__(self, vllm_config: Any, where: Any, is_pin_memory: bool | None = None) -> None:
        self._v1: StepBatch | None = None
        self._v2: SlotBatch | None = None
        if hasattr(where, "all_token_ids"):
            self._v2 = SlotBatch(where, WIDTH)
        else:
            self._v1 = StepBatch(where, WIDTH)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError if a request's parameters are invalid, before it is admitted."""
        _asked(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """False: ending loops under greedy decoding is its purpose."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """V1: record the requests that have arrived, ended or moved."""
        if self._v1 is not None and batch_update is not None:
            self._v1.remove(batch_update.removed)
            for row, params, _, output in batch_update.added:
                self._v1.add(row, _asked(params), output)
            for first, second, direction in batch_update.moved:
                self._v1.move(first, second, swap=direction.name == "SWAP")

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """V2: record a request that got a slot. Returns True if it asked for the penalty."""
        return self._v2 is not None and self._v2.add(req_idx, _asked(sampling_params))

    def apply_staged_writes(self) -> None:
        """V2: copy new parameters to the device, before a step."""
        if self._v2 is not None:
            self._v2.flush()

    def apply(self, logits: Any, ctx: Any = None) -> Any:
        """Subtract the penalty from the logits, in place, [rows, vocabulary]; `ctx` gives the rows in V2."""
        if self._v2 is not None:
            return self._v2.apply(logits, ctx)
        return self._v1.apply(logits) if self._v1 is not None else logits


def _asked(sampling_params: Any) -> LZParameters | None:
    """Parameters of a request. Raises ValueError."""
    return LZParameters.of_request(getattr(sampling_params, "extra_args", None), kept=WIDTH)
