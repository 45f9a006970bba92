"""Arrays that a script carries in its variables (a hidden state, flags of ended episodes), as they were at one moment.

Each is referenced weakly, with a copy of its content: a step's memory does not outlive the step.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import Enum, auto

import numpy as np
import torch
import xxhash

from regrow.core.errors import NotPlain, StateError, TooLarge
from regrow.hydration.codec import decode, dtype_name, dtype_of, encode

ARRAYS = frozenset({torch.Tensor, np.ndarray})
"""Exact types: parameters and tensors of other types are handled elsewhere."""
Array = torch.Tensor | np.ndarray


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as one row: a view if they are contiguous in the host's memory, else a copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


class Keep(Enum):
    """Treatment of arrays in a value that is kept."""

    NOT = auto()
    """A value that contains arrays is not plain."""
    HERE = auto()
    """Small arrays are copied and put back in this process, and never sent; of a list with other items only the length
    is put back."""
    ITSELF = auto()
    """Arrays are kept by reference: only the containers that hold them change."""
    CONTENT = auto()
    """The content of arrays is copied, and put back."""


Shared = Callable[[], set[int]] | None
"""Returns addresses of protected memory, which is put back by other means. None if no memory may be written."""
_SMALL = 4 << 10
"""Arrays of at most this many bytes are compared with their copy, larger ones by hash: some writes count no version."""
_MOST_LEAVES, _MOST_BYTES = 200_000, 8 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BYTES_A_LEAF = {torch.Tensor: 8 << 10, np.ndarray: 1 << 10}


class ArrayCopy:
    """An array, and a copy of its content once `fill` has made it."""

    content: Array

    def __init__(self, thing: Array, *, stays: bool = False) -> None:
        self.stays = stays
        """True if the array is never sent to other processes."""
        self._of, self.written = weakref.ref(thing), _written(thing)
        self._requires_grad = isinstance(thing, torch.Tensor) and thing.requires_grad and thing.is_leaf

    @property
    def thing(self) -> Array | None:
        """The array itself, while the script has it."""
        return self._of()

    def still(self, thing: object) -> bool:
        """True if `thing` is this array and was not written to since, so that no new copy is needed.

        False on a device, where `x.data.add_(1)` and captured graphs write without a new version.
        """
        if not isinstance(thing, np.ndarray | torch.Tensor) or self._of() is not thing or is_elsewhere(thing):
            return False
        if is_freed(thing):
            return False
        return equal(self.content, thing) if thing.nbytes <= _SMALL else self.written == _written(thing)

    def equals(self, other: "ArrayCopy") -> bool:
        """True if both had the same content. For arrays on a device, versions are compared instead, without a wait."""
        if is_elsewhere(self.content):
            return self.thing is other.thing and self.written == other.written
        return equal(self.content, other.content)

    def copied(self) -> Array:
        """A new array with the copied content."""
        if isinstance(self.content, np.ndarray):
            return self.content.copy()
        return self.content.clone().requires_grad_(self._requires_grad)

    def put_back(self, shared: Shared) -> Array:
        """Restore the content. Returns the array itself if it still exists and can be written, else a new one."""
        thing = self._of()
        return thing if thing is not None and write(thing, self.content, shared) else self.copied()


def fill(copies: Iterable[tuple[ArrayCopy, Array]]) -> None:
    """Copy the present content of each array into its copy; small arrays on a device together, one launch a dtype."""
    together: dict[tuple[torch.device, torch.dtype], list[tuple[ArrayCopy, torch.Tensor]]] = defaultdict(list)
    for copy, thing in copies:
        if isinstance(thing, np.ndarray):
            copy.content = thing.copy()
        elif is_elsewhere(thing) and thing.nbytes <= _SMALL and thing.is_contiguous():
            together[thing.device, thing.dtype].append((copy, thing.detach()))
        else:
            copy.content = thing.detach().clone()
    for group in together.values():
        flat = torch.cat([thing.reshape(-1) for _, thing in group])
        for (copy, thing), part in zip(group, torch.split(flat, [thing.numel() for _, thing in group]), strict=True):
            copy.content = part.view(thing.shape)


def leaves_of(thing: Array) -> int:
    """Number of plain values as which an array counts. Raises `NotPlain` for one without plain memory."""
    if isinstance(thing, np.ndarray):
        odd = thing.dtype.hasobject or thing.dtype.names is not None
    else:
        odd = thing.layout is not torch.strided or thing.is_nested or thing.is_quantized or thing.is_meta
        odd = odd or is_freed(thing)
        odd = odd or thing.is_conj() or thing.is_neg()
    if odd:
        raise NotPlain
    return 8 + thing.nbytes // _BYTES_A_LEAF[type(thing)]


def is_freed(thing: Array) -> bool:
    """True for a tensor whose memory was freed (`untyped_storage().resize_(0)`): reading it would crash the process."""
    return isinstance(thing, torch.Tensor) and thing.numel() > 0 and not thing.untyped_storage().nbytes()


def is_small(thing: Array) -> bool:
    """True for an array that is small enough to be copied at every step."""
    return leaves_of(thing) > 0 and thing.nbytes <= _SMALL


def check_sendable(leaves_of_value: Iterable[object]) -> None:
    """Raise `NotPlain` for an array that is never sent or has no plain memory, `TooLarge` for too many to send."""
    leaves, nbytes = 0, 0
    for each in leaves_of_value:
        if isinstance(each, ArrayCopy) and each.stays:
            raise NotPlain
        if not isinstance(each, Array):
            continue
        leaves, nbytes = leaves + leaves_of(each), nbytes + each.nbytes
        if leaves > _MOST_LEAVES or nbytes > _MOST_BYTES:
            raise TooLarge


def _written(thing: Array) -> int:
    """A number that changes when the array is written to; 0 for a small one on the host, compared with its copy."""
    if isinstance(thing, torch.Tensor) and is_elsewhere(thing):
        return -1 if thing.is_inference() else thing._version
    if thing.nbytes <= _SMALL:
        return 0
    return hashed(thing)


def hashed(thing: Array) -> int:
    """A hash of the content of an array in the host's memory."""
    plain = flat_bytes(thing).numpy() if isinstance(thing, torch.Tensor) else np.ascontiguousarray(thing)
    return xxhash.xxh3_64_intdigest(plain.reshape(-1).view(np.uint8).data)


def is_elsewhere(thing: object) -> bool:
    """True for a tensor on a device, or a copy of one."""
    thing = thing.content if isinstance(thing, ArrayCopy) else thing
    return isinstance(thing, torch.Tensor) and thing.device.type != "cpu"


def equal(one: Array, other: Array) -> bool:
    """True if two arrays have the same bits."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        alike = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()  # type: ignore[union-attr]
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    kind = _BITS.get(one.itemsize)
    if kind is None or one.is_complex() or one.is_neg() or other.is_neg():
        return torch.equal(flat_bytes(one), flat_bytes(other))
    return torch.equal(one.detach().view(kind), other.detach().view(kind))


def write(thing: Array, content: Array, shared: Shared) -> bool:
    """Write `content` into an array, in place; False if that is not possible."""
    if is_freed(thing):
        return False
    if equal(thing, content):
        return True
    if (
        shared is None
        or type(thing) is not type(content)
        or (thing.dtype, thing.shape) != (content.dtype, content.shape)
    ):
        return False
    if is_view(thing, shared):
        return True
    if not (thing.flags.writeable if isinstance(thing, np.ndarray) else not thing.is_inference()):
        return False
    try:
        with torch.no_grad():
            thing[...] = content  # type: ignore[assignment]
    except (RuntimeError, ValueError):  # an expanded view, whose elements share memory
        return False
    return True


def is_view(thing: object, shared: Shared) -> bool:
    """True for a view of protected memory, which is restored by other means, and must stay a view of it."""
    return shared is not None and type(thing) in ARRAYS and _address(thing) in shared()


def _address(thing: object) -> int:
    while isinstance(thing, np.ndarray) and thing.base is not None:
        thing = thing.base
    if isinstance(thing, torch.Tensor):
        return thing.untyped_storage().data_ptr()
    return thing.ctypes.data if isinstance(thing, np.ndarray) else 0


def packed(value: object) -> bytes:
    """Plain values and arrays as bytes. Raises `StateError`."""
    tensors: list[object] = []

    def lift(_: str, tensor: torch.Tensor) -> str:
        raw = flat_bytes(tensor.cpu()).numpy().tobytes()
        tensors.append([dtype_name(tensor.dtype), list(tensor.shape), raw, tensor.device.type, tensor.requires_grad])
        return str(len(tensors) - 1)

    return encode([encode(value, lift=lift), tensors])


def unpacked(data: bytes) -> object:
    """Values from bytes of `packed`. Raises `StateError` for anything else."""
    match decode(data):
        case [bytes(body), list(tensors)]:
            return decode(body, resolve={str(at): _tensor(each) for at, each in enumerate(tensors)}.get)
    raise StateError("the data received for a variable is not a value")


def _tensor(sent: object) -> torch.Tensor:
    match sent:
        case [str(name), list(shape), bytes(raw), str(device), bool(requires_grad)]:
            dtype = dtype_of(name)
            try:
                flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
                return flat.reshape(shape).to(device).requires_grad_(requires_grad)
            except (ValueError, TypeError, RuntimeError) as error:
                raise StateError(f"an array of a variable that was received is none: {error}") from error
    raise StateError("the data received for a variable is not a value")
