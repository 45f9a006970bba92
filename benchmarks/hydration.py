"""Speed at which a newcomer receives its state from healthy ranks, against a plain socket and a memory copy.

    python benchmarks/hydration.py            # 0.1, 1 and 4 GB, about 2 minutes
    python benchmarks/hydration.py --quick    # 0.1 and 1 GB, half a minute

Holders and receivers are separate processes with one torch thread each. The plain socket is of the same kind, with the
same buffers, between two processes, from and into allocated memory, without checksums. `4 flows`: one holder read over
four connections, against four plain sockets with a thread at each end, and four that send each MiB with a checksum and
verify it (`checked`). `--transport` is `regrow run`'s `--hydration`; with `memory`, bytes are read directly from the
holder's memory. All sides run in turns; figures are medians, `of_4_...` of ratios within a turn; GB are 10^9 bytes.
*Beyond the state* is the peak memory of a process in addition to its tensors.

Exits with 1 if one holder reaches less than 70 % of the plain socket, or a side takes more than 256 MiB beyond.
"""

import argparse
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from signal import SIGKILL
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

from regrow.core.ids import Generation, StepNo
from regrow.core.net import widen
from regrow.hydration import flows
from regrow.hydration.client import Hydration
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.plan import CHUNK_BYTES
from regrow.hydration.server import HydrationServer
from regrow.hydration.streams import DIGEST_BYTES, checksum

TOKEN, STEP, GENERATION = "benchmark", StepNo(7), Generation(3)
LAYER = 16 << 20
"""Bytes of the larger tensors; as many small ones are between them."""
PATIENCE = 120.0
FLOWS = 4


class State:
    """A source and a sink of state: tensors as in a transformer, large ones and biases."""

    def __init__(self, nbytes: int, *, value: float) -> None:
        layers = max(1, round(nbytes / (LAYER + 4096)))
        self._tensors = {f"layers.{at:04}.weight": torch.full((LAYER // 4,), value + at) for at in range(layers)}
        self._tensors |= {f"layers.{at:04}.bias": torch.full((1024,), value - at) for at in range(layers)}
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def inventory(self, step: StepNo) -> Inventory:
        """Inventory of the state."""
        return Inventory(step, [TensorEntry.of(name, each) for name, each in sorted(self._tensors.items())], b"")

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name."""
        return self._tensors[name]

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        """All tensors, to be written."""
        return self._tensors

    def finish(self) -> None:
        """Do nothing."""

    def parts(self) -> list[memoryview]:
        """All bytes."""
        return [tensor.view(torch.uint8).numpy().data for tensor in self._tensors.values()]


class Process:
    """A forked process that runs `work(pipe)`; killed at the end."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.pipe.close()
                work(theirs)
            except BaseException:  # noqa: BLE001 - shown, then the process ends
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()

    def hear(self) -> Any:
        """Next message of the process."""
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError("a process of the benchmark says nothing")
        return self.pipe.recv()


def resident() -> int:
    """Private memory of this process, in bytes; pages shared by forks count only in their creator."""
    return int(psutil.Process().memory_info().rss)


def reset_peak() -> int:
    """Reset the peak memory of this process; returns its present memory."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident()


def peak() -> int:
    """Peak memory of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def hold(pipe: Connection, state: State, folder: Path, *, tcp: bool, transport: str) -> None:
    """Run a rank that has the state and sends it; answers each message with its memory beyond the state."""
    for tensor in state.prepare(state.inventory(STEP)).values():
        tensor.sum()  # counts the pages for this process now, not at the first reader
    nodes = 2 if tcp else 1
    with HydrationServer(state, token=TOKEN, socket_dir=folder, nodes=nodes, hydration=transport) as server:
        server.offer(GENERATION, STEP)
        before = reset_peak()
        pipe.send(server.endpoint)
        while True:
            pipe.recv()
            pipe.send(peak() - before)


def want(pipe: Connection, size: int, transport: str) -> None:
    """Run a newcomer: receive from the endpoints of a message; answer with its memory beyond the state.

    The message also has the number of connections to each holder.
    """
    state = State(size, value=-1.0)
    flows.FLOW_WORTH, flows.cores = 1, lambda: 1000
    before = reset_peak()
    pipe.send("ready")
    while True:
        endpoints, each = pipe.recv()
        flows.FLOWS = each * len(endpoints)
        Hydration(
            state,
            step=STEP,
            generation=GENERATION,
            token=TOKEN,
            endpoints=endpoints,
            deadline=time.monotonic() + PATIENCE,
            hydration=transport,
        ).run()
        pipe.send(peak() - before)


@dataclass
class Row:
    """Speeds for one size of state, in GB/s; `beyond`: bytes at the holder and at the receiver."""

    gigabytes: float
    holders: dict[int, float]
    crowd: float | None
    four_flows: float
    socket: float
    four_sockets: float
    four_checked: float
    of_sockets: float
    of_checked: float
    memcpy: float
    beyond: tuple[int, int]


Room = np.ndarray[Any, Any]


class PlainSocket:
    """A copy of the state over plain connections between two processes, each of which transfers an equal part."""

    def __init__(
        self, stack: ExitStack, state: State, folder: Path, room: Room, tcp: bool, flows: int = 1, checked: bool = False
    ) -> None:
        self._checked = checked
        if tcp:
            listener = socket.create_server(("127.0.0.1", 0))
        else:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(folder / f"plain-{state.nbytes}-{flows}-{checked}"))
            listener.listen()
        stack.enter_context(listener)
        every = state.parts()
        parts = [every[at::flows] for at in range(flows)]

        def serve(sock: socket.socket, mine: list[memoryview]) -> None:
            widen(sock)
            while sock.recv(1):
                for part in chunks(mine) if checked else mine:
                    sock.sendall(part)
                    if checked:
                        sock.sendall(checksum(part))

        def send(_: Connection) -> None:
            serving = [threading.Thread(target=serve, args=(listener.accept()[0], mine)) for mine in parts]
            for thread in serving:
                thread.start()
            for thread in serving:
                thread.join()

        stack.enter_context(Process(send))
        self._flows: list[tuple[socket.socket, memoryview, list[int]]] = []
        end = 0
        for mine in parts:
            sock = stack.enter_context(socket.socket(listener.family))
            sock.connect(listener.getsockname())
            widen(sock)
            begin, end = end, end + sum(map(len, mine))
            sizes = [len(part) for part in chunks(mine)] if checked else [end - begin]
            self._flows.append((sock, room.data[begin:end], sizes))

    def copy(self) -> None:
        """Copy the state once."""
        others = [threading.Thread(target=self._receive, args=flow) for flow in self._flows[1:]]
        for thread in others:
            thread.start()
        self._receive(*self._flows[0])
        for thread in others:
            thread.join()

    def _receive(self, sock: socket.socket, room: memoryview, sizes: list[int]) -> None:
        sock.sendall(b"1")
        at, digest = 0, bytearray(DIGEST_BYTES)
        for size in sizes:
            end = at + size
            while at < end:
                at += sock.recv_into(room[at:end])
            if self._checked and sock.recv_into(digest, DIGEST_BYTES, socket.MSG_WAITALL):
                assert checksum(room[end - size : end]) == digest


def chunks(parts: list[memoryview]) -> Iterator[memoryview]:
    """The bytes in pieces of a chunk's size."""
    for part in parts:
        yield from (part[at : at + CHUNK_BYTES] for at in range(0, len(part), CHUNK_BYTES))


class Newcomers:
    """Processes that receive the state."""

    def __init__(self, stack: ExitStack, state: State, transport: str) -> None:
        self._stack, self._transport = stack, transport
        self._state = state
        self._processes: list[Process] = []
        self.beyond = 0

    def receive(self, count: int, endpoints: list[str], flows: int = 1) -> None:
        """Receive in `count` processes at once, each the whole state from these holders; returns when all have it.

        `flows`: connections to each holder.
        """
        for process in self._processes[:count]:
            process.pipe.send((endpoints, flows))
        for process in self._processes[:count]:
            self.beyond = max(self.beyond, process.hear())

    def make(self, count: int) -> None:
        """Prepare `count` newcomers."""
        while len(self._processes) < count:
            process = self._stack.enter_context(Process(lambda pipe: want(pipe, self._state.nbytes, self._transport)))
            self._processes.append(process)
            process.hear()


def measure(gigabytes: float, rounds: int, folder: Path, *, tcp: bool, transport: str) -> Row:
    """Run all sides for one size, in turns; the first turn is left out."""
    state = State(int(gigabytes * 1e9), value=1.0)
    room = np.ones(state.nbytes, dtype=np.uint8)
    parts = [np.frombuffer(part, dtype=np.uint8) for part in state.parts()]

    def copy() -> None:
        np.concatenate(parts, out=room)

    with ExitStack() as stack:
        plain = PlainSocket(stack, state, folder, room, tcp)
        plain_flows = PlainSocket(stack, state, folder, room, tcp, flows=FLOWS)
        plain_checked = PlainSocket(stack, state, folder, room, tcp, flows=FLOWS, checked=True)
        give = partial(hold, state=state, folder=folder, tcp=tcp, transport=transport)
        holders = [stack.enter_context(Process(give)) for _ in range(3)]
        endpoints = [holder.hear() for holder in holders]
        newcomers = Newcomers(stack, state, transport)
        newcomers.make(1)
        sides: dict[str, Callable[[], None]] = {"memcpy": copy, "socket": plain.copy}
        for count in (1, 2, 3):
            sides[str(count)] = partial(newcomers.receive, 1, endpoints[:count])
        sides |= {"flows": partial(newcomers.receive, 1, endpoints[:1], FLOWS), "sockets": plain_flows.copy}
        sides["checked"] = plain_checked.copy
        if psutil.virtual_memory().available > 2.5 * state.nbytes:
            newcomers.make(3)
            sides["crowd"] = partial(newcomers.receive, 3, endpoints)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(1 + (rounds if gigabytes > 0.5 else 3 * rounds)):
            for side, run in sides.items():
                began = time.perf_counter()
                run()
                seconds[side].append(time.perf_counter() - began)
        for holder in holders:
            holder.pipe.send("memory")
        beyond = (max(holder.hear() for holder in holders), newcomers.beyond)
    speeds = {side: state.nbytes / median(times[1:]) / 1e9 for side, times in seconds.items()}
    crowd = 3 * speeds["crowd"] if "crowd" in speeds else None
    one = {count: speeds[str(count)] for count in (1, 2, 3)}
    four = (speeds["flows"], speeds["socket"], speeds["sockets"], speeds["checked"])
    of_sockets, of_checked = (
        median(other / mine for other, mine in zip(seconds[side][1:], seconds["flows"][1:], strict=True))
        for side in ("sockets", "checked")
    )
    return Row(gigabytes, one, crowd, *four, of_sockets, of_checked, speeds["memcpy"], beyond)


def show(rows: list[Row], kind: str, console: Console) -> None:
    """Print the results."""
    table = Table(title=f"Hydration over {kind}, GB/s")
    columns = ("state", "1 holder", "2 holders", "3 holders", "3 receivers", "socket", "1 holder / socket")
    for column in (*columns, "4 flows", "4 sockets", "4 flows / 4 sockets", "memcpy", "beyond the state"):
        table.add_column(column, justify="right")
    for row in rows:
        speeds = [f"{row.holders[count]:.2f}" for count in (1, 2, 3)]
        crowd = f"{row.crowd:.2f}" if row.crowd is not None else "no memory"
        share = f"{100 * row.holders[1] / row.socket:.0f} %"
        of_flows = f"{100 * row.four_flows / row.four_sockets:.0f} %"
        four = (f"{row.four_flows:.2f}", f"{row.four_sockets:.2f}", of_flows)
        beyond = " / ".join(f"{each / (1 << 20):.0f} MiB" for each in row.beyond)
        one = (f"{row.gigabytes:g} GB", *speeds, crowd, f"{row.socket:.2f}", share)
        table.add_row(*one, *four, f"{row.memcpy:.2f}", beyond)
        in_pairs = f"{row.of_sockets:.2f} of 4 sockets, {row.of_checked:.2f} of 4 checked ({row.four_checked:.2f} GB/s)"
        console.print(f"{row.gigabytes:g} GB, 4 flows in pairs: {in_pairs}")
    console.print(table)
    console.print("3 receivers: bytes of all of them, from 3 holders. Beyond the state: holder / receiver.")


def figures(rows: list[Row]) -> Iterator[tuple[str, float]]:
    """The numbers for `--json`: of the size nearest to 1 GB, and of each size."""
    for row in rows:
        kinds = {f"gbps_{count}_holder{'s' * (count > 1)}": speed for count, speed in row.holders.items()}
        kinds |= {"gbps_socket": row.socket, "gbps_memcpy": row.memcpy}
        kinds |= {"gbps_4_flows": row.four_flows, "gbps_socket_4_flows": row.four_sockets}
        kinds |= {"gbps_checked_4_flows": row.four_checked, "of_4_sockets": row.of_sockets}
        kinds["of_4_checked"] = row.of_checked
        if row.crowd is not None:
            kinds["gbps_3_receivers"] = row.crowd
        for side, beyond in zip(("holder", "receiver"), row.beyond, strict=True):
            kinds[f"beyond_{side}_mib"] = beyond / (1 << 20)
        if row is min(rows, key=lambda each: abs(each.gigabytes - 1)):
            yield from kinds.items()
        for name, value in kinds.items():
            yield f"{name}_{row.gigabytes:g}gb", value


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.1, 1.0, 4.0], metavar="GB")
    parser.add_argument("--rounds", type=int, default=5, help="of each side; thrice as many below half a GB")
    parser.add_argument("--tcp", action="store_true", help="over TCP, as between nodes, instead of unix sockets")
    parser.add_argument("--transport", choices=["sockets", "memory", "nixl"], default="sockets", help="as --hydration")
    parser.add_argument("--quick", action="store_true", help="0.1 and 1 GB, 3 rounds")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warn_if_busy()
    sizes, rounds = ([0.1, 1.0], 3) if args.quick else (args.sizes, args.rounds)
    folder = Path(tempfile.mkdtemp(prefix="regrow-hydration-"))
    try:
        rows = [measure(size, rounds, folder, tcp=args.tcp, transport=args.transport) for size in sizes]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(rows, f"{'TCP' if args.tcp else 'unix'} sockets, {args.transport}", Console())
    tell("hydration", dict(figures(rows)), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
