"""Part 8: checks that the abort of a communicator returns if one rank never replays its captured all-reduce."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from gpu_parts.jobs import LIMIT_S, tell
from regrow.comm.nccl import settle_environment
from regrow.comm.torch_private.nccl_group import NOTHING, Communicator, make_communicator

RANKS = 2
ABORT_S = 15.0


def connected(rank: int, folder: Path) -> Communicator:
    """A communicator that has run one sum of its own."""
    settle_environment(keep=False)
    torch.cuda.set_device(0)
    store = FileStore(str(folder / "store"), RANKS)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    made = make_communicator(store, rank, RANKS, LIMIT_S, NOTHING)
    made.group.allreduce([torch.ones(8, device="cuda")]).wait()
    torch.cuda.synchronize()
    return made


def captured(made: Communicator, total: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of one all-reduce."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.group.allreduce([total]).wait()
    return graph


def play(rank: int, folder: Path) -> None:
    """Replay and abort on rank 0; rank 1 replays nothing, and waits until that is over."""
    made = connected(rank, folder)
    total = torch.ones(1 << 20, device="cuda")
    graph = captured(made, total)
    graph.replay()
    torch.cuda.synchronize()
    if rank:
        sys.stdin.read()
        os._exit(0)
    tell(captured=True, replayed_together=float(total[0]) == RANKS)
    graph.replay()
    time.sleep(1.0)
    began = time.monotonic()
    made.begin_abort()
    ended = made.await_abort(ABORT_S)
    tell(abort_ended=ended, abort_s=round(time.monotonic() - began, 2))
    drained = threading.Thread(target=torch.cuda.synchronize, daemon=True)
    drained.start()
    drained.join(5.0)
    tell(device_free=not drained.is_alive())
    os._exit(0 if ended and not drained.is_alive() else 1)


def main() -> int:
    """Run both ranks, and report whether rank 0's abort returned."""
    folder = Path(os.environ["REGROW_HOME"])
    if len(sys.argv) > 1:
        play(int(sys.argv[1]), folder)
    command = [sys.executable, __file__]
    other = subprocess.Popen([*command, "1"], stdin=subprocess.PIPE)
    try:
        return subprocess.run([*command, "0"], timeout=LIMIT_S - 5, check=False).returncode
    finally:
        other.kill()
        other.wait(timeout=10)


if __name__ == "__main__":
    sys.exit(main())
