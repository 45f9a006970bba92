"""A GPT of Megatron-Core with dropout and its distributed optimizer, protected as docs/adopt.md says."""

import argparse
import json
import logging
from pathlib import Path

import torch
import torch.distributed as dist
import without_cuda  # type: ignore[import-not-found]  # noqa: F401
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

import regrow
from regrow_recipes.adapters.megatron import Generators

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path)
parser.add_argument("--tensor", type=int, default=1, help="ranks of a tensor-parallel group")
parser.add_argument("--overlap", action="store_true", help="gradients are reduced beside the backward")
args = parser.parse_args()

torch.set_num_threads(1)
logging.getLogger("megatron").setLevel(logging.ERROR)
session = regrow.init(seed=3)
parallel_state.initialize_model_parallel(args.tensor, 1)
torch.manual_seed(3)
tensor_parallel.model_parallel_cuda_manual_seed(3)
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    use_cpu_initialization=True,
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    gradient_accumulation_fusion=False,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    persist_layer_norm=False,
    tensor_model_parallel_size=args.tensor,
)
inner = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16).bfloat16()
settings = DistributedDataParallelConfig(
    grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=args.overlap
)
model = DistributedDataParallel(config, settings, inner)
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-5,
        use_distributed_optimizer=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=1.0,
    ),
    [model],
)
scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-3, 1e-5, 4, 40, "cosine", 0.0, 0.0, 100, "constant")
session.protect(part=f"tensor{parallel_state.get_tensor_model_parallel_rank()}", model=model, random=Generators())
session.protect(part=f"rank{session.rank}", optimizer=optimizer.chained_optimizers[0].optimizer, scheduler=scheduler)

positions = torch.arange(16).unsqueeze(0).expand(2, -1)
mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
data_rank = parallel_state.get_data_parallel_rank()


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(100 * number + data_rank))


for step in session.steps(tokens, until=args.steps):
    with step as batch:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(batch[:, :-1], positions, mask, labels=batch[:, 1:]).float().mean()
        loss.backward()
        finalize_model_grads([model])
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        step.log(loss=mean)
        optimizer.step()
        scheduler.step(increment=4)

if args.out is not None:
    rates = [group["lr"] for group in optimizer.param_groups]
    final = {"digest": session.digest(), "rates": rates, "steps": scheduler.num_steps}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(final))
