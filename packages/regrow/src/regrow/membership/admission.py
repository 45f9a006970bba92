"""Admission of nodes to the job, their names, and the order in which the machine learns of them. Pure."""

import re
from collections.abc import Collection, Sequence

import msgspec

from regrow.core.config import Script
from regrow.core.errors import NoPlaceYet, UsageError
from regrow.core.ids import NodeId, Seconds
from regrow.core.job import JobSpec

LOCKED = 423
"""HTTP status of `NoPlaceYet`; agents of earlier versions treat it like any other refusal."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NUMBERED = re.compile(r"node(\d{1,9})", re.ASCII)


class JoinRequest(msgspec.Struct, frozen=True):
    """Request of a node to join the job. `name`: the name that it asks for; empty: the next free one."""

    name: NodeId = NodeId("")


class JoinOffer(msgspec.Struct, frozen=True):
    """Description of the job for a node that joins later. `node` and `node_rank`: its name and number from now on."""

    spec: JobSpec
    script: Script
    folder: str
    """Working directory in which the job was started; the script's path may be relative to it."""
    node: NodeId = NodeId("")
    node_rank: int = 0
    preload: list[str] = []
    checkpoint_dir: str | None = None
    master_port: int = 0
    grace: Seconds = 10.0
    """Time that workers have to end after the job has ended."""
    local: bool = False
    """True if all nodes of the job are on one machine and use unix sockets."""
    term: int = 1
    """Term of the coordinator that makes this offer."""


class Admission:
    """Decides which nodes may join, and their names; makes no connections, which are the server's part.

    Args:
        spec: limits the number of nodes.
        first: the nodes that the job starts on, in their order; None: every node is admitted when it connects.
        known: nodes that were in the job under an earlier coordinator; they may come back, and no other node gets
            their names.
    """

    def __init__(self, spec: JobSpec, first: Sequence[NodeId] | None, known: Collection[NodeId] = ()) -> None:
        self._spec = spec
        self._first = first
        self._known = frozenset(known)
        self._introduced: set[NodeId] = set()
        self._next = 0
        """Number of nodes of `first` that have been introduced."""
        self._numbered = spec.node_limit if first is None else len(first)

    def offer(self, template: JoinOffer, request: JoinRequest, connected: Collection[NodeId]) -> JoinOffer:
        """The offer to a node that asks to join. Raises `UsageError` if it may not join."""
        name = request.name
        if name and _NAME.fullmatch(name) is None:
            raise UsageError(f"{name!r} cannot name a node", hint="use letters, digits, '.', '_' and '-'")
        if name in connected:
            raise NoPlaceYet(f"{name} is in the job already", hint="choose another --name, or leave it out")
        if name and self._first is not None and name in self._first and name not in self._introduced:
            raise UsageError(f"{name} is one of the nodes that the job starts on", hint="choose another --name")
        if refusal := self.refusal(name, connected):
            raise NoPlaceYet(refusal[0], hint=refusal[1])
        while self._is_taken(NodeId(f"node{self._numbered}"), connected):
            self._numbered += 1
        rank = self._numbered
        self._numbered += 1
        # If a node calls itself `node7`, that name is not generated for another node later.
        if (match := _NUMBERED.fullmatch(name)) is not None and int(match.group(1)) == self._numbered:
            self._numbered += 1
        return msgspec.structs.replace(template, node=name or NodeId(f"node{rank}"), node_rank=rank)

    def _is_taken(self, name: NodeId, connected: Collection[NodeId]) -> bool:
        return name in connected or name in self._introduced or name in self._known

    def refusal(self, node: NodeId, connected: Collection[NodeId]) -> tuple[str, str] | None:
        """Reason and cure if a node may not be in the job; None: it may."""
        first = self._first
        if first is None or node in connected or (node in first and node not in self._introduced):
            return None
        limit = max(self._spec.node_limit, len(first))
        if node in first and limit == len(first):
            return None  # The node has come back.
        # Nodes of `first` that have not connected yet have a reserved place.
        here = set(connected) | {each for each in first if each not in self._introduced}
        if len(here) >= limit:
            nodes = "1 node" if limit == 1 else f"{limit} nodes"
            hint = "start it with --nnodes MIN:MAX" if limit == len(first) else "start it with more in --nnodes MIN:MAX"
            return f"this job has at most {nodes}", hint
        return None

    def introduce(self, node: NodeId, arrived: Collection[NodeId]) -> list[NodeId]:
        """The nodes to report to the machine now that `node` has registered.

        The machine assigns ranks in the order in which nodes are reported, and ranks must follow `--node-rank`.
        Therefore the nodes of `first` are reported in their order, and others after them.

        Args:
            node: the new node, or one that has come back.
            arrived: all connected nodes, in the order in which they connected; membership tests must be cheap.
        """
        if self._first is None or node in self._introduced:
            self._introduced.add(node)
            return [node]
        reported = []
        while self._next < len(self._first) and self._first[self._next] in arrived:
            reported.append(self._first[self._next])
            self._next += 1
        self._introduced.update(reported)
        if self._next == len(self._first):
            # Others have waited for the last node of `first`; from now on each is reported when it connects.
            reported += [each for each in (arrived if reported else [node]) if each not in self._introduced]
            self._introduced.update(reported)
        return reported
