"""In a pod: waits until it is told where it is, and says with which words `regrow run` or `agent` begins there."""

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
"""Wait for the failure domain: it is good to know, and no reason not to train."""


class NotPlaced(RegrowError):
    """Nobody has said in time which node of the job this pod is."""


def placed_arguments(
    folder: Path, arguments: Sequence[str], *, ranked: bool, domain: bool, within: Seconds
) -> list[str]:
    """The words with what the pod was told. `ranked`: without its number it must not begin. Raises `NotPlaced`."""
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
        return ""  # the kubelet is just making it
