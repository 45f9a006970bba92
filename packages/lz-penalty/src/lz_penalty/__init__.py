"""The LZ penalty: what a Lempel-Ziv coder would find cheap to say next, because it was said before, is made unlikely.

After "LZ Penalty: An information-theoretic repetition penalty for autoregressive language models" (arXiv 2504.20131).
A coder with a sliding window looks at the last tokens of an output and finds where they stood before. A token that
continues such a match costs it few bits. The penalty takes those saved bits off the token's logit, times a strength:
loops end, and text that repeats little is left almost alone.

* `parameters` says what is penalised, and how strongly.
* `reference` is the definition, in plain Python. It is slow, and the other forms are tested against it.
* `rows` holds the parameters of a batch; `matches` finds match lengths, anew or token by token; `penalty` edits logits.
* `kernels` does both in Triton, where there is a GPU.
* `transformers`, `vllm` and `sglang` put it into those libraries; none of them is imported before its module is.
* `detector` tells whether an output went round in circles. It needs no torch.

This package is imported without torch: the head of a batch job reads the detector.
"""

from typing import TYPE_CHECKING, Any

from lz_penalty.detector import DriftingLoop, ExactLoop, examine
from lz_penalty.parameters import LZParameters

if TYPE_CHECKING:
    from lz_penalty.penalty import LZPenalty, penalise

__all__ = ["DriftingLoop", "ExactLoop", "LZParameters", "LZPenalty", "examine", "penalise"]


def __getattr__(name: str) -> Any:
    # Lazy, as these need torch.
    if name not in ("LZPenalty", "penalise"):
        raise AttributeError(f"module 'lz_penalty' has no attribute {name!r}")
    from lz_penalty import penalty

    return getattr(penalty, name)
