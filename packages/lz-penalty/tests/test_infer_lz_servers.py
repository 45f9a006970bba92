"""The penalty under the interfaces of vLLM (both) and SGLang, as stubs call them."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from infer_lz_cases import logits_of
from infer_lz_servers import (
    SGLANG,
    V1,
    V2,
    BatchUpdate,
    Direction,
    RequestState,
    SglangInterface,
    V1Interface,
    V2Interface,
    context,
    install,
    load,
    params,
)
from torch import Tensor

from lz_penalty.parameters import LZParameters
from lz_penalty.penalty import penalise

NAME = "lz_penalty.vllm:LZVllmProcessor"
VOCABULARY = 12


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch, {V1: V1Interface, V2: V2Interface}, "LogitsProcessor")
    return load(NAME)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch, {SGLANG: SglangInterface}, "CustomLogitProcessor")
    return load("lz_penalty.sglang:LZSglangProcessor")()


def expected(logits: Tensor, outputs: list[list[int]], parameters: list[LZParameters | None]) -> Tensor:
    """The stateless penalty, row by row."""
    after = logits.clone()
    for row, (output, each) in enumerate(zip(outputs, parameters, strict=True)):
        if each is not None and output:
            penalise(after[row : row + 1], torch.tensor([output]), each)
    return after


@pytest.mark.parametrize("there", [{V1: V1Interface}, {V2: V2Interface}], ids=["V1 alone", "V2 alone"])
def test_one_class_is_of_whichever_interfaces_there_are(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, type]
) -> None:
    install(monkeypatch, there, "LogitsProcessor")
    assert issubclass(load(NAME), *there.values())


def test_one_class_is_of_both_interfaces(vllm: Any) -> None:
    assert issubclass(vllm, V1Interface)
    assert issubclass(vllm, V2Interface)
    assert not vllm.is_argmax_invariant(vllm(None, torch.device("cpu"), False))


@pytest.mark.parametrize("name", [NAME, "lz_penalty.sglang:LZSglangProcessor"])
def test_without_the_server_the_import_says_what_is_missing(name: str) -> None:
    with pytest.raises(ImportError, match="LZ penalty: no "):
        load(name)


def test_a_request_that_asks_for_nonsense_is_refused_before_it_is_let_in(vllm: Any) -> None:
    vllm.validate_params(params())
    vllm.validate_params(params(lz_strength=0.2, something_else="x"))
    for wrong, said in (
        ({"lz_strength": -1}, "strength"),
        ({"lz_wndow": 3}, "lz_wndow"),
        ({"lz_window": 600}, "lz_window is 600, not a whole number from 1 to 512"),
    ):
        with pytest.raises(ValueError, match=said):
            vllm.validate_params(params(**wrong))


def ask(draw: random.Random) -> dict[str, object]:
    """Parameters of a request, if it has any."""
    if draw.random() < 0.3:
        return {}
    mode = draw.choice(["residual", "amortized", "distance"])
    return {"lz_strength": draw.choice([0.15, 0.6]), "lz_mode": mode, "lz_window": draw.choice([5, 64])}


def test_a_v1_batch_that_changes_all_the_time_is_penalised_row_by_row(vllm: Any) -> None:
    """Requests come, end, move and swap; an output may have a placeholder at its end, or have come back longer."""
    draw = random.Random(11)
    processor = vllm(SimpleNamespace(), torch.device("cpu"), False)
    rows: list[tuple[dict[str, object], list[int]]] = []
    for step in range(90):
        update, rows = change(draw, rows)
        processor.update_state(update)
        for _, output in rows:
            output.extend(draw.randrange(3) for _ in range(draw.choice([0, 1, 1, 1, 1, 2, 30]) if step else 1))
        logits = logits_of(len(rows), VOCABULARY, step)
        late = [draw.random() < 0.1 for _ in rows]
        for (_, output), waits in zip(rows, late, strict=True):
            output.extend([-1] if waits else [])
        known = [[token for token in output if token >= 0] for _, output in rows]
        parameters = [LZParameters.of_request(asked) for asked, _ in rows]
        assert torch.equal(processor.apply(logits.clone()), expected(logits, known, parameters))
        for (_, output), waits in zip(rows, late, strict=True):
            if waits:
                output[-1] = draw.randrange(3)


def change(
    draw: random.Random, rows: list[tuple[dict[str, object], list[int]]]
) -> tuple[BatchUpdate | None, list[tuple[dict[str, object], list[int]]]]:
    """Some change of a V1 batch, and the batch after it."""
    rows = list(rows)
    match draw.choice(["none", "none", "add", "add", "condense", "replace", "swap"]):
        case "add" if len(rows) < 9:
            rows.append((ask(draw), [draw.randrange(3) for _ in range(draw.choice([0, 0, 6]))]))
            asked, output = rows[-1]
            return BatchUpdate(len(rows), added=[(len(rows) - 1, params(**asked), [1, 2], output)]), rows
        case "condense" if len(rows) > 1:
            gone, last = draw.randrange(len(rows)), len(rows) - 1
            moved = [(last, gone, Direction.UNIDIRECTIONAL)] if gone != last else []
            rows[gone] = rows[last]
            return BatchUpdate(last, removed=[gone], moved=moved), rows[:last]
        case "replace" if rows:
            at = draw.randrange(len(rows))
            rows[at] = (ask(draw), [])
            return BatchUpdate(len(rows), added=[(at, params(**rows[at][0]), None, rows[at][1])]), rows
        case "swap" if len(rows) > 1:
            first, second = draw.sample(range(len(rows)), 2)
            rows[first], rows[second] = rows[second], rows[first]
            return BatchUpdate(len(rows), moved=[(first, second, Direction.SWAP)]), rows
    if not rows:
        rows = [({"lz_strength": 0.15}, [])]
        return BatchUpdate(1, added=[(0, params(**rows[0][0]), None, rows[0][1])]), rows
    return None, rows


def test_v2_rows_are_penalised_by_the_tokens_of_their_slots(vllm: Any) -> None:
    draw = random.Random(12)
    state = RequestState(max_num_reqs=5, most_tokens=200, vocab_size=VOCABULARY)
    processor = vllm(SimpleNamespace(), state)
    tokens = {slot: [draw.randrange(3) for _ in range(draw.randint(1, 80))] for slot in range(5)}
    asked = {slot: ask(draw) if slot else {"lz_strength": 0.3} for slot in range(5)}
    prompts = {slot: draw.randint(0, len(tokens[slot])) for slot in range(5)}
    for slot in range(5):
        assert processor.add_request(slot, params(**asked[slot])) == bool(asked[slot])
        state.prompt_len.gpu[slot] = prompts[slot]
        state.all_token_ids.gpu[slot, : len(tokens[slot])] = torch.tensor(tokens[slot], dtype=torch.int32)
    processor.apply_staged_writes()
    order = [3, 0, 4, 1]
    logits = logits_of(4, VOCABULARY)
    ctx = context([(slot, 0, tokens[slot][-1], len(tokens[slot]) - 1) for slot in order])
    outputs = [tokens[slot][prompts[slot] :] for slot in order]
    wanted = expected(logits, outputs, [LZParameters.of_request(asked[slot]) for slot in order])
    assert torch.equal(processor.apply(logits.clone(), ctx), wanted)


def test_v2_draft_tokens_are_seen_by_the_rows_behind_them(vllm: Any) -> None:
    state = RequestState(max_num_reqs=2, most_tokens=50, vocab_size=VOCABULARY)
    processor = vllm(SimpleNamespace(), state)
    processor.add_request(0, params(lz_strength=0.5))
    processor.add_request(1, params(lz_strength=0.5))
    committed, drafts = [9, 1, 2, 3, 1, 2], [3, 1]
    for slot in range(2):
        state.all_token_ids.gpu[slot, :6] = torch.tensor(committed, dtype=torch.int32)
        state.prompt_len.gpu[slot] = 1
    rows = [(0, 0, 2, 5), (1, 0, 2, 5), (1, 1, drafts[0], 6), (1, 2, drafts[1], 7)]
    logits = logits_of(4, VOCABULARY)
    outputs = [committed[1:], committed[1:], [*committed[1:], 3], [*committed[1:], 3, 1]]
    got = processor.apply(logits.clone(), context(rows))
    assert torch.equal(got, expected(logits, outputs, [LZParameters(strength=0.5)] * 4))


def test_a_v2_slot_that_another_request_gets_forgets_the_first(vllm: Any) -> None:
    state = RequestState(max_num_reqs=1, most_tokens=50, vocab_size=VOCABULARY)
    processor = vllm(SimpleNamespace(), state)
    processor.add_request(0, params(lz_strength=0.5))
    assert not processor.add_request(0, params())
    logits = logits_of(1, VOCABULARY)
    assert torch.equal(processor.apply(logits.clone(), context([(0, 0, 7, 5)])), logits)


def test_sglang_requests_are_penalised_by_their_output(sglang: Any, caplog: pytest.LogCaptureFixture) -> None:
    outputs = [[1, 2, 1, 2, 1], [4, 4, 4], [], [5, 5]]
    asked: list[dict[str, Any]] = [
        {"lz_strength": 0.5, "lz_min_match": 2},
        {},
        {"lz_strength": 0.15},
        {"lz_mode": "loud"},
    ]
    given = [
        each | {"__req__": SimpleNamespace(origin_input_ids=[1, 1, 1], output_ids=output)}
        for each, output in zip(asked, outputs, strict=True)
    ]
    logits = logits_of(4, VOCABULARY)
    parameters = [LZParameters.of_request(each) for each in asked[:3]] + [None]
    assert torch.equal(sglang(logits.clone(), given), expected(logits, outputs, parameters))
    assert "mode is 'loud'" in caplog.text, "what is wrong is told, as an error would end the server"
    assert torch.equal(sglang(logits.clone(), None), logits)
