"""A small training on data that is slow to make: every reading of a sample is written down; mischief on demand."""

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from pacing import pause  # type: ignore[import-not-found]  # beside this script
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

import regrow
from regrow.core.net import unix_address

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path)
# No Path: what the data set's code refers to counts as part of it, with the times of its files.
parser.add_argument("--reads", required=True, help="a line for each sample that is read: process, by whom, index")
parser.add_argument("--loader", choices=["regrow", "cached", "torch", "iterable"], default="regrow")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--microbatches", type=int, help="a batch of the loader is one of so many a step")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--sample-s", type=float, default=0.005)
parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in every step")
parser.add_argument("--pace", type=float, default=0.0, help="see pacing.py")
parser.add_argument("--bad", type=int, default=-1, metavar="INDEX", help="this sample cannot be read")
parser.add_argument("--producer-dies-at", type=int, nargs="*", default=[], metavar="INDEX")
parser.add_argument("--at", nargs="*", default=[], metavar="STEP:WHAT", help="what rank 0 does before that step, once")
parser.add_argument("--told", action="store_true", help="rank 0 tells the others how large inputs are")
parser.add_argument("--cache", type=Path, help="below which the data cache is")
args = parser.parse_args()


def once(name: str) -> bool:
    """True for the first process of this job that asks."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(f"{args.reads}.{name}", os.O_CREAT | os.O_EXCL))
        return True
    return False


def in_producer() -> bool:
    return json.loads(os.environ.get("REGROW_WORKER_ENV", "{}")).get("producer") is not None


def wrote(index: int) -> None:
    log = os.open(args.reads, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(log, f"{os.getpid()} {'producer' if in_producer() else 'worker'} {index}\n".encode())
    os.close(log)


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take their time, with random augmentations."""

    def __init__(self, count: int, size: float) -> None:
        self.inputs = size * torch.randn(count, 16, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == args.bad:
            raise ValueError(f"sample {index} is broken")
        wrote(index)
        if index in args.producer_dies_at and in_producer() and once(f"died-{index}"):
            os.kill(os.getppid() if args.workers else os.getpid(), signal.SIGKILL)
        time.sleep(args.sample_s)
        x = self.inputs[index] + 0.1 * torch.randn(16)
        return x, x.sum(0, keepdim=True).sin()


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Different samples each time that it is read: only what was kept can be had again."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        numbers = torch.Generator().manual_seed(int.from_bytes(os.urandom(6), "little"))
        while True:
            wrote(0)
            x = torch.randn(16, generator=numbers)
            yield x, x.sum(0, keepdim=True).sin()


def producer_pid() -> int:
    """Of the producer, waited for: the first one may not listen yet, nor the successor of one that was killed."""
    where = json.loads(os.environ["REGROW_WORKER_ENV"])["socket_dir"]
    deadline = time.monotonic() + 60.0
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(unix_address(f"{where}/data-0"))
                return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def entries() -> list[Path]:
    return sorted(args.cache.rglob("*.entry"))


def until_idle() -> None:
    """Returns when the producer has made all that there is to make."""
    deadline = time.monotonic() + 120.0
    while len({path.name for path in entries()}) < shares * args.steps:
        if time.monotonic() > deadline:
            sys.exit("the producer does not make all entries")
        time.sleep(0.01)


def until_there(file: Path) -> None:
    """Returns when the test has made this file."""
    deadline = time.monotonic() + 120.0
    while not file.exists():
        if time.monotonic() > deadline:
            sys.exit(f"nobody makes {file}")
        time.sleep(0.01)


def do(what: str) -> None:
    print(f"now {what}", flush=True)
    if what == "idle":
        until_idle()
    elif what.startswith("wait-"):
        until_there(Path(what.removeprefix("wait-")))
    elif what in ("kill", "stop"):
        os.kill(producer_pid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    else:
        until_idle()
        for path in entries():
            whole = bytearray(path.read_bytes())
            whole[len(whole) // 2] ^= 4
            draft = path.with_suffix(".spoilt")
            draft.write_bytes(whole[: len(whole) // 2] if what == "truncate" else whole)
            draft.replace(path)


torch.set_num_threads(1)
session = regrow.init(seed=3)
shares = args.microbatches or session.world_size
per_step = args.batch * shares
size = torch.tensor([3.0 if args.told and session.rank == 0 and not in_producer() else 1.0])
if args.told:
    torch.distributed.broadcast(size, 0)
data: Dataset[tuple[torch.Tensor, torch.Tensor]] = (
    Stream() if args.loader == "iterable" else Slow(args.steps * per_step, float(size))
)
loader: object
if args.loader == "regrow":
    loader = regrow.DataLoader(data, batch_size=args.batch, shuffle=True, num_workers=args.workers)
else:
    plain = DataLoader(data, args.batch, shuffle=args.loader != "iterable", num_workers=args.workers)
    loader = plain if args.loader == "torch" else regrow.cached(plain)

net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
model = DistributedDataParallel(net, bucket_cap_mb=0.002)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model, optimizer)
for step in session.steps(loader, until=args.steps, microbatches=args.microbatches):
    for number, what in (word.split(":") for word in args.at):
        if session.rank == 0 and not step.rehearsal and step.number == int(number) and once(f"{number}-{what}"):
            do(what)
    with step as given:
        time.sleep(0 if step.rehearsal else args.pause)
        pause(0.0 if step.rehearsal else args.pace, step.number, args.steps)
        for micro in given if args.microbatches else ():
            x, y = micro.batch
            loss = nn.functional.mse_loss(model(x), y)
            micro.log(loss=loss, batch=float(x.double().sum()))
            micro.backward(loss)
        if not args.microbatches:
            x, y = given
            loss = nn.functional.mse_loss(model(x), y)
            step.log(loss=loss, batch=float(x.double().sum()))
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

if args.out is not None:
    args.out.with_suffix(f".{session.rank}.json").write_text(
        json.dumps({"digest": session.digest(), "rank": session.rank})
    )
