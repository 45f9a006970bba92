"""Rendezvous of a job's processes: regrow's store without a root against torch's TCPStore, in one run.

    python benchmarks/rendezvous.py             # two to three minutes
    python benchmarks/rendezvous.py --quick     # each size once, the largest three times

**Groups.** W processes, forked from one with torch imported, make the default group and a 2-D mesh on gloo and use
each group once; the time is from the start signal until the last one is done. All sides run in each of five rounds, in
alternating order; the figure is the median. Both stores run with gloo's connections made at once (eager), as torchrun
starts, and made when needed (`TORCH_GLOO_LAZY_INIT=1`), as `regrow run` starts in a world of this size. regrow's keys
are served by an agent process for every 8 ranks. `backend` is the `regrow` backend, which needs no gloo. TCPStore's
server looks up the name of each client; the look-up is made to fail at once, so that a slow resolver does not count.

**The store alone**, up to 4,096 ranks, 8 a node. Each rank does what a rendezvous does: it reads one key that rank 0
writes (an NCCL id), writes its address and reads those of its two neighbours, and passes a barrier (add, wait).
regrow's agents are the real ones (`agent/store/store_node.py`) with messages passed in memory and counted: requests,
connections and bytes at the busiest agent, its own workers' included. TCPStore's server is its own busiest node; the
cost of each call to it is measured at the real one through a proxy that counts, and multiplied by the number of calls.
This is checked with 16 real clients, for which the bytes must be equal.

**The generation's table**, at 1,024 and 4,096 ranks, 8 a node: the coordinator's own state machine gets the facts of
agents and workers, and its orders are encoded as by its server. `form_bytes_a_rank_N` is the traffic for the first
generation, by ranks; `start_`, `kill_` and `node_bytes_a_rank_N` the same for starting all workers, for the generation
after a kill and for the one after the loss of a node's ranks. `form_bytes_busiest_agent_a_rank_N` is the most that one
agent forwards to others.

`init_s_64` is the time of the groups as `regrow run` starts them, `tcpstore_init_s_64` as torchrun does. Comparable are
`init_s_64` with `tcpstore_lazy_init_s_64`, and `eager_init_s_64` with `tcpstore_init_s_64`. 1,024 processes and more do
not fit here: `init_s_1024` and `init_s_4096` are the CPU seconds of the busiest node's store server for the store's
part of the work: its requests times the cost of one at a real server process, measured on both sides. They include no
network and no gloo.
"""

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from forking import PER_NODE, TOKEN, Failed, Parent, agents, cpu, forked
from formation_load import FormationLoad, formations
from rich.console import Console
from rich.table import Table
from store_load import ADDRESS, KEYS, Load, TcpCosts, simulate
from targets import tell, warn_if_busy
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh

from regrow.comm.groups import Formation, Groups
from regrow.comm.links import Site
from regrow.comm.store import AgentStore
from regrow.comm.torch_private import expected_names, group_names
from regrow.core.ids import Generation, Seconds

WORLDS = (2, 4, 8, 16, 32, 64)
ROUNDS, QUICK_ROUNDS = 5, 3
SIMULATED = (64, 256, 1024, 4096)
FORMED = (1024, 4096)
SIDES = ("tcpstore", "tcpstore lazy", "regrow eager", "regrow", "backend")
FIGURES = {
    "regrow": "init_s",
    "regrow eager": "eager_init_s",
    "backend": "backend_init_s",
    "tcpstore": "tcpstore_init_s",
    "tcpstore lazy": "tcpstore_lazy_init_s",
}
"""By side: prefix of its figure's name in the JSON, before the number of ranks."""


# --- groups in real processes ---------------------------------------------------------------------------------------


def rank_of(rank: int, world: int, side: str, place: str) -> Callable[[Parent], None]:
    """One rank, which makes the groups and uses them on the parent's command."""

    def body(parent: Parent) -> None:
        if not side.endswith("eager") and side != "tcpstore":
            os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        os.environ["RES_OPTIONS"] = "attempts:0"
        parent.say("ready")
        parent.hear()
        groups = Groups()
        if side == "backend":
            site = Site(tempfile.gettempdir(), "127.0.0.1", TOKEN)
            formation = Formation(Generation(1), rank, world, place, site)
            groups.install(rank=rank, world=world, formation=formation, form_s=60.0)
        elif side.startswith("regrow"):
            group_names.watch()  # as in `comm/rendezvous.py`
            store = AgentStore(place, TOKEN, f"g1/env{world}.1/")
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        else:
            dist.init_process_group("gloo", init_method=f"tcp://{place}", rank=rank, world_size=world)
        across = 2 if world < 16 else world // 8
        mesh = init_device_mesh("cpu", (across, world // across), mesh_dim_names=("replicate", "shard"))
        total = torch.ones(1)
        for group in (None, mesh.get_group("replicate"), mesh.get_group("shard")):
            dist.all_reduce(total, group=group)
        parent.say([time.monotonic(), total.item()])
        parent.hear()  # no rank leaves before all have met
        groups.close()

    return body


def time_groups(world: int, side: str) -> Seconds:
    """Seconds from the start signal until the last rank has used all groups."""
    if side.startswith("regrow") or side == "backend":
        with agents(max(1, world // PER_NODE), world) as (stores, _):
            return _time_ranks(world, side, [stores[rank * len(stores) // world] for rank in range(world)])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return _time_ranks(world, side, [f"localhost:{port}"] * world)


def time_in_turns(world: int, rounds: int) -> dict[str, Seconds]:
    """Median of each side."""
    times: dict[str, list[Seconds]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 else SIDES[::-1]:
            times[side].append(time_groups(world, side))
    return {side: median(found) for side, found in times.items()}


def _time_ranks(world: int, side: str, places: list[str]) -> Seconds:
    with forked(*(rank_of(rank, world, side, places[rank]) for rank in range(world))) as ranks:
        for child in ranks:
            child.hear()
        start = time.monotonic()
        for child in ranks:
            child.tell("go")
        ends = [child.hear() for child in ranks]
    if {total for _, total in ends} != {float(world * world)}:
        raise Failed(f"{side}: wrong sums {ends}")
    return float(max(end for end, _ in ends) - start)


# --- cost of a request at the server --------------------------------------------------------------------------------

CLIENTS, TURNS = 4, 1500


def tcp_server(parent: Parent) -> None:
    """TCPStore's server alone in a process; reports its cost at the end."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    before = cpu()
    parent.say(server.port)
    parent.hear()
    parent.say(cpu() - before)


def cost_of_requests() -> tuple[Seconds, Seconds]:
    """CPU seconds of a server for one request: of an agent's, and of TCPStore's."""
    with agents(1, CLIENTS) as (stores, children):
        ours = [AgentStore(stores[0], TOKEN, "g1/") for _ in range(CLIENTS)]
        requests = _load(ours, gets=1)
        children[0].tell("end")
        agents_cost = children[0].hear() / requests
        for store in ours:
            store.close()
    with forked(tcp_server) as (child,):
        port = child.hear()
        requests = _load([TCPStore("127.0.0.1", port, None, False) for _ in range(CLIENTS)], gets=2)
        child.tell("end")
        return agents_cost, child.hear() / requests


def _load(stores: list[Any], gets: int) -> int:
    """Half writes and half reads by all clients at once; returns the requests, of which a read makes `gets`."""

    def play(number: int) -> None:
        for turn in range(TURNS):
            stores[number].set(f"k{number}.{turn % 50}", ADDRESS)
            stores[number].get(f"k{number}.{turn % 50}")

    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(play, range(len(stores))))
    return len(stores) * TURNS * (1 + gets)


# --- the report -----------------------------------------------------------------------------------------------------


def show_groups(times: dict[int, dict[str, Seconds]], console: Console) -> None:
    """A row for each world."""
    table = Table(title="groups made and used: seconds, medians")
    for column in ("ranks", *SIDES):
        table.add_column(column, justify="right", no_wrap=True)
    for world, row in times.items():
        table.add_row(str(world), *(f"{row[side]:.2f}" for side in SIDES))
    console.print(table)


def show_store(loads: dict[tuple[int, str], tuple[Load, Load]], console: Console) -> None:
    """A row for each world and kind of key."""
    table = Table(title="load of the busiest node: regrow / TCPStore")
    for column in ("ranks", "keys", "requests", "connections", "KB"):
        table.add_column(column, justify="left" if column == "keys" else "right", no_wrap=True)
    for (world, kind), (ours, theirs) in loads.items():
        table.add_row(
            str(world),
            kind,
            f"{ours.requests} / {theirs.requests}",
            f"{ours.connections} / {theirs.connections}",
            f"{ours.bytes / 1000:.1f} / {theirs.bytes / 1000:.1f}",
            end_section=kind == "all",
        )
    console.print(table)


def show_formations(loads: dict[int, dict[str, FormationLoad]], console: Console) -> dict[str, float]:
    """A row for each world; returns the figures."""
    table, figures = Table(title="bytes a rank that the coordinator sends"), dict[str, float]()
    for column in ("ranks", "start all", "first generation", "after a kill", "after a node", "an agent passes on"):
        table.add_column(column, justify="right")
    for world, row in loads.items():
        a_rank = {f"{name}_bytes_a_rank_{world}": load.coordinator / world for name, load in row.items()}
        a_rank[f"form_bytes_busiest_agent_a_rank_{world}"] = max(load.agent for load in row.values()) / world
        table.add_row(str(world), *(f"{figure:.0f}" for figure in a_rank.values()))
        figures |= a_rank
    console.print(table)
    return figures


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each size once, the largest three times")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    expected_names.check()  # imports the modules that a zygote also imports
    console, figures = Console(), dict[str, float]()
    rounds = {world: 1 if args.quick else ROUNDS for world in WORLDS} | {
        max(WORLDS): QUICK_ROUNDS if args.quick else ROUNDS
    }
    try:
        times = {world: time_in_turns(world, rounds[world]) for world in WORLDS}
        show_groups(times, console)
        agents_cost, tcp_cost = cost_of_requests()  # before this process has threads
        costs = TcpCosts()
        costs.check()
        loads = {
            (world, name): (simulate(world, *kinds), costs.load(world, *kinds))
            for world in SIMULATED
            for name, kinds in {**{kind: (kind,) for kind in KEYS}, "all": KEYS}.items()
        }
    except Failed as failed:
        print(f"rendezvous.py: {failed}", file=sys.stderr)
        return 1
    show_store(loads, console)
    figures |= show_formations({world: formations(world) for world in FORMED}, console)
    console.print(f"one request costs an agent {1e6 * agents_cost:.0f} µs, TCPStore {1e6 * tcp_cost:.0f} µs")
    for world, row in times.items():
        figures |= {f"{FIGURES[side]}_{world}": seconds for side, seconds in row.items()}
    for (world, kind), (ours, theirs) in loads.items():
        name = "" if kind == "all" else f"{kind}_"
        for field, mine, its in zip(Load._fields, ours, theirs, strict=True):
            figures[f"busiest_{name}{field}_{world}"] = mine
            figures[f"tcpstore_busiest_{name}{field}_{world}"] = its
        if kind == "all" and world > max(WORLDS):
            figures[f"init_s_{world}"] = ours.requests * agents_cost
            figures[f"tcpstore_init_s_{world}"] = theirs.requests * tcp_cost
            console.print(
                f"{world} ranks: the busiest node's store is busy for {1000 * figures[f'init_s_{world}']:.1f} ms, "
                f"TCPStore's for {1000 * figures[f'tcpstore_init_s_{world}']:.1f} ms"
            )
    tell("rendezvous", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
