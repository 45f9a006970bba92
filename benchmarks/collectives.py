"""All-reduce of tensors in the processor's memory: gloo against regrow's own mesh, side by side on one machine.

    python benchmarks/collectives.py            # about half a minute
    python benchmarks/collectives.py --quick    # some seconds

Forks four ranks with a thread each. Both transports are formed in the same processes and called in alternation, each
first in every other round; the time is rank 0's, from a barrier of all ranks until its call has returned, and the
figure is the median over the rounds. Sizes: 40 bytes, as a loss or a gradient norm, and 26 MB, as a bucket of
gradients.
"""

import argparse
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy
from torch._C._distributed_c10d import FileStore

from regrow.comm.socket_mesh import Site, SocketMesh
from regrow.comm.torch_private.internals import AllreduceOptions, PrefixStore
from regrow.comm.transport import MeshTransport

WORLD = 4
FORM_S = 30.0
DEADLINE_S = 300.0
SIDES = ("gloo", "mesh")


class Size(NamedTuple):
    """One size of tensor: how often it is reduced a round."""

    name: str
    elements: int
    calls: int


SIZES = (Size("40b", 10, 50), Size("26mb", 6_500_000, 1))
AllReduce = Callable[[torch.Tensor], None]
Times = dict[str, dict[str, list[float]]]
"""Size to side to seconds a call, one for each round."""


class RankFailed(Exception):
    """A rank ended with an error or not at all; its traceback is on standard error."""


def measure(*, rounds: int) -> Times:
    """Fork the ranks and wait for what rank 0 has measured. Raises `RankFailed`."""
    with tempfile.TemporaryDirectory(prefix="regrow-collectives-") as folder:
        reader, writer = os.pipe()
        ranks = [_fork(rank, folder, rounds, writer) for rank in range(WORLD)]
        os.close(writer)
        try:
            with os.fdopen(reader, "rb") as pipe:
                text = pipe.read() if select.select([pipe], [], [], DEADLINE_S)[0] else b""
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)  # it has ended, or has had its time; the number is its until the wait
                os.waitpid(pid, 0)
    if not text:
        raise RankFailed("no times came from rank 0")
    times: Times = json.loads(text)
    return times


def _fork(rank: int, folder: str, rounds: int, writer: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    if rank != 0:
        os.close(writer)  # so that the end of the pipe is the end of rank 0
    try:
        times = _rank(rank, folder, rounds)
        if rank == 0:
            os.write(writer, json.dumps(times).encode())
        code = 0
    except BaseException:  # noqa: BLE001  whatever it is, it ends this process and is shown
        traceback.print_exc()
    os._exit(code)  # not through the interpreter's end: gloo's threads would be torn down by it


def _rank(rank: int, folder: str, rounds: int) -> Times:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    keys = FileStore(f"{folder}/keys", -1)
    gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", keys), rank, WORLD, timedelta(seconds=FORM_S))
    mesh = MeshTransport(SocketMesh(PrefixStore("mesh", keys), "all", rank, WORLD, Site(folder, "127.0.0.1", "token")))
    mesh.form(FORM_S)
    options = AllreduceOptions()

    def by_gloo(tensor: torch.Tensor) -> None:
        gloo.allreduce([tensor], options).wait()

    def by_mesh(tensor: torch.Tensor) -> None:
        mesh.call("allreduce", ([tensor], options), {}).wait()

    def barrier() -> None:
        mesh.call("barrier", (), {}).wait()

    sides: dict[str, AllReduce] = {"gloo": by_gloo, "mesh": by_mesh}
    _check(sides)
    times: Times = {size.name: {side: [] for side in SIDES} for size in SIZES}
    for number in range(rounds + 1):  # the first is not counted: it makes connections and memory
        order = SIDES if number % 2 else SIDES[::-1]
        for size in SIZES:
            for side in order:
                seconds = _time(sides[side], size, barrier)
                if number:
                    times[size.name][side].append(seconds)
    barrier()
    return times


def _check(sides: dict[str, AllReduce]) -> None:
    given = torch.randn(100_000)
    sums = []
    for reduce in sides.values():
        sums.append(given.clone())
        reduce(sums[-1])
    torch.testing.assert_close(sums[0], sums[1])


def _time(reduce: AllReduce, size: Size, barrier: Callable[[], None]) -> float:
    tensor = torch.ones(size.elements)
    barrier()
    start = time.monotonic()
    for _ in range(size.calls):
        reduce(tensor)
    return (time.monotonic() - start) / size.calls


def show(times: Times, console: Console) -> None:
    """Print a row for each size."""
    rounds = len(times[SIZES[0].name][SIDES[0]])
    table = Table(title=f"all-reduce between {WORLD} processes: median of {rounds} rounds in ms")
    for column in ("size", *SIDES, "gloo / mesh"):
        table.add_column(column, justify="left" if column == "size" else "right", no_wrap=True)
    for size in SIZES:
        gloo, mesh = (1000 * median(times[size.name][side]) for side in SIDES)
        table.add_row(size.name, f"{gloo:.2f}", f"{mesh:.2f}", f"{gloo / mesh:.1f}")
    console.print(table)


def figures(times: Times) -> dict[str, float]:
    """The numbers for `--json`: median milliseconds a call, by side and size."""
    return {f"{side}_{size.name}_ms": 1000 * median(times[size.name][side]) for size in SIZES for side in SIDES}


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="how often each side has its turn")
    parser.add_argument("--quick", action="store_true", help="8 rounds")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    try:
        times = measure(rounds=8 if args.quick else max(1, args.rounds))
    except RankFailed as failed:
        print(f"collectives.py: {failed}", file=sys.stderr)
        return 1
    show(times, Console())
    tell("collectives", figures(times), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
