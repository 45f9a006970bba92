"""Facts from a `config.json`, compared with transformers' models and torch's counts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scripts.tiny_families import FAMILIES, tiny_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from regrow.core.errors import UsageError
from regrow_recipes.recipes.facts import model_facts, refusal, short

REAL: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "recipe_configs.json").read_text())
"""Sizes of public models, and how many parameters transformers 5.23 makes of them on the meta device."""


@pytest.mark.parametrize("name", REAL)
def test_parameters_of_real_models_are_exact(name: str) -> None:
    facts = model_facts(REAL[name]["config"])
    assert (facts.parameters, facts.active) == (REAL[name]["parameters"], REAL[name]["active"])


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_flops_of_tiny_models_are_those_of_torch(family: str) -> None:
    config = tiny_config(family)
    config._attn_implementation = config._experts_implementation = "eager"
    facts = model_facts(config.to_dict())
    model = AutoModelForCausalLM.from_config(config)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    length = 16  # GPT-OSS's window: beyond it, eager attention computes what nobody sees
    tokens = torch.randint(0, 260, (1, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    ours = facts.flops_per_token(length) * length
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_every_family_have_as_many_parameters_as_said(family: str) -> None:
    from peft import LoraConfig, get_peft_model

    facts = model_facts(tiny_config(family).to_dict())
    targets = facts.targets("auto")
    model: Any = AutoModelForCausalLM.from_config(tiny_config(family))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert trained == facts.adapter_parameters(targets, 4) > 0


def test_unknown_families_targets_and_quantized_weights_are_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="there are no recipes for models of the type qwen4 .did you mean qwen"):
        model_facts({"model_type": "qwen4"})
    with pytest.raises(UsageError, match="has no 'hidden_size'"):
        model_facts({"model_type": "llama"})
    with pytest.raises(UsageError, match="llama models cannot have an adapter on q_prj .did you mean q_proj"):
        model_facts(REAL["llama-3.1-8b"]["config"]).targets(["q_prj"])
    assert "dequantize" in refusal({"quantization_config": {"quant_method": "mxfp4"}})
    assert refusal({}) == ""


@pytest.mark.parametrize(
    ("number", "text"), [(8030261248, "8.03B"), (671e9, "671B"), (1.5e15, "1500T"), (32160, "32.16k")]
)
def test_numbers_are_short(number: float, text: str) -> None:
    assert short(number) == text
