"""The Triton kernels take what torch takes.

On a GPU they run as they are; without one in Triton's interpreter, where Triton is installed: it is no dependency of
regrow, and torch for CPUs does not bring it. `make test-vllm` has it.
"""

import importlib.util
import os

import pytest
import torch
from infer_lz_cases import assert_close, cases

from lz_penalty import kernels
from lz_penalty.matches import match_lengths, window_of
from lz_penalty.penalty import penalise
from lz_penalty.rows import RowParameters

INTERPRETED = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"  # read as the kernels are imported
DEVICE = "cpu" if INTERPRETED else "cuda"

needs_triton = pytest.mark.skipif(
    not (INTERPRETED or kernels.available()),
    reason="Triton's kernels need Triton, which runs them on a GPU or in its interpreter: pip install triton",
)


@needs_triton
def test_the_kernels_take_what_torch_takes() -> None:
    for case in cases(seed=4, batches=3 if INTERPRETED else 100):
        rows = RowParameters.of(case.parameters, DEVICE)
        window = window_of(case.padded().to(DEVICE), rows.width, ends=case.ends())
        lengths = kernels.match_lengths(window, rows)
        assert torch.equal(lengths, match_lengths(window, rows))
        got = kernels.penalise_window(case.logits.to(DEVICE, copy=True), window, lengths, rows)
        expected = penalise(case.logits.clone(), case.padded(), case.parameters, ends=case.ends())
        assert_close(got.cpu(), expected)
        # The rows of logits in another order, and the window in a wider memory, as under vLLM's V1.
        lines = torch.randperm(len(case.logits), generator=torch.Generator().manual_seed(1))
        shuffled = torch.empty_like(case.logits)
        shuffled[lines] = case.logits
        wide = torch.cat((window, torch.full_like(window, 7)), dim=1)[:, : window.shape[1]]
        got = kernels.penalise_window(shuffled.to(DEVICE), wide, lengths, rows, lines.to(DEVICE))
        assert_close(got.cpu()[lines], expected)


def test_without_a_gpu_triton_is_not_imported() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not kernels.available()
