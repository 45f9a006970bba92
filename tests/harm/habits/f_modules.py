"""Modules and wrappers."""

import collections
from typing import Any

import numpy as np
import torch
from tests.compiling import COMPILER
from tests.harm.frame import WIDTH, Trial, backward, ddp, mlp, mse
from tests.harm.table import DRAWS, FP16, habit
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint


def train(t: Trial, model: Any, optimizer: Any, **named: Any) -> dict[str, Any]:
    """The plain loop, for habits that are not in it."""
    t.session.protect(model, optimizer, **named)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit("BatchNorm", differs="statistics are of each rank's part of the batch")
def batch_norm(t: Trial) -> dict[str, Any]:
    model = ddp(mlp(1, WIDTH, 1, nn.BatchNorm1d(16)))
    kept = train(t, model, torch.optim.SGD(model.parameters(), lr=5e-2))
    statistics = {name for name, _ in model.named_buffers()}  # of rank 0's batches in one case, of all in the other
    return {"model": {name: value for name, value in model.state_dict().items() if name not in statistics}} | {
        "optimizer": kept["optimizer"]
    }


@habit("a buffer that the forward counts in")
def buffer_counted_in_the_forward(t: Trial) -> dict[str, Any]:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y: torch.Tensor = self.net(x) / self.calls.sqrt()
            return y

    model = ddp(Counting())
    return train(t, model, torch.optim.SGD(model.parameters(), lr=5e-2))


@habit("frozen weights (fine-tuning a head)")
def frozen_weights(t: Trial) -> dict[str, Any]:
    net = mlp()
    net[0].requires_grad_(False)
    model = ddp(net)
    return train(t, model, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2))


@habit("weights unfrozen at a step", compared=True)
def weights_unfrozen(t: Trial) -> dict[str, Any]:
    net = mlp()
    model = ddp(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            hidden = model.module[1](model.module[0](x))
            loss = mse(model(x), y) if step.number >= 5 else mse(net[2](hidden.detach()), y) + 0 * model(x).sum()
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "optimizer": optimizer}


@habit("tied weights")
def tied_weights(t: Trial) -> dict[str, Any]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up.weight = self.down.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.up(self.down(x).tanh()).sum(1, keepdim=True)
            return y

    model = ddp(Tied())
    return train(t, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@habit("`nn.Embedding(sparse=True)` with `SparseAdam`")
def sparse_embedding(t: Trial) -> dict[str, Any]:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.rows = nn.Embedding(10, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.rows((x.abs() * 3).long().clamp(max=9)).sum((1, 2)).unsqueeze(1)
            return y

    model = ddp(Lookup())
    return train(t, model, torch.optim.SparseAdam(model.parameters(), lr=1e-2))


@habit("activation checkpointing, with dropout in what is computed again", differs=DRAWS)
def activation_checkpointing(t: Trial) -> dict[str, Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(1, WIDTH, WIDTH, nn.Dropout(0.2))
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(checkpoint(self.net, x, use_reentrant=False))
            return y

    model = ddp(Checkpointed())
    return train(t, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@habit("`DDP(torch.compile(net))`", imports=COMPILER)
def compiled_inside(t: Trial) -> dict[str, Any]:
    model = ddp(torch.compile(mlp(), backend="aot_eager"), bucket_cap_mb=25)
    return train(t, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@habit("`torch.compile(DDP(net))`", imports=COMPILER)
def compiled_outside(t: Trial) -> dict[str, Any]:
    model = torch.compile(ddp(mlp(), bucket_cap_mb=25), backend="aot_eager")
    return train(t, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@habit("DDP inside another module, which is protected")
def ddp_inside(t: Trial) -> dict[str, Any]:
    class Box(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ddp(mlp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x) * 2
            return y

    model = Box()
    return train(t, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@habit("`protect(net)` with `DDP(net)` around it, or `protect(ddp.module)`")
def ddp_made_elsewhere(t: Trial) -> dict[str, Any]:
    net = mlp()
    model = ddp(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    t.session.protect(net, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"net": net, "optimizer": optimizer}


@habit("DDP with `static_graph=True`", refused="cannot run a step again", instead="leave it out")
def static_graph(t: Trial) -> dict[str, Any]:
    model = ddp(mlp(), static_graph=True)
    return train(t, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@habit(
    "DDP with `find_unused_parameters=True`, a branch left out in each second step",
    differs="each rank's part of the batch decides the branch",
)
def unused_parameters(t: Trial) -> dict[str, Any]:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.rare = mlp(1), mlp(2)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.common(x)
            return y + self.rare(x) if x[0, 0] > 0 else y

    model = ddp(Branching(), find_unused_parameters=True)
    return train(t, model, torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9))


@habit("DDP with `gradient_as_bucket_view=True`")
def bucket_views(t: Trial) -> dict[str, Any]:
    model = ddp(mlp(), gradient_as_bucket_view=True)
    return train(t, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@habit("DDP's `fp16_compress_hook`", differs=FP16)
def compressing_hook(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(t, model, torch.optim.SGD(model.parameters(), lr=5e-2))


@habit("DDP's PowerSGD hook, which keeps errors for the next step", refused="keeps a state that every step changes")
def power_sgd(t: Trial) -> dict[str, Any]:
    model = ddp(mlp(), bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(t, model, torch.optim.SGD(model.parameters(), lr=5e-2))


@habit(
    "`ZeroRedundancyOptimizer` (ZeRO-1)",
    refused="keeps a part of the optimizer's state on each rank",
    instead="FSDP2 with copies, or AdamW",
)
def zero_1(t: Trial) -> dict[str, Any]:
    model = ddp(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    return {"model": train(t, model, optimizer)["model"]}


@habit(
    "`FullyShardedDataParallel`, FSDP's first form",
    refused="FSDP's first form, whose step cannot be run again",
    instead="`fully_shard`",
)
def fsdp_1(t: Trial) -> dict[str, Any]:
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    return train(t, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@habit("an attribute of a module annealed in the body")
def annealed_attribute(t: Trial) -> dict[str, Any]:
    class Cooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.heat = mlp(), 4.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.net(x) * self.heat
            return y

    net = Cooling()
    model = ddp(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            net.heat *= 0.9
    return {"model": model, "heat": net.heat}


@habit("`requires_grad` toggled at a step, `train()` and `eval()` for a part of the model")
def toggled_at_a_step(t: Trial) -> dict[str, Any]:
    net = mlp(1, WIDTH, 1, nn.Dropout(0.5))
    model = ddp(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    t.session.protect(model, optimizer)
    for step in t.steps():
        with step as (x, y):
            if step.number == 3:
                net[2].eval()
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "dropout": net[2].training}


@habit("`defaultdict` and numpy arrays in the state of an object, changed in the body")
def odd_state(t: Trial) -> dict[str, Any]:
    class Seen:
        def __init__(self) -> None:
            self.times: Any = collections.defaultdict(int)
            self.sums = np.zeros(4)

        def state_dict(self) -> dict[str, Any]:
            return {"times": self.times, "sums": self.sums}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.times, self.sums = state["times"], state["sums"]

    model, seen = ddp(mlp()), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer, seen=seen)
    for step in t.steps():
        with step as (x, y):
            seen.times[step.number % 3] += 1
            seen.sums[step.number % 4] += step.number
            loss = mse(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "times": dict(seen.times), "sums": torch.from_numpy(seen.sums)}


@habit(
    "a memory bank of over 1 MiB in an object, written in the body",
    differs="it adds up what ranks have, and so as many numbers as there are ranks",
)
def memory_bank(t: Trial) -> dict[str, Any]:
    class Bank:
        def __init__(self) -> None:
            self.rows = torch.zeros(40_000, WIDTH)

        def state_dict(self) -> dict[str, Any]:
            return {"rows": self.rows}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.rows = state["rows"]

    model, bank = ddp(mlp()), Bank()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2)
    t.session.protect(model, optimizer, bank=bank)
    for step in t.steps():
        with step as (x, y):
            torch.distributed.all_reduce(mean := x.mean(0))
            bank.rows[:100] += mean
            loss = mse(model(x + 0.01 * bank.rows[0]), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
    return {"model": model, "bank": bank}


@habit("spectral norm (a parametrization with buffers of its own)")
def spectral_norm(t: Trial) -> dict[str, Any]:
    net = mlp()
    nn.utils.parametrizations.spectral_norm(net[0])
    model = ddp(net)
    return train(t, model, torch.optim.SGD(model.parameters(), lr=5e-2))
