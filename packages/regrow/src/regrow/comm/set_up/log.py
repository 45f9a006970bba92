"""Notes of collectives before the loop: their content, their bounds, and when a newcomer's call is the same. Pure.

Names of notes: `a/GROUP/N` is collective N of a group, for all of its members, with its answer if that is alike;
`rR/GROUP/N` the answer that rank R alone got; `rR/GROUP/recvS/N` what it received from rank S of the group; `b/GROUP/N`
says that barrier N is passed; `p/DIGEST` is a piece of a large answer; `rR/end` the number of calls; `refused` why
nobody can be answered; `world` the number of the first workers.
"""

from collections.abc import Sequence

import msgspec

from regrow.comm.group_ranks import RankInWorld, spans

ALIKE_BYTES = 64 << 20
OWN_BYTES = 16 << 20
CALLS = 4096
AT_ONCE_BYTES = 64 << 10
"""Larger answers are noted when the set-up is over: what is protected state by then needs no note."""
PIECE_BYTES = 1 << 20
WORLD = "world"
REFUSED = "refused"


class TensorShape(msgspec.Struct, frozen=True, array_like=True):
    """Of a tensor that a collective fills."""

    dtype: str
    sizes: list[int]


class Note(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One call. `where`: the script's line. `root`, `op`: -1 where there is none. `source`: who sent what came.

    `outputs`: empty where the call has none here, or each rank has its own. `value`: the bytes of all outputs in a row;
    or `pieces`, the names of its pieces. `protected`: it filled protected state, which newcomers receive.
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
    """Number of calls that a rank had made when it came to its loop, by the part of their notes' names before it."""

    counts: dict[str, int]


def group_name(ranks: Sequence[int], rank_in_world: RankInWorld, unit: int, *, whole: bool, replica: int) -> str:
    """Name of a group in notes: the same for those that take its ranks, in a world of another size too.

    Args:
        ranks: of the group, in its order.
        rank_in_world: one of its ranks, and the world it was made in.
        unit: ranks of one replica.
        whole: whether it is the group of all ranks.
        replica: the one whose notes are asked for, if that is not the replica of `rank_in_world`.
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
    """Name of a call in scripts, and the line."""
    return f"{_SPOKEN.get(note.name, note.name)} at {note.where}"


def differs(note: Note, called: Note) -> str:
    """Why a newcomer's call is another one than the first workers', for people; empty: it is the same."""
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
    """First kind of call that a newcomer has made fewer or more times than the first workers, and the first missing."""
    for counted in sorted({*first, *mine}):
        if first.get(counted, 0) != mine.get(counted, 0):
            return counted, min(first.get(counted, 0), mine.get(counted, 0))
    return None


class NoteBounds:
    """Bounds on the notes of one rank's set-up."""

    def __init__(self) -> None:
        self._alike = self._own = self._calls = 0

    def call(self, note: Note) -> str:
        """One more call: why that is too many, for people; empty: it is not."""
        self._calls += 1
        if self._calls <= CALLS:
            return ""
        return f"{spoken(note)} is call {self._calls} of a collective before the loop; {CALLS} are noted"

    def answer(self, note: Note, nbytes: int, *, own: bool) -> str:
        """One more answer: why that is too much, for people; empty: it is not."""
        if own:
            self._own += nbytes
        else:
            self._alike += nbytes
        total, most = (self._own, OWN_BYTES) if own else (self._alike, ALIKE_BYTES)
        if total <= most:
            return ""
        whose = "what this rank alone has heard" if own else "what ranks have told each other"
        return f"{spoken(note)} makes {total >> 20} MiB of {whose} before the loop; {most >> 20} MiB are noted"
