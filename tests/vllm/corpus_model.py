"""A tiny Llama with a tokenizer of its own, trained on Python's docstrings: greedy decoding runs in circles with it.

`python -m tests.vllm.corpus_model FOLDER` makes it, the same each time under one version of torch; and the file
`reference.json` beside it, which has the outputs that greedy decoding has to give: those of Hugging Face's `generate`
with `LZLogitsProcessor`, which are those of a loop over the penalty's definition in plain Python.
"""

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lz_penalty.parameters import LZParameters
from lz_penalty.reference import penalties
from lz_penalty.transformers import LZLogitsProcessor

STEPS, BATCH, STRETCH = 220, 12, 128
VOCABULARY = 2048
CASES = 40
ASKED: tuple[dict[str, object] | None, ...] = (
    None,
    {"lz_strength": 0.15},
    {"lz_strength": 0.35},
    {"lz_strength": 0.4, "lz_mode": "amortized"},
    {"lz_strength": 0.4, "lz_mode": "distance"},
    {"lz_strength": 0.5, "lz_min_match": 3},
    {"lz_strength": 0.3, "lz_window": 24, "lz_lookback": 4},
    {"lz_mode": "residual"},
)


def docstrings() -> list[str]:
    """Of the standard library."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module))
        texts += [text for node in nodes if (text := ast.get_docstring(node))]
    return texts


def tokenizer_of(texts: Sequence[str]) -> Any:
    """Byte pairs of these texts."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<bos>", "<user>", "<assistant>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    )
    found = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")
    found.chat_template = (
        "{% for m in messages %}{{ '<user>' if m['role'] != 'assistant' else '<assistant>' }}{{ m['content'] }}\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return found


def trained(tokens: torch.Tensor) -> Any:
    """A Llama of 0.8 million parameters after some steps."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=2048,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            tie_word_embeddings=False,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    for step in range(STEPS):
        at = torch.randint(0, len(tokens) - STRETCH - 1, (BATCH,))
        text = torch.stack([tokens[start : start + STRETCH] for start in at])
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * max(0.05, 1 - step / STEPS)
        model(text, labels=text).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = 1
    return model.eval()


def case(model: Any, prompt: list[int], asked: dict[str, object] | None, count: int) -> dict[str, object]:
    """A prompt, and what has to come of it."""
    parameters = LZParameters.of_request(asked)
    inputs = torch.tensor([prompt])
    with torch.no_grad():
        ours = [LZLogitsProcessor(parameters)] if parameters is not None else []
        whole = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=count,
            do_sample=False,
            logits_processor=ours,
        )
        said: list[int] = []
        past, feed = None, inputs
        while len(said) < count and said[-1:] != [model.config.eos_token_id]:
            step = model(feed, past_key_values=past, use_cache=True)
            past, row = step.past_key_values, step.logits[0, -1].float().clone()
            for token, less in (penalties(said, len(row), parameters) if parameters is not None else {}).items():
                row[token] -= less
            said.append(int(row.argmax()))
            feed = torch.tensor([said[-1:]])
    tokens = whole[0, len(prompt) :].tolist()
    return {"prompt": prompt, "asked": asked, "count": count, "tokens": tokens, "as_defined": tokens == said}


def main() -> None:
    """Make the model and the reference."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    texts = docstrings()
    tokenizer = tokenizer_of(texts)
    model = trained(torch.tensor([token for text in texts for token in [*tokenizer.encode(text), 1]]))
    draw = random.Random(1)
    cases = []
    for number in range(CASES):
        prompt = tokenizer.encode(draw.choice(texts))[: draw.choice([3, 5, 9, 17, 60, 150])] or [5]
        cases.append(case(model, prompt, ASKED[number % len(ASKED)], draw.choice([12, 40, 90, 160])))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Last of all: who finds it finds all.
    (folder / "reference.json").write_text(json.dumps(cases), encoding="utf-8")


if __name__ == "__main__":
    main()
