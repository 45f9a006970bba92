"""The penalty under transformers' own `generate`, with a tiny model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from infer_lz_cases import logits_of
from torch import Tensor

from lz_penalty.parameters import LZParameters
from lz_penalty.penalty import penalise

transformers: Any = pytest.importorskip(
    "transformers", reason="needs transformers: pip install 'regrow-recipes[trainer]'"
)

from lz_penalty.transformers import LZLogitsProcessor  # noqa: E402

VOCABULARY = 40
STRONG = LZParameters(strength=0.5)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield transformers.LlamaForCausalLM(config).eval()


class Stateless(transformers.LogitsProcessor):  # type: ignore[misc]
    """Reference for the processor: the penalty of the tokens after the prompt, found anew."""

    def __init__(self, prompt: int, parameters: LZParameters) -> None:
        self.prompt, self.parameters = prompt, parameters

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return penalise(scores.clone(), input_ids, self.parameters, starts=self.prompt)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampled"])
def test_generate_gives_what_the_penalty_of_its_tokens_gives(model: Any, how: dict[str, Any]) -> None:
    prompts = torch.tensor([[3, 4, 5, 6], [7, 7, 7, 7]])

    def output(processor: Any) -> Tensor:
        torch.manual_seed(7)
        processors = [processor] if processor is not None else []
        generated: Tensor = model.generate(prompts, max_new_tokens=40, logits_processor=processors, **how)
        return generated

    ours = output(LZLogitsProcessor(STRONG))
    assert torch.equal(ours, output(Stateless(4, STRONG)))
    assert not torch.equal(ours, output(None))


def test_a_processor_that_is_used_again_knows_the_new_prompt(model: Any) -> None:
    processor = LZLogitsProcessor(STRONG)
    for prompt in (torch.tensor([[3, 4, 5]]), torch.tensor([[9, 9, 9, 9, 9, 9]]), torch.tensor([[3, 4]])):
        again = model.generate(prompt, max_new_tokens=20, logits_processor=[processor])
        once = model.generate(prompt, max_new_tokens=20, logits_processor=[LZLogitsProcessor(STRONG)])
        assert torch.equal(again, once)


def test_candidates_that_are_taken_back_are_forgotten() -> None:
    """As in assisted decoding: tokens are tried, and some of them dropped."""
    processor, stateless = LZLogitsProcessor(STRONG), Stateless(3, STRONG)
    prompt, said = [1, 2, 3], [5, 6, 5, 6, 5, 6, 9, 9, 5, 6]
    for length in (0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 7):
        tokens, scores = torch.tensor([prompt + said[:length]]), logits_of(1, VOCABULARY, length)
        assert torch.equal(processor(tokens, scores), stateless(tokens, scores))


def test_the_scores_it_is_given_stay_as_they_are() -> None:
    processor, scores = LZLogitsProcessor(STRONG), logits_of(1, VOCABULARY)
    before = scores.clone()
    processor(torch.tensor([[1, 2]]), scores)
    assert not torch.equal(processor(torch.tensor([[1, 2, 3]]), scores), before)
    assert torch.equal(scores, before)


def test_the_prompt_counts_where_it_is_asked_for() -> None:
    tokens, scores = torch.tensor([[1, 2, 1, 2, 1]]), logits_of(1, VOCABULARY)
    assert torch.equal(LZLogitsProcessor(STRONG)(tokens, scores), scores)
    assert torch.equal(
        LZLogitsProcessor(STRONG, include_prompt=True)(tokens, scores), Stateless(0, STRONG)(tokens, scores)
    )
    assert torch.equal(LZLogitsProcessor(STRONG, prompt_length=2)(tokens, scores), Stateless(2, STRONG)(tokens, scores))


def test_beams_share_the_parameters_of_their_sequence() -> None:
    parameters = [STRONG, None]
    tokens, scores = torch.tensor([[1, 2, 1]] * 4), logits_of(1, VOCABULARY).repeat(4, 1)
    after = LZLogitsProcessor(parameters, include_prompt=True)(tokens, scores)
    expected = Stateless(0, STRONG)(tokens, scores)
    assert torch.equal(after[:2], expected[:2])
    assert torch.equal(after[2:], scores[2:])
    with pytest.raises(ValueError, match="2 parameters do not fit a batch of 3"):
        LZLogitsProcessor(parameters)(tokens[:3], scores[:3])


def test_continuous_batching_is_refused() -> None:
    processors = transformers.LogitsProcessorList([LZLogitsProcessor(STRONG)])
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

    assert not ContinuousBatchingLogitsProcessorList(processors).do_processing, "transformers drops it, with a warning"
    with pytest.raises(ValueError, match="Continuous batching hands over last tokens only"):
        LZLogitsProcessor(STRONG)(torch.tensor([1, 2]), logits_of(2, VOCABULARY))
