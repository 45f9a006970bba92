"""A training as tutorials show it: DDP under torchrun's contract, with no word of regrow."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        dataset, num_replicas=world, rank=rank, shuffle=True
    )
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for features, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(features), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    gathered = [torch.empty_like(weights) for _ in range(world)]
    dist.all_gather(gathered, weights)
    if not all(torch.equal(gathered[0], other) for other in gathered):
        raise SystemExit("the replicas differ")
    print(f"trained {os.environ['RANK']} of {world}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
