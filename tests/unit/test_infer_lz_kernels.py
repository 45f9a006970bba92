"""The Triton kernels take what torch takes.

On a GPU they run as they are; without one in Triton's interpreter, where Triton is installed and `TRITON_INTERPRET=1`
is set: it is no dependency of regrow, and torch for CPUs does not bring it.
"""

import importlib.util
import os

import pytest
import torch
from tests.unit.infer_lz_cases import assert_close, cases

from lz_penalty import kernels
from lz_penalty.matches import match_lengths, window_of
from lz_penalty.penalty import penalise
from lz_penalty.rows import RowParameters

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_triton = pytest.mark.skipif(
    not (INTERPRETED or kernels.available()),
    reason="Triton's kernels need a GPU; without one: pip install triton, and TRITON_INTERPRET=1",
)


@needs_triton
@pytest.mark.gpu
def test_the_kernels_take_what_torch_takes() -> None:
    for case in cases(seed=4, batches=12 if INTERPRETED else 100):
        rows = RowParameters.of(case.parameters, DEVICE)
        window = window_of(case.padded().to(DEVICE), rows.width, ends=case.ends())
        lengths = kernels.match_lengths(window, rows)
        assert torch.equal(lengths, match_lengths(window, rows))
        got = kernels.penalise_window(case.logits.to(DEVICE, copy=True), window, lengths, rows)
        expected = penalise(case.logits.clone(), case.padded(), case.parameters, ends=case.ends())
        assert_close(got.cpu(), expected)


def test_without_a_gpu_triton_is_not_imported() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not kernels.available()
