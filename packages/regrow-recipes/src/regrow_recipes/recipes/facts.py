"""Computes sizes from a model's `config.json` without loading it: parameters, FLOPs a token, modules for adapters.

FLOPs are those of PaLM's appendix B: 6 for each weight of a matrix product and token, and 6 for each head, position and
dimension of queries and values; causal attention is not halved, and recomputation is not counted.
"""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from regrow.core.errors import UsageError

Config = Mapping[str, Any]
Shape = tuple[int, int]


class LayerFacts(msgspec.Struct, frozen=True):
    """One decoder layer.

    Attributes:
        linears: matrices that multiply every token, by module name: (inputs, outputs).
        rest: parameters outside matrix products: norms, biases, sinks.
        experts: their number; 0: none.
        expert: parameters of each expert.
        expert_rest: those of them outside matrix products.
        chosen: number of experts for each token.
        window: most positions that a token attends to; None: all before it.
        attention: heads times the dimensions of a query and of a value.
    """

    linears: dict[str, Shape]
    rest: int
    attention: int
    experts: int = 0
    expert: int = 0
    expert_rest: int = 0
    chosen: int = 0
    window: int | None = None

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self._dense + self.rest + self.experts * self.expert

    @property
    def active(self) -> int:
        """Parameters that are used for a token."""
        return self._dense + self.rest + self.chosen * self.expert

    @property
    def multiplied(self) -> int:
        """Parameters that multiply a token."""
        return self._dense + self.chosen * (self.expert - self.expert_rest)

    @property
    def _dense(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.linears.values())


class ModelFacts(msgspec.Struct, frozen=True):
    """A model's sizes."""

    family: str
    hidden: int
    vocabulary: int
    tied: bool
    layers: list[LayerFacts]

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return self._ends + sum(layer.parameters for layer in self.layers)

    @property
    def active(self) -> int:
        """Parameters that are used for a token, embedding and head included."""
        return self._ends + sum(layer.active for layer in self.layers)

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer, which FSDP gathers at once."""
        ends = self.hidden * self.vocabulary * (1 if self.tied else 2)
        return max(ends, *(layer.parameters for layer in self.layers))

    @property
    def _ends(self) -> int:
        return self.hidden * self.vocabulary * (1 if self.tied else 2) + self.hidden

    def flops_per_token(self, length: int, *, frozen: bool = False) -> float:
        """FLOPs of a forward and a backward pass a token, in a document of `length` tokens.

        Args:
            length: of the document.
            frozen: the weights have no gradients, so the backward pass costs as much as the forward pass.
        """
        weights = self.hidden * self.vocabulary + sum(layer.multiplied for layer in self.layers)
        seen = sum(layer.attention * min(length, layer.window or length) for layer in self.layers)
        return (4.0 if frozen else 6.0) * weights + 6.0 * seen

    def targets(self, given: "list[str] | str") -> list[str]:
        """The modules that get an adapter; `auto`: attention, and MLPs if no layer has experts.

        In layers with experts, peft matches an MLP's name in each expert.

        Raises:
            UsageError: the model has no such module.
        """
        left_out = {*_ROUTERS, *(_MLP if any(layer.experts for layer in self.layers) else ())}
        known = sorted({name for layer in self.layers for name in layer.linears if name not in left_out})
        if isinstance(given, str):
            return known
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                did = f"did you mean {near[0]}? " if near else ""
                cause = f"lora.targets: {self.family} models cannot have an adapter on {name}"
                raise UsageError(cause, hint=f"{did}give one of {', '.join(known)}")
        return list(given)

    def adapter_parameters(self, targets: list[str], rank: int) -> int:
        """Parameters of an adapter of that rank."""
        shapes = (layer.linears.get(name) for layer in self.layers for name in targets)
        return sum(rank * (shape[0] + shape[1]) for shape in shapes if shape is not None)


def model_facts(config: Config) -> ModelFacts:
    """The sizes of the model in a `config.json`.

    Raises:
        UsageError: the model family is not supported, or a size is missing.
    """
    family = str(config.get("model_type", ""))
    if family not in _LAYERS:
        near = difflib.get_close_matches(family, list(_LAYERS), n=1)
        did = f"did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"there are no recipes for models of the type {family or '(none is named)'}",
            hint=f"{did}recipes train {', '.join(_LAYERS)}; train others with your own script",
        )
    try:
        layers = list(_LAYERS[family](config))
        return ModelFacts(
            family=family,
            hidden=int(config["hidden_size"]),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            layers=layers,
        )
    except KeyError as missing:
        raise UsageError(f"the model's config has no {missing}", hint="take the config.json of the model") from None


def refusal(config: Config) -> str:
    """Reason why the weights of this folder cannot be trained as they are; empty: they can."""
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "") if isinstance(quantized, Mapping) else ""
        return f"its weights are quantized ({method}), and gradients need them whole: dequantize the folder first"
    return ""


def preloads(family: str) -> list[str]:
    """Modules that every worker of such a training imports."""
    return [f"transformers.models.{family}.modeling_{family}", "regrow_recipes.recipes.training"]


# --- families ------------------------------------------------------------------------------------------------------


def _heads(config: Config) -> tuple[int, int, int]:
    heads = int(config["num_attention_heads"])
    kept = int(config.get("num_key_value_heads") or heads)
    return heads, kept, int(config.get("head_dim") or int(config["hidden_size"]) // heads)


def _projections(config: Config) -> dict[str, Shape]:
    hidden = int(config["hidden_size"])
    heads, kept, size = _heads(config)
    return {
        "q_proj": (hidden, heads * size),
        "k_proj": (hidden, kept * size),
        "v_proj": (hidden, kept * size),
        "o_proj": (heads * size, hidden),
    }


def _mlp(hidden: int, inner: int) -> dict[str, Shape]:
    return {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}


def _outputs(linears: Mapping[str, Shape], *names: str) -> int:
    return sum(linears[name][1] for name in names)


def _dense(config: Config, *, biased: tuple[str, ...], normed: bool) -> Iterator[LayerFacts]:
    hidden = int(config["hidden_size"])
    heads, _, size = _heads(config)
    linears = _projections(config) | _mlp(hidden, int(config["intermediate_size"]))
    if config.get("mlp_bias"):
        biased += ("gate_proj", "up_proj", "down_proj")
    rest = 2 * hidden + _outputs(linears, *biased) + (2 * size if normed else 0)
    for window in _windows(config):
        yield LayerFacts(linears, rest, heads * 2 * size, window=window)


def _llama(config: Config) -> Iterator[LayerFacts]:
    return _dense(config, biased=_ALL if config.get("attention_bias") else (), normed=False)


def _qwen2(config: Config) -> Iterator[LayerFacts]:
    return _dense(config, biased=_ALL[:3], normed=False)


def _qwen3(config: Config) -> Iterator[LayerFacts]:
    return _dense(config, biased=_ALL if config.get("attention_bias") else (), normed=True)


def _qwen3_moe(config: Config) -> Iterator[LayerFacts]:
    hidden, inner = int(config["hidden_size"]), int(config["moe_intermediate_size"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    sparse_step, dense_ones = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
    for number, layer in enumerate(_qwen3(config)):
        if number in dense_ones or not experts or (number + 1) % sparse_step:
            yield layer
            continue
        yield msgspec.structs.replace(
            layer,
            linears=_projections(config) | {"gate": (hidden, experts)},
            experts=experts,
            expert=3 * hidden * inner,
            chosen=int(config["num_experts_per_tok"]),
        )


def _deepseek_v3(config: Config) -> Iterator[LayerFacts]:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    plain, turned = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    value, kept = int(config["v_head_dim"]), int(config["kv_lora_rank"])
    lowered = config.get("q_lora_rank")
    queries: dict[str, Shape] = {"q_proj": (hidden, heads * (plain + turned))}
    rest = 2 * hidden + kept
    if lowered:
        queries = {"q_a_proj": (hidden, int(lowered)), "q_b_proj": (int(lowered), heads * (plain + turned))}
        rest += int(lowered)
    attention = queries | {
        "kv_a_proj_with_mqa": (hidden, kept + turned),
        "kv_b_proj": (kept, heads * (plain + value)),
        "o_proj": (heads * value, hidden),
    }
    if config.get("attention_bias"):
        rest += _outputs(attention, "kv_a_proj_with_mqa", "o_proj") + (int(lowered) if lowered else 0)
    seen = heads * (plain + turned + value)
    inner, experts = int(config["moe_intermediate_size"]), int(config["n_routed_experts"])
    for number in range(int(config["num_hidden_layers"])):
        if number < int(config.get("first_k_dense_replace", 0)):
            yield LayerFacts(attention | _mlp(hidden, int(config["intermediate_size"])), rest, seen)
            continue
        shared = _mlp(hidden, inner * int(config.get("n_shared_experts") or 1))
        yield LayerFacts(
            attention | shared | {"gate": (hidden, experts)},
            rest,
            seen,
            experts=experts,
            expert=3 * hidden * inner,
            chosen=int(config["num_experts_per_tok"]),
        )


def _gpt_oss(config: Config) -> Iterator[LayerFacts]:
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    experts = int(config.get("num_local_experts") or config["num_experts"])
    heads, _, size = _heads(config)
    projections = _projections(config)
    for window in _windows(config):
        yield LayerFacts(
            projections | {"router": (hidden, experts)},
            2 * hidden + _outputs(projections, *_ALL) + experts + heads,
            heads * 2 * size,
            experts=experts,
            expert=3 * hidden * inner + 2 * inner + hidden,
            expert_rest=2 * inner + hidden,
            chosen=int(config["num_experts_per_tok"]),
            window=window,
        )


def _windows(config: Config) -> list[int | None]:
    count, width = int(config["num_hidden_layers"]), config.get("sliding_window")
    kinds = config.get("layer_types") or ["full_attention"] * count
    return [int(width) if kind == "sliding_attention" and width else None for kind in kinds[:count]]


_ALL: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")
_ROUTERS: Final = ("gate", "router")
_LAYERS: Final[dict[str, Callable[[Config], Iterator[LayerFacts]]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}


def short(number: float) -> str:
    """Format 8,030,261,248 as 8.03B."""
    for power, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= power:
            return f"{number / power:.{2 if number / power < 100 else 0}f}{letter}"
    return f"{math.floor(number)}"
