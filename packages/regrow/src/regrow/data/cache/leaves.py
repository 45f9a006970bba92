"""Converts tensors, arrays and numpy scalars to the bytes of their memory, and back to views of the bytes."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from regrow.core.errors import NotCacheable
from regrow.data.cache.layout import Bytes
from regrow.data.cache.tree_nodes import ArrayNode, TensorNode

_DTYPES = {
    name: dtype
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


# --- tensors ---------------------------------------------------------------------------------------------------------


def tensor_bytes(value: torch.Tensor, path: str) -> tuple[Bytes, list[int]]:
    """Bytes of the elements, without a copy if they are dense in memory, and strides (empty: row-major).

    Raises `NotCacheable` if a tensor made from these bytes would not be equal.
    """
    if reason := _why_not(value):
        raise NotCacheable(f"{path} is {reason}")
    plain = value.detach().resolve_conj().resolve_neg()
    if not plain.numel():
        return b"", []
    strides: list[int] = []
    if not plain.is_contiguous() or plain.stride() != _row_by_row(plain.shape):
        if _is_dense(plain):
            # Keep the strides, such as channels-last: the choice of a kernel, and so the bits, can depend on them.
            strides = list(plain.stride())
            plain = plain.as_strided((plain.numel(),), (1,))
        else:
            plain = plain.contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data, strides


def tensor_dtype(value: torch.Tensor) -> str:
    """`float32` for `torch.float32`."""
    return _NAMES[value.dtype]


def read_tensor(node: TensorNode, memory: Any, payload_at: int) -> torch.Tensor:
    """The tensor as a view of `memory`, which it keeps alive. Raises `NotCacheable` if torch lacks the dtype."""
    dtype = _DTYPES.get(node.dtype)
    if dtype is None:
        raise NotCacheable(f"{node.dtype} is no dtype of this torch {torch.__version__}")
    if count := _count(node.shape):
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=payload_at + node.at)
        tensor = flat.as_strided(node.shape, node.strides) if node.strides else flat.view(node.shape)
    else:
        tensor = torch.empty(node.shape, dtype=dtype)
    return tensor.requires_grad_() if node.requires_grad else tensor


def _why_not(tensor: torch.Tensor) -> str:
    """Reason why a tensor cannot be restored exactly; empty if it can."""
    if type(tensor) is not torch.Tensor:
        return f"a {type(tensor).__qualname__}, not a plain tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.device.type != "cpu":
        return f"a tensor on {tensor.device}"
    if tensor.dtype not in _NAMES:
        return f"a tensor of {tensor.dtype}"
    if tensor.grad_fn is not None:
        return "a tensor with a gradient history"
    if tensor.is_inference():
        return "a tensor of inference mode"
    if tensor.is_leaf and tensor.grad is not None:
        return "a tensor with a gradient"
    if tensor.__dict__:
        return "a tensor with attributes of its own"
    return ""


def _row_by_row(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the tensor's elements fill one contiguous block of memory, each once, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


# --- arrays ----------------------------------------------------------------------------------------------------------


def array_bytes(value: NDArray[Any], path: str) -> tuple[Bytes, bool]:
    """Bytes of the elements, and True if they are in column-major order. Raises `NotCacheable`, as for a tensor."""
    if type(value) is not np.ndarray:
        kind = type(value)
        raise NotCacheable(f"{path} is of type {kind.__module__}.{kind.__qualname__}, not a plain array")
    columns_first = value.flags.f_contiguous and not value.flags.c_contiguous
    if not value.nbytes:
        return b"", columns_first
    flat = value.reshape(-1, order="F") if columns_first else np.ascontiguousarray(value).reshape(-1)
    return flat.view(np.uint8).data, columns_first


def read_array(node: ArrayNode, dtype: "np.dtype[Any]", memory: Any, payload_at: int) -> NDArray[Any]:
    """The array as a view of `memory`, which it keeps alive."""
    shape = tuple(node.shape)
    count = _count(shape)
    if not count * dtype.itemsize:
        return np.empty(shape, dtype, "F" if node.columns_first else "C")
    flat: NDArray[Any] = np.frombuffer(memory, dtype, count, payload_at + node.at)
    return flat.reshape(shape, order="F" if node.columns_first else "C")


def dtype_description(dtype: "np.dtype[Any]", path: str) -> object:
    """Numpy's description of a dtype, in plain values. Raises `NotCacheable` if it does not restore the dtype."""
    if not dtype.hasobject and dtype.kind != "T" and dtype.metadata is None:
        description = np.lib.format.dtype_to_descr(dtype)
        try:
            back = np.lib.format.descr_to_dtype(description)
        except (TypeError, ValueError):
            back = None  # a dtype of another package
        if back == dtype and back.kind == dtype.kind:
            return cast(object, description)
    raise NotCacheable(f"{path} is of numpy's dtype {dtype}")


def described_dtype(description: Any) -> "np.dtype[Any]":
    """The dtype that `dtype_description` has described."""
    return np.dtype(np.lib.format.descr_to_dtype(description))


def scalar_bytes(value: np.generic, path: str) -> bytes:
    """A numpy scalar's bytes. Raises `NotCacheable` if a scalar read from them would have another type."""
    raw = np.asarray(value).tobytes()
    if type(read_scalar(value.dtype, raw)) is not type(value):
        raise NotCacheable(f"{path} is a numpy.{type(value).__name__}")
    return raw


def read_scalar(dtype: "np.dtype[Any]", raw: bytes) -> Any:
    """The numpy scalar with these bytes; a structured one is writable."""
    return np.frombuffer(bytearray(raw), dtype)[0] if dtype.itemsize else np.zeros(1, dtype)[0]


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        if size < 0:
            raise ValueError(f"a shape of {list(shape)}")
        count *= size
    return count
