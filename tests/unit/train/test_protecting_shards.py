"""Protected parts of a model that FSDP2 shards, after the script has already used the model."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from regrow.train.session import Session
from regrow.train.worker.standalone import StandaloneWorker


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_was_evaluated_before_is_protected_as_its_shards(alone: None) -> None:
    """After a forward the root has whole parameters where its shards were."""
    model: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), mesh=init_device_mesh("cpu", (1,)))
    with torch.no_grad():
        model(torch.zeros(1, 4))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    session = Session(StandaloneWorker(0, 0, 1), seed=0)
    session.protect(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    before = session.digest()
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    assert session.digest() != before
