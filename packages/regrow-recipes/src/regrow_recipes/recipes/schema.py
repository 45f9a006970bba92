"""Keys of a recipe, each with its range, its default and its description."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Method = Literal["pretrain", "full", "lora", "dpo", "grpo"]
Format = Literal[
    "auto", "text", "messages", "prompt-completion", "preference", "sharegpt", "alpaca", "tokens", "prompt"
]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Positive = Annotated[float, Meta(gt=0)]


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model that is trained."""

    path: Annotated[str, Meta(description="folder of the model, in Hugging Face's layout")] = ""
    config: Annotated[dict[str, Any], Meta(description="pretrain, in place of path: its config.json, as a table")] = {}
    tokenizer: Annotated[str, Meta(description="folder of the tokenizer; empty: the model's")] = ""
    attention: Annotated[
        Literal["auto", "sdpa", "eager"], Meta(description="kernels; auto: sdpa, eager for gpt_oss")
    ] = "auto"


class DataSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Data to train on."""

    train: Annotated[list[str], Meta(description="files or patterns: .jsonl, .json, .csv, .parquet, .txt")] = []
    eval: Annotated[list[str], Meta(description="files to evaluate on; none: no evaluation")] = []
    format: Annotated[Format, Meta(description="format of the records; auto: that of the first one")] = "auto"
    columns: Annotated[
        dict[str, str], Meta(description='names in the records for keys of the format: prompt = "question"')
    ] = {}
    length: Annotated[Count, Meta(description="tokens in a row")] = 2048
    pack: Annotated[bool, Meta(description="several documents in a row, with attention within each only")] = True


class BatchSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Batch of one update, in a world of any size."""

    tokens: Annotated[Natural, Meta(description="tokens in a step, padding included; 0: use samples")] = 0
    samples: Annotated[Natural, Meta(description="rows in a step; 0: use tokens")] = 0
    micro: Annotated[
        Count | Literal["auto"],
        Meta(description="rows in a forward; auto: as many as fit in --memory (1 GB if unknown), at most 8"),
    ] = "auto"


class OptimSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """AdamW and its learning rate."""

    lr: Annotated[Positive, Meta(description="highest learning rate")] = 1e-5
    schedule: Annotated[
        Literal["cosine", "linear", "constant"], Meta(description="whether it falls to a tenth, falls to 0, or stays")
    ] = "cosine"
    warmup: Annotated[Share, Meta(description="share of the steps in which lr rises")] = 0.03
    betas: Annotated[tuple[Share, Share], Meta(description="AdamW's betas")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="of matrices only")] = 0.0
    clip: Annotated[float, Meta(ge=0, description="largest norm of the gradient; 0: no limit")] = 1.0


class TrainSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Length of the training, and the reports meanwhile."""

    epochs: Annotated[float, Meta(ge=0, description="passes over the data; 0: use steps")] = 0.0
    steps: Annotated[Natural, Meta(description="updates; 0: use epochs")] = 0
    seed: Annotated[Natural, Meta(description="seed of everything random")] = 0
    log_every: Annotated[Count, Meta(description="steps between two printed lines")] = 10
    eval_every: Annotated[Natural, Meta(description="steps between evaluations; 0: only after the last step")] = 0


class LoraSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The adapter. Method lora; dpo and grpo unless they train all weights."""

    rank: Annotated[Count, Meta(description="rank of each pair of matrices")] = 16
    alpha: Annotated[Positive, Meta(description="the adapter's output is scaled by alpha / rank")] = 32.0
    dropout: Annotated[Share, Meta(description="dropout before the adapter")] = 0.05
    targets: Annotated[
        list[str] | Literal["auto"],
        Meta(description="names of modules; auto: attention, and MLPs of models without experts"),
    ] = "auto"


class DpoSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Direct preference optimization."""

    beta: Annotated[Positive, Meta(description="weight of the KL term to the reference")] = 0.1
    weights: Annotated[
        Literal["adapter", "all"],
        Meta(description="trained weights; all: the reference's outputs are computed once, before the first step"),
    ] = "adapter"


class GrpoSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Group relative policy optimization, by TRL."""

    generations: Annotated[int, Meta(ge=2, description="completions per prompt, which are compared")] = 8
    completion: Annotated[Count, Meta(description="maximum tokens in a completion")] = 256
    iterations: Annotated[Count, Meta(description="updates on the same completions")] = 1
    temperature: Annotated[Positive, Meta(description="temperature of sampling")] = 1.0
    beta: Annotated[float, Meta(ge=0, description="weight of the KL term to the reference; 0: none")] = 0.0
    weights: Annotated[Literal["adapter", "all"], Meta(description="trained weights")] = "adapter"


class RewardSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Judge of completions. Method grpo."""

    function: Annotated[
        str, Meta(description='"module:function" or "FILE.py:function", called like a TRL reward; returns numbers')
    ] = ""
    command: Annotated[
        list[str], Meta(description="or a program that reads a JSON line per completion and prints a number for each")
    ] = []
    deadline: Annotated[Positive, Meta(description="seconds that the command may take for a rank's completions")] = 60.0


class ParallelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pins for the planner's choices."""

    shard: Annotated[
        Count | Literal["auto"], Meta(description="ranks that share one copy of the model; 1: DDP, a copy on each")
    ] = "auto"
    precision: Annotated[
        Literal["auto", "bf16", "fp32"], Meta(description="of the forward; auto: bf16 on GPUs, fp32 on CPUs")
    ] = "auto"
    recompute: Annotated[
        bool | Literal["auto"], Meta(description="recompute activations in the backward; auto: from 1e9 parameters up")
    ] = "auto"


class ElasticSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A world that changes its size while it trains."""

    replicas: Annotated[
        str, Meta(pattern=r"^(\d+:\d+)?$", description="MIN:MAX copies of the model; empty: as many as at the start")
    ] = ""
    learning_rate: Annotated[
        Literal["constant", "linear", "sqrt"], Meta(description="how lr grows with the number of replicas")
    ] = "constant"
    invariant: Annotated[bool, Meta(description="bitwise the same result with any number of replicas")] = False


class OutputSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Place of the result."""

    dir: Annotated[str, Meta(description="folder; the model is in its folder `model`, an adapter in `adapter`")] = ""
    every: Annotated[Natural, Meta(description="steps between exports; 0: only after the last step")] = 0
    merge: Annotated[bool, Meta(description="with an adapter: also write the model with the adapter merged in")] = False


class TrainingRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole recipe."""

    method: Method
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    lora: LoraSection = LoraSection()
    dpo: DpoSection = DpoSection()
    grpo: GrpoSection = GrpoSection()
    reward: RewardSection = RewardSection()
    parallel: ParallelSection = ParallelSection()
    elastic: ElasticSection = ElasticSection()
    output: OutputSection = OutputSection()

    @property
    def adapts(self) -> bool:
        """True if an adapter is trained beside frozen weights."""
        chosen = {"lora": "adapter", "dpo": self.dpo.weights, "grpo": self.grpo.weights}
        return chosen.get(self.method) == "adapter"

    @property
    def tokenizer(self) -> str:
        """The tokenizer's folder."""
        return self.model.tokenizer or self.model.path


class Run(msgspec.Struct, frozen=True):
    """A recipe with all resolved values, which every worker of the job reads, newcomers too."""

    recipe: TrainingRecipe
    model_config: dict[str, Any]
    data: str
    """Folder of the prepared rows."""
    eval_data: str
    steps: int
    microbatches: int
    """Number in a step; each is split among the ranks of a replica."""
    micro: int
    shard: int
    recompute: bool
    tokens_per_step: int
    flops_per_token: float
