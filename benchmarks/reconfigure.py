"""Groups that are ended and formed again: torch's own reconfigure over gloo against regrow's mesh, in one run.

    python benchmarks/reconfigure.py             # 4, 16 and 64 processes, three rounds: 20 minutes
    python benchmarks/reconfigure.py --quick     # 4 and 16 processes, each once: 5 minutes

torch has `reconfigure` since 2.14. With an older version only regrow's side runs, and a sentence says so.

W processes form a group, all reduce once, and all but one reduce again. That one is killed (`kill`), or lives and
never calls (`stuck`); then all others are ordered to halt, as by the coordinator. Seconds, each of the last one:

* `form`: from the start signal until the first all-reduce is done.
* `ended`: from the fault until the second all-reduce has ended, with any result.
* `left`: number of processes whose call ended only by its own limit (`--limit`), not by the halt.
* `anew`: from the next signal, in another generation and with another process in place of the lost one, until an
    all-reduce is done, or all have given up.
* `formed`: 1 if that all-reduce was done.
* `same_bits`: 1 if the sum of random numbers had the same bits on all ranks, before the fault and after it.

`unformed`: one is killed before it connects, when the others connect; `vanished`: it is killed after its address is in
the store, to which they connect. `ended`, from the halt on, and `left` apply; `vanished` is tried with 4 processes.

The sides of torch differ in their reaction to a halt. `abort` calls `abort()` from another thread, which torch
documents as the end of all operations if the backend supports it. `alone` does that too, and a process whose all-reduce
has failed reconfigures to a group of itself, which closes its connections, and so passes the failure on. `lazy` is
`alone` with connections made when they are needed (`TORCH_GLOO_LAZY_INIT=1`, as `regrow run` starts large worlds); it
is tried with 4 processes and a kill. Handles and addresses go through regrow's store on all sides, served by an agent
process for every 8 ranks: no rank is a root. While a group forms, a halt closes the store.
"""

import argparse
import functools
import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from forking import PER_NODE, TOKEN, Child, Failed, Parent, agents, forked
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy

from regrow.comm.links import Links, Site
from regrow.comm.socket_mesh import SocketMesh
from regrow.comm.store import AgentStore
from regrow.comm.transport import MeshTransport
from regrow.core.errors import RegrowError
from regrow.core.ids import Seconds

WORLDS, QUICK_WORLDS = (4, 16, 64), (4, 16)
ROUNDS, LIMIT_S = 3, 10.0
ELEMENTS = 10_007
SIDES = ("mesh", "abort", "alone", "lazy")
FAULTS = ("kill", "stuck", "unformed", "vanished")
SLOW_WORLD = 4
"""Number of processes in the trials that take several limits, `lazy` and `vanished`."""
STANDS_S = 0.3
"""Pause after all but one have begun their all-reduce, and before the fault."""


class Side(Protocol):
    """The group of one rank."""

    def publish(self, generation: int) -> None:
        """Announce in the store that this rank will be in the group of this generation."""

    def connect(self, vanish: bool = False) -> None:
        """Join the group; with `vanish`, be killed once the address is published."""

    def reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks."""

    def halt(self, forming: bool) -> None:
        """Abort blocked calls, from another thread."""

    def leave(self) -> None:
        """End the generation on the training thread."""


class VanishingStore(AgentStore):
    """A store client whose process can end as soon as its address is published."""

    vanishes = False

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        super().set(key, value)
        if self.vanishes:
            os.kill(os.getpid(), signal.SIGKILL)


class Mesh:
    """The transport of regrow for CPU tensors.

    Args:
        place: address of the agent's store.
        limit: of one collective.
    """

    def __init__(self, place: str, rank: int, world: int, limit: Seconds) -> None:
        self._place, self._rank, self._world, self._limit = place, rank, world, limit
        self._site = Site(tempfile.gettempdir(), "127.0.0.1", TOKEN)

    def publish(self, generation: int) -> None:
        """Listen and publish the address; connections are opened when they are needed."""
        self._store = AgentStore(self._place, TOKEN, f"g1/{generation}/")
        links = Links(self._store, "mesh/w", self._rank, self._world, self._site)
        self._transport = MeshTransport(SocketMesh(links), self._limit)
        self._transport.form(self._limit)

    def connect(self, vanish: bool = False) -> None:
        """Only carry out `vanish`: connections are opened when they are needed."""
        if vanish:
            os.kill(os.getpid(), signal.SIGKILL)

    def reduce(self, tensor: torch.Tensor) -> None:
        """Reduce by one call of the transport."""
        self._transport.call("allreduce", ([tensor],), {}).wait()

    def halt(self, forming: bool) -> None:
        """Close the connections of the group and of the store."""
        self._store.close()
        self._transport.halt()

    def leave(self) -> None:
        """Free all resources."""
        self._transport.halt()
        self._transport.close()
        self._store.close()


class Reconfigured:
    """A gloo group of torch, created for `reconfigure`.

    Args:
        place: address of the agent's store.
        limit: of one collective, and of a reconfigure.
        leaves: True to close its connections once a collective has failed.
    """

    def __init__(self, place: str, rank: int, world: int, limit: Seconds, *, leaves: bool) -> None:
        self._rank, self._world, self._leaves = rank, world, leaves
        self._limit = timedelta(seconds=limit)
        self._store = VanishingStore(place, TOKEN, "g1/")  # one for all generations, since the group keeps it
        making: Any = dist.ProcessGroupGloo
        self._group = making(self._store, rank, world, self._limit, enable_reconfigure=True)
        self._generation = 0

    def publish(self, generation: int) -> None:
        """Write the handle to the store."""
        self._generation = generation
        self._store.set(f"h{generation}/{self._rank}", self._group.get_reconfigure_handle())

    def connect(self, vanish: bool = False) -> None:
        """Read all handles, and reconfigure."""
        self._store.vanishes = vanish
        keys = [f"h{self._generation}/{rank}" for rank in range(self._world)]
        self._reconfigure(self._generation, [value.decode() for value in self._store.multi_get(keys)])

    def _reconfigure(self, uuid: int, handles: list[str]) -> None:
        options = vars(c10d)["ReconfigureOptions"]()
        options.uuid, options.handles, options.timeout = uuid, handles, self._limit
        self._group.reconfigure(options).wait()

    def reduce(self, tensor: torch.Tensor) -> None:
        """Reduce by gloo's own call."""
        self._group.allreduce([tensor], dist.AllreduceOptions()).wait()

    def halt(self, forming: bool) -> None:
        """Abort all that the side can abort."""
        if forming:
            self._store.close()
        self._group.abort()

    def leave(self) -> None:
        """Reconfigure to a group of this rank alone, if the side does so."""
        if self._leaves:
            self._reconfigure(1_000_000 + self._rank, [self._group.get_reconfigure_handle()])


def make(side: str, place: str, rank: int, world: int, limit: Seconds) -> Side:
    """This side's group of one rank."""
    if side == "mesh":
        return Mesh(place, rank, world, limit)
    return Reconfigured(place, rank, world, limit, leaves=side != "abort")


# --- one rank -------------------------------------------------------------------------------------------------------


def rank_of(rank: int, world: int, side: str, place: str, limit: Seconds) -> Callable[[Parent], None]:
    """One rank, which carries out the parent's commands."""

    def body(parent: Parent) -> None:
        if side == "lazy":
            os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        group = make(side, place, rank, world, limit)
        parent.say("ready")
        while (order := parent.hear()) is not None:
            if order[0] == "form":
                parent.say(tried(functools.partial(formed, group, rank, order[1])))
            elif order[0] == "publish":
                group.publish(order[1])
                parent.say("published")
            elif order[0] == "vanish":
                group.connect(vanish=True)
            else:
                until_halted(group, parent, order[0] == "connect")

    return body


def tried(call: Callable[[], str]) -> tuple[Seconds, str]:
    """Time at which a call ended, and its result or error."""
    try:
        said = call()
    except (RuntimeError, RegrowError) as error:
        said = f"failed: {error}"
    return time.monotonic(), said


def formed(group: Side, rank: int, generation: int) -> str:
    """The digest of a sum over all ranks of a new group."""
    group.publish(generation)
    group.connect()
    tensor = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))
    group.reduce(tensor)
    return hashlib.blake2b(tensor.numpy().tobytes(), digest_size=8).hexdigest()


def until_halted(group: Side, parent: Parent, forming: bool) -> None:
    """Start to connect, or only to reduce, until the parent's next message halts it; reports time and outcome."""

    def halt() -> None:
        parent.hear()
        group.halt(forming)

    def call() -> str:
        if forming:
            group.connect()
        group.reduce(torch.ones(ELEMENTS))
        return ""

    halts = threading.Thread(target=halt, daemon=True)
    halts.start()
    parent.say("begins")
    ended = tried(call)
    if not forming:
        group.leave()
    parent.say(ended)
    halts.join()


# --- one trial ------------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """Times of one trial, in seconds; NaN for a part that it did not have."""

    form: Seconds
    ended: Seconds
    left: float
    anew: Seconds
    formed: float
    same_bits: float


def trial(world: int, side: str, fault: str, limit: Seconds) -> Trial:
    """One group, its fault, and the next group."""
    nan, lost = float("nan"), world // 2
    with agents(max(1, world // PER_NODE), world) as (stores, _):
        seats = [*range(world), lost]  # the last one takes the lost one's place
        bodies = [rank_of(rank, world, side, stores[rank * len(stores) // world], limit) for rank in seats]
        with forked(*bodies) as ranks:
            for child in ranks:
                child.hear()
            others = [child for rank, child in enumerate(ranks[:world]) if rank != lost]
            if fault in ("unformed", "vanished"):
                told(ranks[:world], "publish", 1, "published")
                ended, left = strike(others, ranks[lost], "connect", fault, limit)
                return Trial(nan, ended, left, nan, nan, nan)
            form, before = form_all(ranks[:world], 1)
            if len(before) != 1:
                raise Failed(f"{side}: the first group was not formed, or its ranks differ: {sorted(before)}")
            ended, left = strike(others, ranks[lost], "reduce", fault, limit)
            anew, after = form_all([*others, ranks[-1]], 2)
    whole = not any(said.startswith("failed") for said in after)
    return Trial(form, ended, left, anew, float(whole), float(before == after) if whole else nan)


def told(children: list[Child], order: str, generation: int, word: str) -> None:
    """Send an order to all, and wait until each has answered with `word`."""
    for child in children:
        child.tell([order, generation])
    for child in children:
        if (said := child.hear()) != word:
            raise Failed(f"{order}: {said}")


def form_all(children: list[Child], generation: int) -> tuple[Seconds, set[str]]:
    """Time until all have summed in a group of this generation, or failed; the digests and errors."""
    start = time.monotonic()
    for child in children:
        child.tell(["form", generation])
    ends = [child.hear() for child in children]
    return max(end for end, _ in ends) - start, {said for _, said in ends}


def strike(others: list[Child], lost: Child, order: str, fault: str, limit: Seconds) -> tuple[Seconds, float]:
    """Start all but one, and inject the fault: time from it until all have ended, and how many by their limit."""
    told(others, order, 0, "begins")
    time.sleep(STANDS_S)
    if fault == "vanished":
        lost.tell(["vanish", 0])
        time.sleep(STANDS_S)
    start = time.monotonic()
    if fault in ("kill", "unformed"):
        os.kill(lost.pid, signal.SIGKILL)
    for child in others:
        child.tell("halt")
    ends = [child.hear() for child in others]
    if not all(said for _, said in ends):
        raise Failed(f"{fault}: a call that needed the lost rank was done")
    spans = [end - start for end, _ in ends]
    return max(spans), float(sum(span > limit - 2 * STANDS_S for span in spans))


# --- the report -----------------------------------------------------------------------------------------------------


def show(rows: dict[tuple[int, str, str], Trial], console: Console) -> None:
    """A row for each world, fault and side."""
    table = Table(title="a group's end and the next one: seconds, medians")
    for column in ("ranks", "fault", "side", "form", "ended", "left", "anew", "formed", "same bits"):
        table.add_column(column, justify="left" if column in ("fault", "side") else "right", no_wrap=True)
    for (world, fault, side), row in rows.items():
        shown = [f"{row.form:.2f}", f"{row.ended:.3f}", f"{row.left:.0f}", f"{row.anew:.2f}"]
        shown += [f"{row.formed:.0f}", f"{row.same_bits:.0f}"]
        table.add_row(str(world), fault, side, *("" if each == "nan" else each for each in shown))
    console.print(table)


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smaller worlds, each once")
    parser.add_argument("--worlds", type=int, nargs="+", help="these numbers of processes instead")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="time limit of a collective of torch's, in seconds"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    sides = SIDES if hasattr(c10d, "ReconfigureOptions") else SIDES[:1]
    if len(sides) == 1:
        print(f"torch {torch.__version__} has no reconfigure, which came with 2.14: only regrow's mesh is measured")
    worlds = args.worlds or (QUICK_WORLDS if args.quick else WORLDS)
    found: dict[tuple[int, str, str], list[Trial]] = {}
    try:
        for number in range(1 if args.quick else ROUNDS):
            for world in worlds:
                for fault in FAULTS:
                    for side in sides if number % 2 else sides[::-1]:
                        slow = fault == "vanished" or side == "lazy"
                        if slow and (number or world > SLOW_WORLD or (side == "lazy" and fault != "kill")):
                            continue
                        found.setdefault((world, fault, side), []).append(trial(world, side, fault, args.limit))
    except Failed as failed:
        print(f"reconfigure.py: {failed}", file=sys.stderr)
        return 1
    rows = {
        key: Trial(*map(median, zip(*found[key], strict=True)))
        for world in worlds
        for fault in FAULTS
        for side in sides
        if (key := (world, fault, side)) in found
    }
    show(rows, Console())
    figures = {
        f"{side}_{fault}_{name}_{world}": value
        for (world, fault, side), row in rows.items()
        for name, value in zip(Trial._fields, row, strict=True)
        if value == value
    }
    tell("reconfigure", figures, args.json, limit_s=args.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
