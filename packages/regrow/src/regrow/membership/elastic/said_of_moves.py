"""Texts about ranks that move to other nodes, for people. Pure."""

from collections.abc import Mapping, Sequence

from regrow.core.ids import NodeId, Rank

NOT_YET = "the ranks come to their first step; ask again when they train (those of a script without regrow cannot move)"


def _ranks(ranks: Sequence[Rank]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def accepted(ranks: Sequence[Rank], source: NodeId) -> str:
    """Answer to an accepted move."""
    return f"{_ranks(ranks)} will leave {source} as soon as replacements are built"


def under_way(source: NodeId) -> str:
    """Answer to a request for a move that is already under way."""
    return f"the ranks of {source} are on their way already"


def another_first(source: NodeId) -> str:
    """Refusal because another move is under way."""
    return f"the ranks of {source} are being moved; ask again when they are"


def has_no_ranks(node: NodeId) -> str:
    """Refusal because the node has no ranks."""
    return f"{node} has no ranks"


def there_already(ranks: Sequence[Rank], to: NodeId) -> str:
    """Refusal because the ranks are on the named node already."""
    return f"{_ranks(ranks)} cannot move to {to}: {'it is' if len(ranks) == 1 else 'they are'} there already"


def no_room(ranks: Sequence[Rank], room: int, to: NodeId | None, closed: Mapping[NodeId, str]) -> str:
    """Refusal because there is no room elsewhere. `closed`: the nodes that get no ranks, and why."""
    where = "other nodes have" if to is None else f"{to} has"
    why = "".join(f", {node} {reason}" for node, reason in closed.items())
    cure = "start the job with --spares, or add a node with regrow agent --join"
    return f"{_ranks(ranks)} cannot move: {where} room for {room}{why} ({cure})"


def moves(ranks: Sequence[Rank], source: NodeId, targets: Sequence[NodeId], reason: str) -> str:
    """Cause of a move, for the record. `targets`: nodes of the newcomers."""
    return f"{_ranks(ranks)} from {source} to {', '.join(targets) or 'other nodes'}: {reason}"


def held_nowhere_else(ranks: Sequence[Rank]) -> str:
    """Refusal because no rank that stays could give newcomers the state."""
    return f"{_ranks(ranks)} cannot move: no rank that would stay has the same part of the state"


def follows(rank: Rank, ranks: Sequence[Rank], source: NodeId, to: NodeId) -> str:
    """Message that the rest of a replica follows the rank of it that has moved."""
    return f"{_ranks(ranks)} of {source} follow{'s' * (len(ranks) == 1)} rank {rank} of their replica to {to}"


def leave_unfit(ranks: Sequence[Rank], source: NodeId, why: str) -> str:
    """Reason of a move off a node in quarantine."""
    return f"{_ranks(ranks)} move{'s' * (len(ranks) == 1)} away from {source}, which is in quarantine: {why}"


def stays_apart(rank: Rank, to: NodeId, source: NodeId, why: str) -> str:
    """Message that a rank has moved away from its replica, which cannot follow."""
    return f"rank {rank} went to {to}, and speaks over the network with those of its replica on {source}: {why}"


def given_up(source: NodeId, why: str) -> str:
    """Message that a move is given up and training goes on unchanged."""
    return f"the ranks of {source} are not moved: {why}"
