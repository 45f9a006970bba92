"""Admission of nodes to the job, their names, and the order in which the machine hears of them. Pure."""

import re
from collections.abc import Collection, Sequence

import msgspec

from regrow.core.config import Script
from regrow.core.errors import NoPlaceYet, UsageError
from regrow.core.ids import NodeId, Seconds
from regrow.core.job import JobSpec

LOCKED = 423
"""HTTP's status of `NoPlaceYet`; an agent from before it takes it for a refusal like any other."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NUMBERED = re.compile(r"node(\d{1,9})", re.ASCII)


class JoinRequest(msgspec.Struct, frozen=True):
    """A node asks to be one more of the job. `name`: what it would be called; empty: the next free name."""

    name: NodeId = NodeId("")


class JoinOffer(msgspec.Struct, frozen=True):
    """Description of the job for a node that joins later. `node` and `node_rank`: its name and number from now on."""

    spec: JobSpec
    script: Script
    folder: str
    """In which the job was started; a script's path may be relative to it."""
    node: NodeId = NodeId("")
    node_rank: int = 0
    preload: list[str] = []
    checkpoint_dir: str | None = None
    master_port: int = 0
    grace: Seconds = 10.0
    """Time that workers get to end when the job does."""
    local: bool = False
    """All nodes of the job are on one machine, and use unix sockets."""
    term: int = 1
    """Of the coordinator that offers it."""


class Admission:
    """Decides about names; connections are the server's.

    Args:
        spec: how many nodes there may be.
        first: the nodes that the job starts on, in their order; None: whoever comes is let in as it comes.
        known: nodes that have been in the job under an earlier coordinator; they may come back, and nobody else is
            given their names.
    """

    def __init__(self, spec: JobSpec, first: Sequence[NodeId] | None, known: Collection[NodeId] = ()) -> None:
        self._spec = spec
        self._first = first
        self._known = frozenset(known)
        self._introduced: set[NodeId] = set()
        self._next = 0
        """Number of the first nodes that have been introduced."""
        self._numbered = spec.node_limit if first is None else len(first)

    def offer(self, template: JoinOffer, request: JoinRequest, connected: Collection[NodeId]) -> JoinOffer:
        """The offer to a node that asks to join. Raises `UsageError` if it may not."""
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
        # A name such as `node7` is not given to another one later.
        if (match := _NUMBERED.fullmatch(name)) is not None and int(match.group(1)) == self._numbered:
            self._numbered += 1
        return msgspec.structs.replace(template, node=name or NodeId(f"node{rank}"), node_rank=rank)

    def _is_taken(self, name: NodeId, connected: Collection[NodeId]) -> bool:
        return name in connected or name in self._introduced or name in self._known

    def refusal(self, node: NodeId, connected: Collection[NodeId]) -> tuple[str, str] | None:
        """Why a node may not be in the job, and what to do instead; None: it may."""
        first = self._first
        if first is None or node in connected or (node in first and node not in self._introduced):
            return None
        limit = max(self._spec.node_limit, len(first))
        if node in first and limit == len(first):
            return None  # it is back
        # Who the job starts on, and has not come yet, has a place.
        here = set(connected) | {each for each in first if each not in self._introduced}
        if len(here) >= limit:
            nodes = "1 node" if limit == 1 else f"{limit} nodes"
            hint = "start it with --nnodes MIN:MAX" if limit == len(first) else "start it with more in --nnodes MIN:MAX"
            return f"this job has at most {nodes}", hint
        return None

    def introduce(self, node: NodeId, arrived: Collection[NodeId]) -> list[NodeId]:
        """Of which nodes the machine is to be told now that `node` has registered.

        Ranks are dealt out in the order in which the machine hears of nodes, and must be those of `--node-rank`; so the
        first come in their order, and others after them.

        Args:
            node: the new one, or one that is back.
            arrived: all that are connected, in the order in which they came; it is cheap to ask whether one is there.
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
            # Others have waited for the last of these; later each is told of as it comes.
            reported += [each for each in (arrived if reported else [node]) if each not in self._introduced]
            self._introduced.update(reported)
        return reported
