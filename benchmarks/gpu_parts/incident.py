"""MODE FOLDER STEPS: a small DDP training with one incident, once, at step 10 of rank 1.

Modes: none, kill, assert (a device-side assert), newcomer (a kill, and an assert in the newcomer), skip (an
all-reduce), connect (death between meeting and connecting, at the start), reconnect (the same in a recovery). With the
suffix `_buffers` the model has buffers.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import regrow
from regrow.comm import nccl

AT, VICTIM = 10, 1
DEVICE = torch.device(os.environ.get("REGROW_BENCH_DEVICE", "cpu"))
WATCH_S = 1.0


class Incident:
    """Incident that happens once in a job."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.mode, self._folder = mode.partition("_")[0], folder

    def first(self, what: str) -> bool:
        """True at the first call for this event in the job."""
        try:
            (self._folder / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def happens(self, mode: str, step: int, rank: int) -> bool:
        """True if the incident is due now."""
        return self.mode == mode and step == AT and rank == VICTIM and self.first(mode)

    def dies_before_it_connects(self, rank: int, *, recovery: bool) -> None:
        """Make this process die after it has met the others and before it connects to them."""
        meet: Any = nccl.NcclTransport._meet

        def and_die(transport: nccl.NcclTransport, peer: int) -> None:
            new = peer not in transport._met
            meet(transport, peer)
            struck = (self._folder / "kill").exists() if recovery else True
            if new and struck and self.first("connect"):
                os.kill(os.getpid(), signal.SIGKILL)

        transports: Any = nccl.NcclTransport
        transports._meet = and_die


def assert_on_device() -> None:
    """Use an index out of bounds: a kernel detects it, and a later call reports it."""
    torch.zeros(4, device=DEVICE)[torch.tensor([100], device=DEVICE)].sum()


def watch_errors(path: Path) -> None:
    """Write NCCL's state of this process's communicators every second."""

    def look() -> None:
        while True:
            said = [inner.backend.get_error().value for inner in list(nccl._living)]
            with path.open("a") as out:
                out.write(json.dumps({"at": round(time.time(), 1), "errors": said}) + "\n")
            time.sleep(WATCH_S)

    threading.Thread(target=look, daemon=True).start()


def build(mode: str) -> nn.Module:
    """The model, with or without buffers on the device."""
    norm = nn.BatchNorm1d(64) if mode.endswith("_buffers") else nn.LayerNorm(64)
    layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), norm, nn.Linear(64, 4))
    return layers.to(DEVICE)


def main() -> None:
    """Train."""
    mode, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    incident = Incident(mode, folder)
    session = regrow.init(seed=3)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    if incident.mode == "connect" and session.rank == VICTIM:
        incident.dies_before_it_connects(session.rank, recovery=False)
    if incident.mode == "reconnect" and session.rank == VICTIM + 1:
        incident.dies_before_it_connects(session.rank, recovery=True)
    if incident.mode == "newcomer" and session.newcomer and (folder / "kill").exists() and incident.first("assert"):
        assert_on_device()
        torch.cuda.synchronize()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(build(mode))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.protect(model, optimizer)
    if incident.mode == "skip":
        watch_errors(folder / f"errors-{os.getpid()}")
    drawn = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(2048, 16, generator=drawn), torch.randint(4, (2048,), generator=drawn)
    )
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
    loss = torch.zeros(())
    for step in session.steps(loader, until=steps):
        (folder / f"pid-{session.rank}-{os.getpid()}").touch()
        with step as batch:
            x, y = (each.to(DEVICE) for each in batch)
            loss = functional.cross_entropy(model(x), y)
            step.log(loss=loss)
            if incident.happens("assert", step.number, session.rank):
                assert_on_device()
            died = incident.mode if incident.mode in ("newcomer", "reconnect") else "kill"
            if incident.mode == died and step.number == AT and session.rank == VICTIM and incident.first("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()  # type: ignore[no-untyped-call]
            if incident.mode == "skip" and not incident.happens("skip", step.number, session.rank):
                dist.all_reduce(x)
            optimizer.step()
            optimizer.zero_grad()
    if session.is_main:
        digest = {"digest": session.digest()[:16], "loss": float(loss.detach())}
        (folder / "result").write_text(json.dumps(digest))


if __name__ == "__main__":
    main()
