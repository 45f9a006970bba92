"""A small DDP training with an odd habit, named by `--habit`; each rank writes the sum of its parameters at the end."""

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--habit", default="none")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--hold", default="", help="wait at step 4 until there is this file")
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

if args.habit == "closes-all":
    os.closerange(3, 4096)

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import regrow  # noqa: E402

torch.set_num_threads(1)
session = regrow.init(seed=3)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
session.protect(model, optimizer)
children: list[int] = []
kept = None
if args.habit == "shared-memory":
    kept = SharedMemory(name=f"odd-{args.out.name}-{os.getpid()}", create=True, size=1 << 20)


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * number + session.rank))


def said(word: str) -> None:
    print(word, flush=True)


def fork(then: str) -> None:
    """A child of the script's own that ends in the given way, or outlives this process."""
    pid = os.fork()
    if pid:
        children.append(pid)
        return
    if then == "exits":
        sys.exit(0)
    if then == "raises":
        raise RuntimeError("the child's own")
    if then == "returns":
        return
    if then == "outlives":
        signal.alarm(120)
        while os.getppid() != 1 and not Path(f"{args.out}.over").exists():
            time.sleep(0.05)
    os._exit(0)


def work(number: int) -> None:
    sys.exit(number)


def do(habit: str, step: int) -> None:
    if habit.startswith("fork-") and step == 2:
        fork(habit.removeprefix("fork-"))
        for pid in children if habit != "fork-outlives" else []:
            os.waitpid(pid, 0)
    if habit == "processes" and step == 2:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=work, args=(number,)) for number in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if habit == "programs" and step == 2:
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        assert os.system(f"{sys.executable} -c 'raise SystemExit(0)'") == 0


for step in session.steps(batch, until=args.steps):
    with step as x:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if step.committed:
        do(args.habit, step.number)
        if children and os.getpid() in children:
            break
        if session.is_main:
            said(f"step {step.number}")
        time.sleep(args.pause)
        deadline = time.monotonic() + 120.0
        while args.hold and step.number == 4 and not Path(args.hold).exists() and time.monotonic() < deadline:
            time.sleep(0.02)

if kept is not None:
    kept.close()
    kept.unlink()
parameters = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
Path(f"{args.out}.{session.rank}").write_text(str(zlib.crc32(parameters)))
if args.habit == "thread-stays":
    threading.Thread(target=threading.Event().wait, args=(600,), name="upload").start()
