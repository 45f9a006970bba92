"""A small transformer under every kind of parallelism, four ranks: standard PyTorch, and regrow's few lines.

Sizes are such that shards are uneven over two and over four ranks. Ranks of one replica read the same data.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import regrow

if os.environ.get("REGROW_TEST_DEVICE") == "standin":
    import placing  # type: ignore[import-not-found]  # noqa: F401  beside this script: it brings the device
DEVICE = torch.device(os.environ.get("REGROW_TEST_DEVICE", "cpu"))  # as in placing.py
VOCABULARY, LENGTH, DIM, HEADS, HIDDEN = 101, 16, 42, 6, 99
BATCH, MICROBATCHES, WORLD = 8, 4, 4
parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["ddp", "fsdp2", "hsdp", "tp_dp", "pp_dp"], required=True)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--out", type=Path, help="every rank writes its digest beside this, and its losses")
parser.add_argument("--clip", action="store_true", help="clip the norm of all gradients: a reduction before the update")
parser.add_argument("--compile", action="store_true", help="compile each block")
parser.add_argument("--checkpoint-activations", action="store_true")
parser.add_argument("--pace", type=float, default=0.0, help="see pacing.py")
parser.add_argument("--say-steps", action="store_true")
parser.add_argument("--hold", default="", metavar="STEP:FILE", help="wait in that step until the file is there")
parser.add_argument("--asks-late", action="store_true", help="ask for this rank's data inside the loop alone")
parser.add_argument("--tp-fsdp", action="store_true", help="tp_dp: shard over dp too, instead of replicating")


Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Causal self-attention; heads are those of this rank where the projections are split over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm1, self.attention = nn.LayerNorm(DIM), Attention()
        self.norm2, self.mlp = nn.LayerNorm(DIM), Mlp()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute and self.training:
            return checkpoint(self.mix, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.mix(x)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """The whole model, or what one stage of a pipeline has of it.

    Args:
        first, last: whether this has the embedding, and the head.
    """

    def __init__(self, layers: int, *, recompute: bool, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, DIM) if first else None
        self.place = nn.Embedding(LENGTH, DIM) if first else None
        self.blocks = nn.ModuleList(Block(recompute=recompute) for _ in range(layers))
        self.norm = nn.LayerNorm(DIM) if last else None
        self.head = nn.Linear(DIM, VOCABULARY, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.token is not None and self.place is not None:
            x = self.token(x) + self.place(torch.arange(LENGTH, device=x.device))
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Training(NamedTuple):
    """One kind of parallelism.

    Attributes:
        model: what this rank has of it.
        forward_backward: runs both and returns the loss, 0 where this rank has none.
        data: over what the data is dealt out; None: over all ranks.
        stages: the ranks that together hold the parameters' gradients where no `DTensor` knows that.
        part: which of the model's parts, where there are several.
    """

    model: nn.Module
    forward_backward: Run
    data: DeviceMesh | None = None
    stages: dist.ProcessGroup | None = None
    part: str = ""

    @property
    def replica(self) -> int:
        """Part of the data that this rank reads."""
        return self.data.get_local_rank() if self.data is not None else dist.get_rank()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def whole(args: argparse.Namespace) -> Transformer:
    model = Transformer(args.layers, recompute=args.checkpoint_activations).to(DEVICE)
    if args.compile:
        for block in model.blocks:
            block.compile()
    return model


def plainly(model: nn.Module) -> Run:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return run


def with_ddp(args: argparse.Namespace) -> Training:
    # Small buckets: several reductions a step, so that a fault can strike between them.
    model = DistributedDataParallel(whole(args), bucket_cap_mb=0.05)
    return Training(model, plainly(model))


def sharded(model: Transformer, mesh: DeviceMesh) -> Transformer:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def with_fsdp2(args: argparse.Namespace) -> Training:
    model = sharded(whole(args), init_device_mesh(DEVICE.type, (WORLD,), mesh_dim_names=("dp_shard",)))
    return Training(model, plainly(model))


def with_hsdp(args: argparse.Namespace) -> Training:
    mesh = init_device_mesh(DEVICE.type, (2, WORLD // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = sharded(whole(args), mesh)
    return Training(model, plainly(model))


def with_tp_dp(args: argparse.Namespace) -> Training:
    mesh = init_device_mesh(DEVICE.type, (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    model = whole(args)
    along_length = Shard(1)
    plan: dict[str, Any] = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "place": RowwiseParallel(input_layouts=Replicate()),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=along_length, output_layouts=Shard(-1), use_local_output=False),
    }
    for at in range(args.layers):
        block = f"blocks.{at}"
        plan |= {
            f"{block}.norm1": SequenceParallel(),
            f"{block}.attention": PrepareModuleInput(input_layouts=along_length, desired_input_layouts=Replicate()),
            **{f"{block}.attention.{name}": ColwiseParallel() for name in "qkv"},
            f"{block}.attention.o": RowwiseParallel(output_layouts=along_length),
            f"{block}.norm2": SequenceParallel(),
            f"{block}.mlp": PrepareModuleInput(input_layouts=along_length, desired_input_layouts=Replicate()),
            # The hidden width is odd: only a DTensor knows how much of it each rank has.
            f"{block}.mlp.up": ColwiseParallel(use_local_output=False),
            f"{block}.mlp.down": RowwiseParallel(output_layouts=along_length),
        }
    plan["blocks.0"] = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=along_length, use_local_output=True
    )
    parallelize_module(model, mesh["tp"], plan)
    if args.tp_fsdp:
        sharded(model, mesh["dp"])
    else:
        replicate(model, mesh=mesh["dp"])

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            return plainly(model)(x, y)

    return Training(model, run, mesh["dp"])


def with_pp_dp(args: argparse.Namespace) -> Training:
    mesh = init_device_mesh(DEVICE.type, (2, WORLD // 2), mesh_dim_names=("pp", "dp"))
    at = mesh.get_local_rank("pp")
    first, last = at == 0, at == 1
    model = Transformer(args.layers // 2, recompute=args.checkpoint_activations, first=first, last=last).to(DEVICE)
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"), bucket_cap_mb=0.05)
    size = BATCH // MICROBATCHES
    inner = torch.empty(size, LENGTH, DIM, requires_grad=True, device=DEVICE)
    tokens = torch.empty(size, LENGTH, dtype=torch.long, device=DEVICE)
    stage = PipelineStage(
        wrapped,
        at,
        2,
        DEVICE,
        input_args=(tokens if first else inner,),
        output_args=(torch.empty(size, LENGTH, VOCABULARY, requires_grad=True, device=DEVICE) if last else inner,),
        group=mesh.get_group("pp"),
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if first:
            schedule.step(x)
            return torch.zeros((), device=DEVICE)
        schedule.step(target=y, losses=losses)
        return torch.stack(losses).mean()

    return Training(wrapped, run, mesh["dp"], mesh.get_group("pp"), part=f"stage {at}")


MAKERS = {"ddp": with_ddp, "fsdp2": with_fsdp2, "hsdp": with_hsdp, "tp_dp": with_tp_dp, "pp_dp": with_pp_dp}


def value(number: torch.Tensor) -> float:
    """One number; of a `DTensor`, that of all its ranks."""
    return float((number.full_tensor() if isinstance(number, DTensor) else number).detach())


def clip(parameters: list[nn.Parameter], stages: dist.ProcessGroup | None) -> float:
    """Limit the norm of all gradients of the model; returns what it was."""
    norm = nn.utils.get_total_norm([item.grad for item in parameters if item.grad is not None])
    total = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if stages is not None:
        squares = total**2
        dist.all_reduce(squares, group=stages)
        total = squares.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, 0.3, total)
    return float(total)


def batch_of(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Arithmetic sequences modulo the vocabulary, from another start and with another stride in each row."""
    source = torch.Generator().manual_seed(1000 * step + replica)
    start, stride = torch.randint(1, VOCABULARY, (2, BATCH, 1), generator=source)
    text = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    # torch 2.11 compares the strides of what a pipeline is given with those of its example
    return text[:, :-1].contiguous().to(DEVICE), text[:, 1:].contiguous().to(DEVICE)


def main() -> None:
    # Beside this script; tests import the rest of it.
    from pacing import pause  # type: ignore[import-not-found]
    from placing import take_place

    args = parser.parse_args()
    session = regrow.init(seed=11)
    take_place(lambda: session.local_rank)
    training = MAKERS[args.mode](args)
    parameters = list(training.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    session.protect(training.model, optimizer, scheduler, part=training.part)

    losses = []
    replica = None if args.asks_late else training.replica

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch_of(step, training.replica if replica is None else replica)

    held, _, until = args.hold.partition(":")
    for step in session.steps(batches, until=args.steps, data=training.data):
        with step as (x, y):
            while held == str(step.number) and not step.rehearsal and not Path(until).exists():
                time.sleep(0.005)
            pause(0.0 if step.rehearsal else args.pace, step.number, args.steps)
            loss = value(training.forward_backward(x, y))
            if args.clip:
                step.log(norm=clip(parameters, training.stages))
            step.log(loss=loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed:
            losses.append(loss)
        if args.say_steps and step.committed and session.is_main:
            sys.stdout.write(f"step {step.number}\n")

    if args.out is not None:
        digest = {"digest": session.digest(), "lr": scheduler.get_last_lr()[0], "rank": session.rank, "losses": losses}
        args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(digest))


if __name__ == "__main__":
    main()
