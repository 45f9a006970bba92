"""`python tiny_families.py FAMILY FOLDER`: a model of few random weights and a tokenizer of bytes, as a hub has it."""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

_COMMON: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": _COMMON | {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": _COMMON | _EXPERTS | {"head_dim": 8, "num_experts": 4},
    "deepseek_v3": _COMMON
    | _EXPERTS
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": _COMMON
    | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "rope_scaling": None},
}
_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_config(family: str) -> Any:
    """The configuration, as transformers has it."""
    return CONFIG_MAPPING[family](**FAMILIES[family])


def save_tokenizer(folder: Path) -> None:
    """A token for each byte, and a chat template whose turns are prefixes of one another."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)


def save_tiny(family: str, folder: Path, *, a_file: str = "1GB") -> Path:
    """Write model and tokenizer; the folder.

    Args:
        family: whose.
        folder: where to.
        a_file: how much a file of weights has at most.
    """
    save_tokenizer(folder)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(folder, max_shard_size=a_file)
    return folder


if __name__ == "__main__":
    save_tiny(sys.argv[1], Path(sys.argv[2]))
