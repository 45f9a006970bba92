"""Requests that come and go: the state follows those that are there, and all that changed is written at once."""

import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import dill  # type: ignore[import-untyped]
import numpy
import pytest
import torch
from infer_lz_cases import logits_of
from infer_lz_servers import SGLANG, SglangInterface, install, load
from torch.utils._python_dispatch import TorchDispatchMode

from lz_penalty import sglang_processor
from lz_penalty.parameters import LZParameters
from lz_penalty.penalty import penalise
from lz_penalty.slots import LEAST_SLOTS, last_tokens
from lz_penalty.vllm_batches import StepBatch

WIDTH = 64
ASKED = LZParameters(window=WIDTH)


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations of torch."""

    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counted]:
    with Counted() as mode:  # type: ignore[no-untyped-call]
        yield mode


def arrive(batch: StepBatch, rows: range) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in rows]
    for row, output in zip(rows, outputs, strict=True):
        batch.add(row, ASKED, output)
    return outputs


def operations_of_arriving(count: int) -> int:
    batch = StepBatch("cpu", WIDTH)
    arrive(batch, range(1))
    batch.apply(logits_of(1, 50))
    logits = logits_of(count + 1, 50)
    with counted() as mode:
        arrive(batch, range(1, count + 1))
        batch.apply(logits)
    return mode.calls


def test_any_number_that_arrives_at_a_step_is_taken_in_by_the_same_few_operations() -> None:
    assert operations_of_arriving(400) == operations_of_arriving(20) < 200


def test_any_number_that_leaves_at_a_step_goes_by_the_same_few_operations() -> None:
    def operations(leaving: int) -> int:
        batch = StepBatch("cpu", WIDTH)
        arrive(batch, range(300))
        batch.apply(logits_of(300, 50))
        batch.remove(range(0, 2 * leaving, 2))
        with counted() as mode:
            batch.apply(logits_of(300, 50))
        return mode.calls

    assert operations(70) == operations(10) < 200


def test_after_a_burst_memory_and_work_are_of_the_requests_that_are_left() -> None:
    batch = StepBatch("cpu", WIDTH)
    arrive(batch, range(1024))
    batch.apply(logits_of(1024, 50))
    batch.remove(range(1024))
    batch.apply(logits_of(1, 50))
    assert batch.slots.capacity == LEAST_SLOTS
    arrive(batch, range(1024))
    batch.apply(logits_of(1024, 50))
    batch.remove(range(3, 1024))
    batch.apply(logits_of(3, 50))
    assert batch.slots.capacity == LEAST_SLOTS
    assert len(batch.slots.matches.window) == 3, "a step works on those alone"


def test_rows_that_did_not_ask_are_neither_read_nor_written() -> None:
    """Not a number among them would be seen in others, and -0.0 would become 0.0."""
    batch = StepBatch("cpu", WIDTH)
    logits = logits_of(5, 50)
    logits[0], logits[2], logits[4] = torch.nan, -0.0, torch.inf
    kept = logits.clone()
    batch.add(3, LZParameters(window=WIDTH, mode="distance"), [1, 2, 1])
    batch.add(1, ASKED, [7, 7, 7])
    batch.apply(logits)
    for row, output, asked in ((1, [7, 7, 7], ASKED), (3, [1, 2, 1], LZParameters(window=WIDTH, mode="distance"))):
        expected = penalise(kept[row : row + 1].clone(), torch.tensor([output]), asked)
        assert torch.equal(logits[row : row + 1], expected)
    for row in (0, 2, 4):
        assert logits[row].view(torch.int32).tolist() == kept[row].view(torch.int32).tolist()


def test_the_last_tokens_of_an_array_are_its_own_memory_and_of_a_list_a_copy() -> None:
    tokens = array("q", range(5000))
    assert numpy.shares_memory(last_tokens(tokens, 4096), numpy.frombuffer(tokens, dtype=numpy.int64))
    assert last_tokens(tokens, 3).tolist() == last_tokens(list(tokens), 3).tolist() == [4997, 4998, 4999]
    assert last_tokens(array("q"), 3).tolist() == []


# --- SGLang ------------------------------------------------------------------------------------------------------


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch, {SGLANG: SglangInterface}, "CustomLogitProcessor")
    return load("lz_penalty.sglang:LZSglangProcessor")


def test_a_client_without_sglang_names_the_processor_as_sglang_does(processor: Any) -> None:
    """SGLang's own `to_str` is `json.dumps({"callable": dill.dumps(cls).hex()})`."""
    assert json.loads(sglang_processor()) == {"callable": dill.dumps(processor).hex()}


def test_sglang_ends_a_request_whose_parameters_cannot_be_heeded(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what its scheduler reads at the end of a step; an error here would end the server."""
    module = SimpleNamespace(FINISH_ABORT=lambda *words: words)
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.managers.schedule_batch", module)
    request = SimpleNamespace(output_ids=array("q", [5, 5]), to_finish=None)
    logits = logits_of(1, 50)
    got = processor()(logits.clone(), [{"lz_window": 513, "__req__": request}])
    assert torch.equal(got, logits)
    assert request.to_finish[0] == "LZ penalty: lz_window is 513, not a whole number from 1 to 512"
    assert request.to_finish[1] == 400
