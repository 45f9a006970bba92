"""All-reduce of CPU tensors: gloo against regrow's own transport, side by side on one machine.

    python benchmarks/collectives.py            # some minutes
    python benchmarks/collectives.py --quick    # one to two minutes

Forks 2, 4, 8, 16 and 32 ranks with a thread each. The transports are set up in the same processes and called in turns,
in alternating order; the time is rank 0's, from a barrier of all ranks until its call returns, and the figure is the
median over the rounds. Sizes: 1 KB, as a loss or a gradient norm, 1 MB, and 100 MB, as several buckets of gradients.
Above 16 ranks regrow communicates in rounds with a few peers; `direct` has each rank communicate with all others.

    python benchmarks/collectives.py --before ../before --worlds 2 4 8 16

adds the transport of another checkout of this repository, in the same processes and turns.
"""

import argparse
import importlib
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
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy
from torch._C._distributed_c10d import FileStore

from regrow.comm.links import Links, Site
from regrow.comm.socket_mesh import SocketMesh
from regrow.comm.torch_private.internals import AllreduceOptions, PrefixStore
from regrow.comm.transport import MeshTransport

WORLDS = (2, 4, 8, 16, 32)
FORM_S = 30.0
DEADLINE_S = 300.0
COMPARED = ("gloo", "before")
"""The sides with which the mesh is compared."""
MANY = 1 << 20


class Size(NamedTuple):
    """One size of tensor, with its number of reductions a round."""

    name: str
    elements: int
    calls: int


SIZES = (Size("1kb", 256, 40), Size("1mb", 262_144, 4), Size("100mb", 26_214_400, 1))
AllReduce = Callable[[torch.Tensor], None]
Times = dict[str, dict[str, list[float]]]
"""Size to side to seconds a call, one for each round."""


class RankFailed(Exception):
    """A rank failed or did not end; its traceback is on standard error."""


def measure(world: int, *, rounds: int, take: "Callable[[int, int, str, int], Times] | None" = None) -> Times:
    """Fork the ranks and return rank 0's times.

    Args:
        world: ranks.
        rounds: number of turns of each side.
        take: runs one rank, given its number, the world size, a folder and the rounds.

    Raises:
        RankFailed: rank 0 sent no times.
    """
    with tempfile.TemporaryDirectory(prefix="regrow-collectives-") as folder:
        reader, writer = os.pipe()
        ranks = [_fork(rank, world, folder, rounds, writer, take or _rank) for rank in range(world)]
        os.close(writer)
        try:
            with os.fdopen(reader, "rb") as pipe:
                text = pipe.read() if select.select([pipe], [], [], DEADLINE_S)[0] else b""
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)  # it has ended or its time is up; the pid is valid until it is waited for
                os.waitpid(pid, 0)
    if not text:
        raise RankFailed("no times came from rank 0")
    times: Times = json.loads(text)
    return times


def _fork(
    rank: int, world: int, folder: str, rounds: int, writer: int, take: "Callable[[int, int, str, int], Times]"
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    if rank != 0:
        os.close(writer)  # so that the pipe ends when rank 0 ends
    try:
        times = take(rank, world, folder, rounds)
        if rank == 0:
            os.write(writer, json.dumps(times).encode())
        code = 0
    except BaseException:  # noqa: BLE001  whatever it is, it ends this process and is shown
        traceback.print_exc()
    os._exit(code)  # skips the interpreter's shutdown, which would destroy gloo's threads


def _rank(rank: int, world: int, folder: str, rounds: int, before: Path | None = None) -> Times:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    keys = FileStore(f"{folder}/keys", -1)
    gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", keys), rank, world, timedelta(seconds=FORM_S))
    site = Site(folder, "127.0.0.1", "token")
    mesh = MeshTransport(SocketMesh(Links(PrefixStore("mesh", keys), "all", rank, world, site)))
    direct = MeshTransport(SocketMesh(Links(PrefixStore("direct", keys), "all", rank, world, site)), most_direct=MANY)
    transports = {"mesh": mesh, "direct": direct}
    if before is not None:
        transports["before"] = transport_of(before, PrefixStore("before", keys), rank, world, folder)
    for transport in transports.values():
        transport.form(FORM_S)
    options = AllreduceOptions()

    def by_gloo(tensor: torch.Tensor) -> None:
        gloo.allreduce([tensor], options).wait()

    def by(transport: MeshTransport, tensor: torch.Tensor) -> None:
        transport.call("allreduce", ([tensor], options), {}).wait()

    def barrier() -> None:
        mesh.call("barrier", (), {}).wait()

    ours = {side: partial(by, transport) for side, transport in transports.items()}
    return in_turns({"gloo": by_gloo, **ours}, barrier, rounds)


def transport_of(checkout: Path, keys: Any, rank: int, world: int, folder: str) -> Any:
    """The transport of another checkout, whose package is loaded beside the present one."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "regrow"}
    source = checkout / "packages" / "regrow" / "src"
    sys.path.insert(0, str(source if source.is_dir() else checkout / "src"))  # until decision 0086
    try:
        meshes = importlib.import_module("regrow.comm.socket_mesh")
        transports = importlib.import_module("regrow.comm.transport")
        try:
            links = importlib.import_module("regrow.comm.links")
        except ModuleNotFoundError:  # until decision 0032 a mesh made its own connections
            mesh = meshes.SocketMesh(keys, "all", rank, world, meshes.Site(folder, "127.0.0.1", "token"))
        else:
            site = links.Site(folder, "127.0.0.1", "token")
            mesh = meshes.SocketMesh(links.Links(keys, "all", rank, world, site))
        return transports.MeshTransport(mesh)
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.partition(".")[0] == "regrow"]:
            del sys.modules[name]
        sys.modules.update(ours)


def in_turns(sides: dict[str, AllReduce], barrier: Callable[[], None], rounds: int) -> Times:
    """One rank's times of each side, in alternating order."""
    _check(sides)
    times: Times = {size.name: {side: [] for side in sides} for size in SIZES}
    for number in range(rounds + 1):  # the first is not counted: it sets up connections and memory
        order = list(sides) if number % 2 else [*sides][::-1]
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
    for other in sums[1:]:
        torch.testing.assert_close(sums[0], other)


def _time(reduce: AllReduce, size: Size, barrier: Callable[[], None]) -> float:
    tensor = torch.ones(size.elements)
    barrier()
    start = time.monotonic()
    for _ in range(size.calls):
        reduce(tensor)
    return (time.monotonic() - start) / size.calls


def show(found: dict[int, Times], console: Console) -> None:
    """Print a row for each world and size."""
    sides = _sides(found)
    table = Table(title="all-reduce: medians in ms")
    for column in ("ranks", "size", *sides, *(f"of {side}" for side in sides if side in COMPARED)):
        table.add_column(column, justify="left" if column == "size" else "right", no_wrap=True)
    for world, times in found.items():
        for size in SIZES:
            row = [f"{1000 * median(times[size.name][side]):.2f}" for side in sides]
            row += [f"{_ratio(times[size.name], side):.2f}" for side in sides if side in COMPARED]
            table.add_row(str(world), size.name, *row)
    console.print(table)


def _sides(found: dict[int, Times]) -> list[str]:
    return list(next(iter(found.values()))[SIZES[0].name])


def _ratio(times: dict[str, list[float]], side: str) -> float:
    """Ratio of the mesh's time to another side's: the median of the rounds' ratios."""
    return median(ours / other for ours, other in zip(times["mesh"], times[side], strict=True))


def figures(found: dict[int, Times]) -> dict[str, float]:
    """The figures for `--json`: median milliseconds a call, by side, ranks and size; and ratios to another checkout."""
    sides = _sides(found)
    milliseconds = {
        f"{side}_{world}_{size.name}_ms": 1000 * median(times[size.name][side])
        for world, times in found.items()
        for size in SIZES
        for side in sides
    }
    if "before" in sides:
        for world, times in found.items():
            for size in SIZES:
                milliseconds[f"of_before_{world}_{size.name}"] = _ratio(times[size.name], "before")
    return milliseconds


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often each side has its turn")
    parser.add_argument("--quick", action="store_true", help="4 rounds")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="how many ranks")
    parser.add_argument("--before", type=Path, help="another checkout, whose transport has its turns too")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    try:
        rounds = 4 if args.quick else max(1, args.rounds)
        take = partial(_rank, before=args.before)
        found = {world: measure(world, rounds=rounds, take=take) for world in args.worlds}
    except RankFailed as failed:
        print(f"collectives.py: {failed}", file=sys.stderr)
        return 1
    show(found, Console())
    tell("collectives", figures(found), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
