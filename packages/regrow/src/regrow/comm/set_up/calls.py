"""The tensors that a collective fills, and the ranks on which its answer is the same."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from regrow.comm import reductions
from regrow.comm.echo_objects import callers
from regrow.comm.set_up.log import Note, TensorShape
from regrow.core.process.own_code import own_folders

_DEPTH = 64


class AnswerKind(Enum):
    """The ranks that get the answer of a collective."""

    ALIKE = auto()
    """All ranks of the group get the same answer."""
    OWN = auto()
    """Each rank gets an answer of its own."""
    AT_ROOT = auto()
    """Only the root gets an answer."""
    RECEIVED = auto()
    """The calling rank gets data that another rank has sent."""
    BARRIER = auto()
    """There is no answer, as for a barrier."""


_KINDS = {
    "broadcast": AnswerKind.ALIKE,
    "allreduce": AnswerKind.ALIKE,
    "allreduce_coalesced": AnswerKind.ALIKE,
    "allgather": AnswerKind.ALIKE,
    "allgather_coalesced": AnswerKind.ALIKE,
    "_allgather_base": AnswerKind.ALIKE,
    "all_gather_single": AnswerKind.ALIKE,
    "allgather_into_tensor_coalesced": AnswerKind.ALIKE,
    "all_gather_single_coalesced": AnswerKind.ALIKE,
    "reduce": AnswerKind.AT_ROOT,
    "gather": AnswerKind.AT_ROOT,
    "scatter": AnswerKind.OWN,
    "reduce_scatter": AnswerKind.OWN,
    "_reduce_scatter_base": AnswerKind.OWN,
    "reduce_scatter_single": AnswerKind.OWN,
    "reduce_scatter_tensor_coalesced": AnswerKind.OWN,
    "reduce_scatter_single_coalesced": AnswerKind.OWN,
    "alltoall": AnswerKind.OWN,
    "alltoall_base": AnswerKind.OWN,
    "all_to_all_single": AnswerKind.OWN,
    "recv": AnswerKind.RECEIVED,
    "recv_anysource": AnswerKind.RECEIVED,
    "barrier": AnswerKind.BARRIER,
}
_ANY_SIZE = ("broadcast", "allreduce", "allreduce_coalesced", "reduce", "barrier")
"""Operations whose answer has the same shape and meaning in a world of another size."""


class SetUpCall(NamedTuple):
    """A collective that the script calls before its loop.

    Attributes:
        kind: the ranks that get its answer.
        note: the note about the call, without its answer.
        outputs: the tensors that the call fills on this rank.
    """

    kind: AnswerKind
    note: Note
    outputs: list[torch.Tensor]

    @property
    def needs_size(self) -> bool:
        """True if the answer depends on the size of the group."""
        return self.note.name not in _ANY_SIZE


def read(name: str, args: Sequence[Any], options: dict[str, Any], place: int) -> SetUpCall | None:
    """Read a call; None if it has no answer, or does not come from the script itself.

    Args:
        place: the caller's rank in the group.
    """
    kind = _KINDS.get(name)
    if kind is None or _builds_protected_state():
        return None
    given = (*args, *options.values())
    root = next((int(each.rootRank) for each in given if hasattr(each, "rootRank")), -1)
    op = next((reductions.number(each.reduceOp) for each in given if hasattr(each, "reduceOp")), -1)
    fills = bool(args) and kind is not AnswerKind.BARRIER and (kind is not AnswerKind.AT_ROOT or root == place)
    outputs = list(_tensors(args[0])) if fills else []
    shapes = [TensorShape(str(each.dtype).removeprefix("torch."), list(each.shape)) for each in outputs]
    return SetUpCall(kind, Note(name, _where(), root, op, shapes), outputs)


def peer(name: str, args: Sequence[Any]) -> str:
    """The sender that a receive names, in the form used in a note's name."""
    return f"recv{args[1]}" if name == "recv" and len(args) > 1 else "recvany"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)


def value_of(outputs: Sequence[torch.Tensor]) -> bytes:
    """The bytes of all outputs, joined. Raises torch's own error if a tensor has none (sparse ones)."""
    parts = []
    for output in outputs:
        flat = output.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        parts.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return b"".join(parts)


def fill(outputs: Sequence[torch.Tensor], value: bytes) -> None:
    """Write bytes from `value_of` back into tensors of the same shapes."""
    at = 0
    for output in outputs:
        nbytes = output.numel() * output.element_size()
        if nbytes:
            flat = torch.frombuffer(bytearray(value[at : at + nbytes]), dtype=torch.uint8)
            output.detach().copy_(flat.view(output.dtype).reshape(output.shape))
        at += nbytes


# --- the caller --------------------------------------------------------------------------------------------------

_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_WRAPPERS = tuple(
    os.path.join(_TORCH, *folders, "")
    for folders in (("nn", "parallel"), ("distributed", "fsdp"), ("distributed", "_composable"))
)
_DISTRIBUTING = {
    os.path.join(_TORCH, "distributed", "tensor", "_api.py"): ("distribute_tensor", "distribute_module"),
    os.path.join(_TORCH, "distributed", "_state_dict_utils.py"): (
        "_broadcast_state_dict",
        "_broadcast_tensors",
        "_distribute_state_dict",
        "_distribute_tensors",
    ),
}


def _builds_protected_state() -> bool:
    """True if DDP, FSDP or DTensor sends parameters to all ranks: newcomers receive protected state anyway."""
    for frame in callers(_DEPTH):
        file = frame.f_code.co_filename
        if file.startswith(_WRAPPERS) or frame.f_code.co_name in _DISTRIBUTING.get(file, ()):
            return True
    return False


def _where() -> str:
    """File and line of the script that makes the call; a library's line if no frame is the script's."""
    nearest = ""
    for frame in callers(_DEPTH):
        file = frame.f_code.co_filename
        if file.startswith((*own_folders(), _TORCH, "<frozen")):
            continue
        here = f"{os.path.basename(file)}:{frame.f_lineno}"
        if not file.startswith(_LIBRARIES):
            return here
        nearest = nearest or here
    return nearest or "an unknown line"
