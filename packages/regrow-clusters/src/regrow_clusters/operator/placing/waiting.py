"""Runs in a pod: waits until the pod is placed, and adds its place to the arguments of `regrow run` or `agent`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from regrow.core.errors import RegrowError
from regrow.core.ids import Seconds
from regrow_clusters.operator.objects import NODE_RANK, TOPOLOGY
from regrow_clusters.operator.placing.node_ranks import domain_in

_LOOK_EVERY_S: Final[Seconds] = 0.1
_DOMAIN_S: Final[Seconds] = 60.0
"""Longest wait for the failure domain: training starts without it if need be."""


class NotPlaced(RegrowError):
    """The pod did not get its node rank in time."""


def placed_arguments(
    folder: Path, arguments: Sequence[str], *, ranked: bool, domain: bool, within: Seconds
) -> list[str]:
    """Arguments with the pod's place added. `ranked`: it must not begin without its node rank. Raises `NotPlaced`."""
    rank, where = folder / NODE_RANK.partition("/")[2], folder / TOPOLOGY.partition("/")[2]
    last = time.monotonic() + (within if ranked else min(within, _DOMAIN_S))
    while not (_said(where) and (_said(rank) or not ranked)):
        if time.monotonic() >= last:
            if ranked:
                raise NotPlaced(
                    f"within {within:g} s this pod got no node number in the job",
                    hint="is the operator running, and may it patch pods? kubectl describe trainingjob shows more",
                )
            break
        time.sleep(_LOOK_EVERY_S)
    flags = [f"--node-rank={_said(rank)}"] if ranked else []
    if domain and (name := domain_in(_said(where))):
        flags.append(f"--domain={name}")
    return [arguments[0], *flags, *arguments[1:]]


def _said(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""  # the kubelet is just writing it
