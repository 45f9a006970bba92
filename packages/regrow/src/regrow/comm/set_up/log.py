"""Notes of collectives before the loop: content, limits, and comparison with a newcomer's calls. Pure.

Names of notes: `a/GROUP/N` is collective N of a group, for all of its ranks, with its answer if that is the same on
all; `rR/GROUP/N` the answer that only rank R got; `rR/GROUP/recvS/N` the data it received from rank S of the group;
`b/GROUP/N` exists once barrier N is passed; `p/DIGEST` is a piece of a large answer; `rR/end` has the numbers of calls;
`refused` the reason why no newcomer can be answered; `world` the number of ranks when the notes were made.
"""

from collections.abc import Sequence

import msgspec

from regrow.comm.group_ranks import RankInWorld, spans

ALIKE_BYTES = 64 << 20
OWN_BYTES = 16 << 20
CALLS = 4096
AT_ONCE_BYTES = 64 << 10
"""Larger answers are recorded at the end of the set-up, when those that are protected state need no note."""
PIECE_BYTES = 1 << 20
WORLD = "world"
REFUSED = "refused"


class TensorShape(msgspec.Struct, frozen=True, array_like=True):
    """Shape and dtype of a tensor that a collective fills."""

    dtype: str
    sizes: list[int]


class Note(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One call. `where`: the script's line. `root`, `op`: -1 if there is none. `source`: sender of received data.

    `outputs`: empty if the call fills none on this rank, or if each rank has its own. `value`: the joined bytes of all
    outputs, or `pieces`: the names of their pieces. `protected`: it filled protected state, which newcomers receive.
    """

    name: str
    where: str
    root: int = -1
    op: int = -1
    outputs: list[TensorShape] = []
    value: bytes = b""
    pieces: list[str] = []
    source: int = -1
    protected: bool = False


class SetUpEnd(msgspec.Struct, frozen=True, array_like=True):
    """Number of calls that a rank had made when it reached its loop, by the first part of their notes' names."""

    counts: dict[str, int]


def group_name(ranks: Sequence[int], rank_in_world: RankInWorld, unit: int, *, whole: bool, replica: int) -> str:
    """Name of a group in notes: the same for workers that take over its ranks, even in a world of another size.

    Args:
        ranks: ranks of the group, in its order.
        rank_in_world: one of its ranks, and the world in which it was made.
        unit: number of ranks in one replica.
        whole: whether it is the group of all ranks.
        replica: the replica whose notes are used, if it is not the replica of `rank_in_world`.
    """
    if whole or spans(ranks, rank_in_world, unit):
        return "x" + ",".join(map(str, sorted({rank % unit for rank in ranks})))
    by = (replica - rank_in_world.rank // unit) * unit
    return ",".join(str(rank + by) for rank in ranks)


_SPOKEN = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_anysource": "recv",
}


def spoken(note: Note) -> str:
    """Name of a call as scripts write it, and the script's line."""
    return f"{_SPOKEN.get(note.name, note.name)} at {note.where}"


def differs(note: Note, called: Note) -> str:
    """Difference between a newcomer's call and the first workers' call, for people; empty if there is none."""
    if note.name != called.name:
        return f"it calls {spoken(called)}, where the first workers called {spoken(note)}"
    if note.root != called.root:
        return f"{spoken(called)} is of root {called.root}, and was of root {note.root}"
    if note.op != called.op:
        return f"{spoken(called)} reduces otherwise than it did"
    if note.outputs != called.outputs:
        return f"{spoken(called)} asks for {_shapes(called.outputs)}, and was answered with {_shapes(note.outputs)}"
    return ""


def _shapes(outputs: Sequence[TensorShape]) -> str:
    if len(outputs) > 3:
        return f"{len(outputs)} tensors of {outputs[0].dtype}"
    return " and ".join(f"{each.dtype}{each.sizes}" for each in outputs) or "nothing"


def counted_differently(first: dict[str, int], mine: dict[str, int]) -> tuple[str, int] | None:
    """First kind of call that a newcomer made more or less often than the first workers, and the smaller number."""
    for counted in sorted({*first, *mine}):
        if first.get(counted, 0) != mine.get(counted, 0):
            return counted, min(first.get(counted, 0), mine.get(counted, 0))
    return None


class NoteBounds:
    """Limits on the notes of one rank's set-up."""

    def __init__(self) -> None:
        self._alike = self._own = self._calls = 0

    def call(self, note: Note) -> str:
        """Count one more call; returns the reason if there are now too many, for people; else empty."""
        self._calls += 1
        if self._calls <= CALLS:
            return ""
        return f"{spoken(note)} is call {self._calls} of a collective before the loop; {CALLS} are noted"

    def answer(self, note: Note, nbytes: int, *, own: bool) -> str:
        """Count one more answer; returns the reason if there is now too much data, for people; else empty."""
        if own:
            self._own += nbytes
        else:
            self._alike += nbytes
        total, most = (self._own, OWN_BYTES) if own else (self._alike, ALIKE_BYTES)
        if total <= most:
            return ""
        whose = "answers for this rank alone" if own else "answers that all ranks share"
        return f"{spoken(note)} makes {total >> 20} MiB of {whose} before the loop; {most >> 20} MiB are noted"
