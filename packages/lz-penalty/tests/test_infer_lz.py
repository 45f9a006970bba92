"""All forms of the LZ penalty are one: plain Python, stateless, and with a state."""

import random
from math import log2
from typing import Any

import pytest
import torch
from infer_lz_cases import Case, assert_close, cases, logits_of, taken

from lz_penalty.matches import Matches, window_of
from lz_penalty.parameters import MODES, LZParameters, Mode
from lz_penalty.penalty import LZPenalty, penalise
from lz_penalty.reference import costs, penalties
from lz_penalty.reference import match_lengths as lengths_of
from lz_penalty.rows import RowParameters

BATCHES = list(cases(seed=1, batches=100))


def stateless(case: Case) -> torch.Tensor:
    return penalise(case.logits.clone(), case.padded(), case.parameters, ends=case.ends())


def incremental(case: Case) -> torch.Tensor:
    """Token by token; sequences that are shorter wait for the others."""
    penalty = LZPenalty(case.parameters)
    for step in range(max(map(len, case.histories))):
        active = [step < len(history) for history in case.histories]
        tokens = [history[step] if going else 0 for history, going in zip(case.histories, active, strict=True)]
        penalty.push(torch.tensor(tokens), None if all(active) else torch.tensor(active))
    return penalty.apply(case.logits.clone())


def test_there_are_a_thousand_cases_of_all_kinds() -> None:
    rows = [row for case in BATCHES for row in zip(case.histories, case.parameters, strict=True)]
    assert len(rows) >= 1000
    assert {parameters.mode for _, parameters in rows if parameters is not None} == set(MODES)
    assert any(parameters is None for _, parameters in rows)
    assert any(not history for history, _ in rows)
    assert sum(max(lengths_of(history, 256), default=0) > 8 for history, _ in rows) > 200, "hardly any history loops"


def test_both_torch_forms_take_what_the_reference_takes() -> None:
    compared = 0
    for case in BATCHES:
        expected = torch.zeros_like(case.logits)
        for row, (history, parameters) in enumerate(zip(case.histories, case.parameters, strict=True)):
            for token, penalty in penalties(history, case.vocabulary, parameters).items() if parameters else ():
                expected[row, token] = penalty
            compared += 1
        alone, carried = stateless(case), incremental(case)
        assert_close(taken(case, alone), expected)
        assert torch.equal(alone, carried), "with a state it is the same, bit by bit"
    assert compared >= 1000


def test_the_state_gives_the_same_at_every_step() -> None:
    for case in cases(seed=2, batches=6, longest=60):
        steps = min(len(history) for history in case.histories)
        penalty = LZPenalty(case.parameters)
        for step in range(steps):
            penalty.push(torch.tensor([history[step] for history in case.histories]))
            so_far = torch.tensor([history[: step + 1] for history in case.histories])
            expected = penalise(case.logits.clone(), so_far, case.parameters)
            assert torch.equal(penalty.apply(case.logits.clone()), expected)


def test_a_state_that_starts_in_the_middle_goes_on_as_one_that_saw_all() -> None:
    for case in cases(seed=3, batches=10, longest=80):
        steps = min(len(history) for history in case.histories)
        tokens = torch.tensor([history[:steps] for history in case.histories]).reshape(len(case.histories), steps)
        late = LZPenalty(case.parameters)
        late.restart(tokens[:, : steps // 2])
        for step in range(steps // 2, steps):
            late.push(tokens[:, step])
        assert torch.equal(late.apply(case.logits.clone()), penalise(case.logits.clone(), tokens, case.parameters))


def test_a_row_given_to_another_sequence_forgets_the_first() -> None:
    first, second = LZParameters(window=16), LZParameters(window=8, mode="distance")
    penalty = LZPenalty([first, first], width=16)
    penalty.restart(torch.tensor([[1, 2, 1, 2, 1, 2]] * 2))
    penalty.replace(1, second, [5, 6, 5])
    logits = logits_of(2, 10)
    expected = logits.clone()
    penalise(expected[:1], torch.tensor([[1, 2, 1, 2, 1, 2]]), first)
    penalise(expected[1:], torch.tensor([[5, 6, 5]]), second)
    assert torch.equal(penalty.apply(logits), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_another_type_are_rounded_once(mode: Mode, dtype: torch.dtype) -> None:
    parameters = LZParameters(mode=mode, min_match=2)
    history = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2], [4, 4, 4, 4, 5, 4, 4, 4]])
    logits = logits_of(2, 8).to(dtype)
    expected = penalise(logits.to(torch.float32), history, parameters).to(dtype)
    torch.testing.assert_close(penalise(logits, history, parameters), expected)


def test_a_token_that_may_not_come_stays_so_and_others_are_not_touched() -> None:
    logits = torch.full((1, 10), -torch.inf)
    logits[0, 7] = 1.0
    penalise(logits, torch.tensor([[1, 2, 1, 2, 1]]), LZParameters())
    assert logits[0].tolist() == [-torch.inf] * 7 + [1.0] + [-torch.inf] * 2


def test_tokens_beyond_the_logits_are_passed_over() -> None:
    logits = logits_of(1, 4)
    before = logits.clone()
    penalise(logits, torch.tensor([[2, 9, 2, 9]]), LZParameters())
    expected = penalties([2, 9, 2, 9], 4, LZParameters())
    assert set(expected) == {2}
    assert_close((before - logits)[0], torch.tensor([0, 0, expected[2], 0]))


WORKED: list[tuple[Mode, dict[int, float]]] = [
    ("residual", {1: log2(2), 2: log2(1), 3: log2((1 * 4) / (2 * 3)) - 1}),
    ("amortized", {1: log2(3), 2: log2(2), 3: (log2(4) + log2(3)) / 3}),
    ("distance", {1: log2(2), 2: log2(1), 3: log2(3)}),
]
"""By hand, for the window 1 2 3 1 2 and 16 tokens: 3 extends the match (l=2, d=3) that 1 2 makes."""


@pytest.mark.parametrize("mode, bits", WORKED)
def test_the_reference_gives_what_was_worked_out_by_hand(mode: Mode, bits: dict[int, float]) -> None:
    assert costs([1, 2, 3, 1, 2], 16, LZParameters(mode=mode)) == pytest.approx(bits)


def test_the_longest_match_counts_and_of_those_as_long_the_nearest() -> None:
    window = [1, 2, 8, 5, 1, 2, 8, 6, 9, 2, 8, 7, 1, 2, 8]
    assert max(lengths_of(window, 32)) == 3
    in_residual = costs(window, 1024, LZParameters())
    # Both 5 and 6 extend a match of three tokens. 6 is the nearer, 8 tokens back; 7 extends a shorter one.
    extended = log2((3 - 1) * (8 + 1) / (3 * 8)) - 1
    assert in_residual[5] == in_residual[6] == pytest.approx(extended)
    assert in_residual[7] == log2(len(window) - 11)


def test_a_least_match_leaves_single_repetitions_alone() -> None:
    history = [1, 2, 3, 4, 1, 2, 3]
    assert set(penalties(history, 64, LZParameters())) == {1, 2, 3, 4}
    assert set(penalties(history, 64, LZParameters(min_match=4))) == {4}
    assert penalties(history, 64, LZParameters(min_match=5)) == {}


def test_no_repetition_is_rewarded_however_small_the_vocabulary() -> None:
    history = [0, 1, 1, 0, 1] * 20
    for mode in MODES:
        assert all(penalty >= 0 for penalty in penalties(history, 2, LZParameters(mode=mode)).values())


def test_windows_are_cut_out_of_histories_that_start_and_end_where_they_like() -> None:
    history = torch.arange(12).reshape(2, 6)
    assert window_of(history, 3).tolist() == [[3, 4, 5], [9, 10, 11]]
    assert window_of(history, 4, starts=3).tolist() == [[-1, 3, 4, 5], [-1, 9, 10, 11]]
    ends, starts = torch.tensor([2, 5]), torch.tensor([0, 4])
    assert window_of(history, 3, ends=ends, starts=starts).tolist() == [[-1, 0, 1], [-1, -1, 10]]
    assert window_of(history[:, :0], 2).tolist() == [[-1, -1], [-1, -1]]


def test_carried_windows_and_lengths_are_those_that_are_found_anew_and_what_is_known_of_them_is_so() -> None:
    rows = RowParameters.of([LZParameters(window=8), LZParameters(window=5, lookback=3)])
    draw = random.Random(5)
    matches, tokens = Matches.empty(2, 8), torch.empty((2, 0), dtype=torch.int64)
    for step in range(200):
        new = torch.tensor([draw.randrange(2), draw.randrange(2)])
        matches.push(new, rows)
        tokens = torch.cat((tokens, new.unsqueeze(1)), dim=1)
        anew = Matches.found(window_of(tokens, 8), rows)
        assert torch.equal(matches.window, anew.window) and torch.equal(matches.lengths, anew.lengths)
        assert matches.filled == anew.filled == min(step + 1, 8)
        assert matches.most == int(tokens.amax())
    assert int(matches.lengths.amax()) > 3
    matches.push(torch.tensor([-1, 0]), rows)
    assert matches.filled is None, "what is no token is not looked up"
    assert Matches.found(window_of(torch.tensor([[1, 2], [3, -1]]), 8), rows).filled is None


@pytest.mark.parametrize(
    "parameters, said",
    [
        ({"mode": "loud"}, "mode is 'loud'"),
        ({"strength": -1.0}, "strength is -1.0"),
        ({"strength": float("nan")}, "strength is nan"),
        ({"strength": True}, "strength is True"),
        ({"window": 0}, "window is 0"),
        ({"window": 1e6}, "window is"),
        ({"lookback": 300}, "lookback is 300"),
        ({"min_match": 0}, "min_match is 0"),
    ],
)
def test_a_value_out_of_range_is_named(parameters: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LZParameters(**parameters)  # type: ignore[arg-type]


def test_a_request_says_what_it_wants_and_a_name_that_means_nothing_is_refused() -> None:
    assert LZParameters.of_request(None) is None
    assert LZParameters.of_request({"top_k": 3}) is None
    asked = {"lz_strength": 0.3, "lz_min_match": 4.0, "lz_mode": "distance", "other": 1}
    assert LZParameters.of_request(asked) == LZParameters(strength=0.3, min_match=4, mode="distance")
    with pytest.raises(ValueError, match="no parameter is called lz_strenght"):
        LZParameters.of_request({"lz_strenght": 0.3})


def test_shapes_that_do_not_fit_are_refused() -> None:
    logits, history = logits_of(2, 8), torch.zeros((3, 4), dtype=torch.int64)
    for wrong in (
        lambda: penalise(logits, history, LZParameters()),
        lambda: penalise(logits[0], history, LZParameters()),
        lambda: penalise(logits, history[:2], [LZParameters()]),
        lambda: RowParameters.of([LZParameters(window=9)], width=8),
    ):
        with pytest.raises(ValueError, match="LZ penalty"):
            wrong()


def test_a_penalty_touches_no_more_than_the_window_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass over the vocabulary: operations see at most what the window has, or the logits for a scatter."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made: list[int] = []

    class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.data_ptr() != logits.data_ptr():
                made.append(out.numel())
            assert "item" not in str(func) and "nonzero" not in str(func), "the host would wait for the device"
            return out

    logits, width = logits_of(2, 100_000), 32
    for mode in MODES:
        penalty = LZPenalty([LZParameters(mode=mode, window=width, min_match=2)] * 2)
        penalty.restart(torch.arange(400).reshape(2, 200) % 7)
        with Sizes():  # type: ignore[no-untyped-call]
            penalty.push(torch.tensor([3, 4]))
            penalty.apply(logits)
    assert max(made) <= 2 * 2 * width, "of two rows, or of memory for twice as many columns"


def test_padding_by_ends_is_never_read() -> None:
    alone = penalise(logits_of(1, 9), torch.tensor([[1, 2, 1]]), LZParameters())
    padded = penalise(logits_of(1, 9), torch.tensor([[1, 2, 1, 7, 7]]), LZParameters(), ends=torch.tensor([3]))
    assert torch.equal(alone, padded)
