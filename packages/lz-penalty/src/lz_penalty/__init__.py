"""The LZ penalty makes tokens less likely that a Lempel-Ziv coder would encode cheaply because they repeat the output.

After "LZ Penalty: An information-theoretic repetition penalty for autoregressive language models" (arXiv 2504.20131).
A coder with a sliding window looks for earlier occurrences of the last tokens of an output. A token that continues such
a match costs it few bits. The penalty subtracts those saved bits, times a strength, from the token's logit: loops end,
and text that repeats little is left almost alone.

* `parameters` defines the parameters and their ranges.
* `reference` is the definition, in plain Python. It is slow; the other implementations are tested against it.
* `rows` holds the parameters of a batch; `matches` computes match lengths, anew or token by token; `penalty` edits
  logits.
* `slots` keeps the state of sequences that come and go; `vllm_batches` follows the requests of vLLM.
* `kernels` does both in Triton on a GPU.
* `transformers`, `vllm` and `sglang` are plugins for those libraries; each library is imported only by its plugin.
* `detector` detects whether an output loops. It needs no torch.

This package is imported without torch, since the head of a batch job uses the detector.
"""

from typing import TYPE_CHECKING, Any

from lz_penalty.detector import DriftingLoop, ExactLoop, examine
from lz_penalty.naming import sglang_processor
from lz_penalty.parameters import LZParameters

if TYPE_CHECKING:
    from lz_penalty.penalty import LZPenalty, penalise

__all__ = ["DriftingLoop", "ExactLoop", "LZParameters", "LZPenalty", "examine", "penalise", "sglang_processor"]


def __getattr__(name: str) -> Any:
    # Lazy, since these need torch.
    if name not in ("LZPenalty", "penalise"):
        raise AttributeError(f"module 'lz_penalty' has no attribute {name!r}")
    from lz_penalty import penalty

    return getattr(penalty, name)
