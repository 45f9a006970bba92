"""A training as tutorials show it: FSDP2 on a device mesh under torchrun's contract, with no word of regrow."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def main() -> None:
    dist.init_process_group("gloo", init_method="env://")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)], nn.Linear(16, 1))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(6):
        inputs = torch.randn(8, 16)
        loss = (model(inputs) - inputs.mean(dim=1, keepdim=True)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    if not losses[-1] < losses[0]:
        raise SystemExit(f"it does not learn: {losses}")
    if not all(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise SystemExit("the parameters are not sharded")
    dist.barrier()
    print(f"trained {os.environ['RANK']} of {dist.get_world_size()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
