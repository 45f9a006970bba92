"""Cost of TLS: all-reduce over TCP, plain and encrypted, and over gloo, in the same processes in turns.

    python benchmarks/encrypted.py            # two minutes
    python benchmarks/encrypted.py --quick    # half a minute

Forks 2 and 4 ranks with a thread each on one machine, so that one core encrypts data that another reduces; see
`collectives.py` for the sizes and the timing.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import trustme
from collectives import FORM_S, SIZES, RankFailed, Times, in_turns, measure
from rich.console import Console
from rich.table import Table
from targets import tell, warn_if_busy
from torch._C._distributed_c10d import FileStore

from regrow.comm.links import Links, Site
from regrow.comm.socket_mesh import SocketMesh
from regrow.comm.torch_private.internals import AllreduceOptions, PrefixStore
from regrow.comm.transport import MeshTransport
from regrow.core.config import tls_files

WORLDS = (2, 4)
SIDES = ("gloo", "clear", "tls")


def _rank(files: dict[str, str]) -> Callable[[int, int, str, int], Times]:
    def take(rank: int, world: int, folder: str, rounds: int) -> Times:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        keys = FileStore(f"{folder}/keys", -1)
        gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", keys), rank, world, timedelta(seconds=FORM_S))
        options = AllreduceOptions()

        def formed(name: str) -> MeshTransport:
            """A transport over TCP, as between nodes; all its connections are opened now, with the present setting."""
            site = Site(None, "127.0.0.1", "token")
            mesh = MeshTransport(SocketMesh(Links(PrefixStore(name, keys), "all", rank, world, site)))
            mesh.form(FORM_S)
            mesh.call("allreduce", ([torch.ones(1)], options), {}).wait()
            return mesh

        clear = formed("clear")
        os.environ.update(files)
        assert tls_files() is not None
        tls = formed("tls")
        return in_turns(
            {
                "gloo": lambda tensor: gloo.allreduce([tensor], options).wait(),
                "clear": lambda tensor: clear.call("allreduce", ([tensor], options), {}).wait(),
                "tls": lambda tensor: tls.call("allreduce", ([tensor], options), {}).wait(),
            },
            lambda: clear.call("barrier", (), {}).wait(),
            rounds,
        )

    return take


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often each side has its turn")
    parser.add_argument("--quick", action="store_true", help="4 rounds")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="regrow-encrypted-") as folder:
        made = trustme.CA().issue_cert("node.example")
        cert, key = f"{folder}/cert.pem", f"{folder}/key.pem"
        made.cert_chain_pems[0].write_to_path(cert)
        made.private_key_pem.write_to_path(key)
        files = {"REGROW_TLS_CERT": cert, "REGROW_TLS_KEY": key}
        try:
            rounds = 4 if args.quick else max(1, args.rounds)
            found = {world: measure(world, rounds=rounds, take=_rank(files)) for world in WORLDS}
        except RankFailed as failed:
            print(f"encrypted.py: {failed}", file=sys.stderr)
            return 1
    table = Table(title="all-reduce over TCP: medians in ms")
    for column in ("ranks", "size", *SIDES, "tls / clear", "tls / gloo"):
        table.add_column(column, justify="left" if column == "size" else "right", no_wrap=True)
    figures: dict[str, float] = {}
    for world, times in found.items():
        for size in SIZES:
            each = {side: 1000 * median(times[size.name][side]) for side in SIDES}
            figures |= {f"{side}_{world}_{size.name}_ms": ms for side, ms in each.items()}
            ratio = figures[f"tls_over_clear_{world}_{size.name}"] = each["tls"] / each["clear"]
            table.add_row(
                str(world),
                size.name,
                *(f"{ms:.2f}" for ms in each.values()),
                f"{ratio:.1f}",
                f"{each['tls'] / each['gloo']:.1f}",
            )
    Console().print(table)
    tell("encrypted", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
