"""CPU time of the LZ penalty for requests that arrive under vLLM's V1, and after they have ended."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from lz_penalty.parameters import LZParameters
from lz_penalty.vllm_batches import StepBatch

ARRIVALS = 1024
WIDTH = 512
VOCABULARY = 32_000
ASKED = {"lz_strength": 0.15}


def _took(work: Callable[[], object]) -> float:
    """CPU seconds of this process for the work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def _arrive(batch: StepBatch, first: int, count: int) -> list[list[int]]:
    """Add `count` requests, in rows from `first` on; returns their output lists."""
    outputs: list[list[int]] = [[] for _ in range(count)]
    for row, output in enumerate(outputs, first):
        batch.add(row, LZParameters.of_request(ASKED, kept=WIDTH), output)
    return outputs


def arrivals_s(logits: Tensor) -> float:
    """Extra seconds of a step in which requests arrive, over the same step without arrivals."""
    batch = StepBatch("cpu", WIDTH)
    run: list[list[int]] = _arrive(batch, 0, 8)
    for output in run:
        output.extend(range(600))
    batch.apply(logits[:8])

    def step() -> None:
        _arrive(batch, 8, ARRIVALS)
        batch.apply(logits)

    arriving = _took(step)
    return arriving - min(_took(lambda: batch.apply(logits)) for _ in range(3))


def one_request_s(batch: StepBatch, outputs: list[list[int]], logits: Tensor, steps: int) -> float:
    """Seconds of a step of one request."""

    def run() -> None:
        for _ in range(steps):
            outputs[0].append(7)
            batch.apply(logits)

    return _took(run) / steps


def measure(rounds: int = 9) -> dict[str, float]:
    """The figures: medians of the rounds; for comparisons the median ratio, sides in turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        logits = torch.randn(ARRIVALS + 8, VOCABULARY)
        arriving = median(arrivals_s(logits) for _ in range(rounds))
        fresh, burst = StepBatch("cpu", WIDTH), StepBatch("cpu", WIDTH)
        fresh_outputs, burst_outputs = _arrive(fresh, 0, 1), _arrive(burst, 0, ARRIVALS)
        burst.apply(logits[:ARRIVALS])
        burst.remove(range(1, ARRIVALS))
        one, ratios = logits[:1], []
        for _ in range(2 * rounds):
            before = one_request_s(fresh, fresh_outputs, one, 200)
            ratios.append(one_request_s(burst, burst_outputs, one, 200) / before)
        idle, calls = StepBatch("cpu", WIDTH), 100_000
        idle_s = _took(lambda: [idle.apply(one) for _ in range(calls)]) / calls
    finally:
        torch.set_num_threads(threads)
    return {"arrivals_1024_ms": 1e3 * arriving, "idle_us": 1e6 * idle_s, "after_burst_ratio": median(ratios)}
