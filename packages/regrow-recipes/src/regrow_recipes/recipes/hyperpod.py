"""Converts HyperPod's recipes to regrow's, and reports the fate of each key. *Pure*.

Only the names of HyperPod's fields are stored here, with their meaning for regrow. An unknown key that affects training
is an error, so that a conversion cannot silently change the training.
"""

import fnmatch
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from regrow.core.errors import UsageError

_SECTIONS: Final = ("model", "data", "batch", "optim", "train", "lora", "dpo", "parallel", "output")
_ARGS, _MODEL, _DATA = "training_config.training_args.", "training_config.model_config.", "training_config.datasets."
Convert = Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


def _listed(value: Any) -> Any:
    return [value] if value else []


def _clipping(value: Any) -> Any:
    return float(value or 0)


TAKEN: Final[dict[str, tuple[str, Convert]]] = {
    _MODEL + "model_name_or_path": ("model.path", _as_it_is),
    _MODEL + "peft_config.r": ("lora.rank", _as_it_is),
    _MODEL + "peft_config.lora_alpha": ("lora.alpha", float),
    _MODEL + "peft_config.lora_dropout": ("lora.dropout", float),
    _DATA + "train_data.file_path": ("data.train", _listed),
    _DATA + "val_data.file_path": ("data.eval", _listed),
    _ARGS + "learning_rate": ("optim.lr", float),
    _ARGS + "lr_scheduler": ("optim.schedule", _as_it_is),
    _ARGS + "lr_warmup_ratio": ("optim.warmup", float),
    _ARGS + "adam_betas": ("optim.betas", list),
    _ARGS + "weight_decay": ("optim.weight_decay", float),
    _ARGS + "gradient_clipping_threshold": ("optim.clip", _clipping),
    _ARGS + "max_epochs": ("train.epochs", float),
    _ARGS + "max_len": ("data.length", _as_it_is),
    _ARGS + "packing_samples": ("data.pack", bool),
    _ARGS + "seed": ("train.seed", _as_it_is),
    _ARGS + "logging_steps": ("train.log_every", _as_it_is),
    _ARGS + "train_batch_size": ("batch.samples", _as_it_is),
    _ARGS + "micro_train_batch_size": ("batch.micro", _as_it_is),
    _ARGS + "gradient_checkpointing": ("parallel.recompute", bool),
    _ARGS + "merge_weights": ("output.merge", bool),
    _ARGS + "beta": ("dpo.beta", float),
    "dataset.dataset_path": ("data.train", _listed),
    "data.global_batch_size": ("batch.samples", _as_it_is),
    "data.micro_batch_size": ("batch.micro", _as_it_is),
    "data.seq_length": ("data.length", _as_it_is),
    "optim.config.lr": ("optim.lr", float),
    "optim.config.weight_decay": ("optim.weight_decay", float),
    "optim.config.clip_grad": ("optim.clip", _clipping),
    "trainer.max_steps": ("train.steps", _as_it_is),
    "trainer.log_every_n_steps": ("train.log_every", _as_it_is),
    "trainer.val_check_interval": ("train.eval_every", _as_it_is),
    "model.config.recompute_granularity": ("parallel.recompute", bool),
}
"""By HyperPod's key: regrow's key, and the parser of the value."""

TOGETHER: Final = (
    "run.name",
    "run.model_type",
    "display_name",
    "log.name",
    "model.peft.peft_scheme",
    "trainer.devices",
    "trainer.num_nodes",
    "optim.config.adam_beta[12]",
    "optim.lr_scheduler.warmup_steps",
    "elastic_policy.*",
    _MODEL + "peft_config",
    _MODEL + "peft_config.peft_type",
    _ARGS + "trainer_type",
    _ARGS + "gradient_clipping",
    _ARGS + "max_norm",
)
"""Patterns of keys that are read together with others."""

NOT_NEEDED: Final[dict[str, str]] = {
    "the place and manner of a run are not in a recipe: see the flags of regrow train, and docs/kubernetes.md": (
        "version|instance_types|resources.*|pre_script|plugins.*|ddp.*|run.hf_access_token|run.time_limit"
    ),
    "regrow keeps records of its own: regrow story, plot, goodput": (
        "run.results_dir|log_dir|log.*|exp_manager.*|callbacks|*.trainer_callbacks|*.mlflow.*|*.use_tensorboard|"
        "*.use_wandb|*.log_gpu_memory|*.log_run_time"
    ),
    "checkpoints are flags: --checkpoint-dir, --checkpoint-every, --resume": (
        "resume.*|*.load_checkpoint|*.resume_checkpoint_path|*.max_ckpt_*|*.save_steps|*.disable_ds_ckpt|"
        "*.override_training_dir|*.training_dir|*.force_rerun|strategy.ckpt_*"
    ),
    "rows are prepared once per node and mapped; the seed decides their order": (
        "mmap.*|dataset.*|*.save_intermediate_processing_steps|*.limit|*.train_data.name|*.val_data.name|*.data_dir|"
        "*.max_samples|trainer.use_distributed_sampler|trainer.reload_dataloaders_*"
    ),
    "the planner shards (FSDP2, HSDP, DDP), and parallel.shard pins it; no tensor, expert or pipeline parallel": (
        "*.strategy.fsdp_config.*|strategy.*|*.ref_offload|*.grad_accum_dtype|*.device_map"
    ),
    "evaluations are losses over data.eval": (
        "*.generation_cfg.*|*.eval_steps|trainer.limit_*|trainer.num_sanity_val_steps|"
        "trainer.accumulate_grad_batches|trainer.accelerator"
    ),
    "the first record decides the format, and the tokenizer has the chat template": (
        "*.preprocessor_cfgs|*.apply_chat_template|*.chat_template_key|*.disable_fast_tokenizer"
    ),
    "the result is a folder with the hub's names, in output.dir": (
        "*.model_save_name|*.save_hf_ckpt|*.lora_checkpoint_file_path"
    ),
    "the model is that of config.json; attention is sdpa": (
        "*.attn_implementation|*.gradient_checkpointing_use_reentrant|model.config.*"
    ),
    "weights and AdamW are in full precision": (
        "optim.config._target_|optim.config.bf16|optim.config.fp16|optim.config.use_distributed_optimizer|"
        "optim.lr_scheduler._target_|optim.lr_scheduler.constant_steps"
    ),
    "it has no effect here": "*.peft_config.task_type|*.M|*.sampling_method|*.ring_head_stride|*.train_val_split_seed",
}
"""Reasons why keys have no effect here, and patterns of such keys."""

OTHERWISE: Final[dict[str, str]] = {
    "*.peft_config.target_modules": "adapters go to the attention's matrices, and to MLPs of models without experts",
    "*.peft_config.target_parameters": "experts get no adapters here",
    "*.train_val_split_ratio": "nothing is split off the training data: give data.eval",
    "optim.lr_scheduler.min_lr": "cosine falls to a tenth of the highest learning rate",
    "optim.config.adam_eps": "it is 1e-8 here",
}
"""Patterns of keys that have a different meaning here."""

DEFAULTS: Final[dict[str, tuple[Any, ...]]] = {
    _ARGS + "label_smoothing": (0, None),
    _ARGS + "nll_loss_coef": (0, None),
    _ARGS + "aux_loss_coef": (0, None),
    _ARGS + "l2": (0, None),
    _ARGS + "loss_type": ("sigmoid",),
    _ARGS + "reference_free": (False,),
    _ARGS + "ring_attn_size": (1,),
    _ARGS + "ulysses_sequence_parallel_size": (1,),
    _ARGS + "pretrain_mode": (False,),
    _MODEL + "multimodal": (False,),
    _MODEL + "peft_config.bias": ("none",),
    _MODEL + "peft_config.use_dora": (False,),
    "optim.config.optimizer": ("adam",),
}
"""Keys that affect training, and their supported values."""


@dataclass
class Converted:
    """A recipe of regrow, and the fate of each HyperPod key.

    Attributes:
        settings: values by section and key.
        method: the built-in method that it extends.
        flags: of `regrow train`.
        notes: sentences for the user: differences, and values to fill in.
        left_out: HyperPod's keys without effect here, by the reason.
        unknown: HyperPod's keys that are not known here.
    """

    method: str
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def toml(self) -> str:
        """The recipe as a TOML file."""
        text = f'# Made from a recipe of HyperPod.\nextends = "{self.method}"\n'
        for section in (name for name in _SECTIONS if self.settings.get(name)):
            pairs = self.settings[section].items()
            text += f"\n[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in pairs)
        return text


def convert(theirs: Mapping[str, Any]) -> Converted:
    """Convert HyperPod's recipe. Raises `UsageError` if it is invalid, or uses a feature that regrow lacks."""
    leaves = dict(_leaves(theirs))
    made = Converted(_method(leaves))
    for key, value in leaves.items():
        if key.startswith("scale_config."):
            continue
        if key in TAKEN:
            _take(made, *TAKEN[key], value)
        elif key in DEFAULTS:
            if value not in DEFAULTS[key]:
                made.unknown.append(f"{key} = {value!r}")
        elif not _matches(key, TOGETHER):
            _sort(made, key)
    _together(made, leaves)
    _elastic(made, theirs, leaves)
    return made


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _method(leaves: Mapping[str, Any]) -> str:
    if "run.model_type" not in leaves:
        raise UsageError(
            "this is not a recipe of HyperPod: it has no run.model_type",
            hint="give a file of HyperPod's recipes_collection",
        )
    names = (_MODEL + "model_name_or_path", "run.name", "display_name", "log.name")
    name = " ".join(str(leaves.get(key)) for key in names).lower()
    if "llama-4" in name or "llama 4" in name:
        raise UsageError("regrow's recipes do not train Llama 4", hint="they train Llama 3, Qwen, DeepSeek and GPT-OSS")
    kind = leaves.get(_ARGS + "trainer_type")
    adapted = _adapted(leaves)
    if kind == "dpo":
        return "dpo"
    if kind not in ("sft", None):
        raise UsageError(
            f"regrow's recipes have no method for trainer_type {kind!r}", hint="they have one for sft and for dpo"
        )
    if adapted:
        return "lora"
    return "pretrain" if kind is None and "pretrain" in name.replace("-", "") else "full"


def _adapted(leaves: Mapping[str, Any]) -> bool:
    """True if it trains an adapter. One of HyperPod's recipes shows this only by its name."""
    kind = leaves.get(_MODEL + "peft_config.peft_type") or leaves.get("model.peft.peft_scheme")
    return bool(kind) or _is_lora_by_name(leaves)


def _is_lora_by_name(leaves: Mapping[str, Any]) -> bool:
    untold = not any("peft" in key or key == _ARGS + "trainer_type" for key in leaves)
    return untold and "lora" in str(leaves.get("display_name")).lower()


def _take(made: Converted, target: str, read: Convert, value: Any) -> None:
    section, _, key = target.partition(".")
    if (section == "lora" and made.method not in ("lora", "dpo")) or value in (None, ""):
        return
    made.settings.setdefault(section, {})[key] = read(value)


def _sort(made: Converted, key: str) -> None:
    for pattern, why in OTHERWISE.items():
        if fnmatch.fnmatchcase(key, pattern):
            made.notes.append(f"{key}: {why}")
            return
    for why, patterns in NOT_NEEDED.items():
        if _matches(key, patterns.split("|")):
            made.left_out.setdefault(why, []).append(key)
            return
    made.unknown.append(key)


def _together(made: Converted, leaves: Mapping[str, Any]) -> None:
    settings = made.settings
    if leaves.get(_ARGS + "gradient_clipping") is False:
        settings.setdefault("optim", {})["clip"] = 0.0
    first, second = leaves.get("optim.config.adam_beta1"), leaves.get("optim.config.adam_beta2")
    if first is not None and second is not None:
        settings.setdefault("optim", {})["betas"] = [first, second]
    warm, steps = leaves.get("optim.lr_scheduler.warmup_steps"), leaves.get("trainer.max_steps")
    if warm and steps:
        settings.setdefault("optim", {})["warmup"] = round(warm / steps, 6)
    adapted = _adapted(leaves)
    if made.method == "dpo":
        settings.setdefault("data", {})["pack"] = False
        if not adapted:
            settings.setdefault("dpo", {})["weights"] = "all"
    if not adapted:
        settings.get("output", {}).pop("merge", None)
    if not settings.get("data", {}).get("eval"):
        settings.get("train", {}).pop("eval_every", None)
    settings.setdefault("output", {})["dir"] = f"out/{leaves.get('run.name') or 'model'}"
    if _is_lora_by_name(leaves):
        made.notes.append("the method lora comes from display_name: no key names the trained weights")
    path = settings.setdefault("model", {}).setdefault("path", str(leaves.get("run.name") or ""))
    made.notes.append(f"model.path must be a folder: run hf download {path} --local-dir DIR, and give DIR")
    if not settings.get("data", {}).get("train"):
        made.notes.append("fill in data.train: a list of files")
        settings.setdefault("data", {})["train"] = []


def _elastic(made: Converted, theirs: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Set the flags for nodes, ranks of each node, and the range of nodes."""
    nodes, ranks = leaves.get("trainer.num_nodes") or 1, leaves.get("trainer.devices") or 1
    made.flags += ["--nproc-per-node", str(ranks), "--nnodes", str(nodes)]
    if leaves.get("elastic_policy.is_elastic"):
        least, most = leaves.get("elastic_policy.min_nodes", 1), leaves.get("elastic_policy.max_nodes", nodes)
        made.flags[-1] = f"{least}:{most}"
        made.flags += ["--drain-grace", f"{leaves.get('elastic_policy.graceful_shutdown_timeout', 30)}s"]
    scales = theirs.get("scale_config") or {}
    args = [each.get("training_config", {}).get("training_args", {}) for each in scales.values()]
    for key, name in (("learning_rate", "learning rate"), ("train_batch_size", "global batch")):
        own, others = leaves.get(_ARGS + key), {each[key] for each in args if key in each}
        if others - {own}:
            values = ", ".join(map(str, sorted(others)))
            made.notes.append(
                f"scale_config would have changed the {name} from {own} to {values} with the number of nodes: here it "
                f"stays {own}"
            )
