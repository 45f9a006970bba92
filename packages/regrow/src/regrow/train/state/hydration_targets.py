"""Finds destination tensors for a received state, and updates an optimizer from them."""

from dataclasses import dataclass

import msgspec
import torch

from regrow.core.errors import StateError
from regrow.core.ids import StepNo
from regrow.hydration.codec import dtype_of
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.shards import empty_like
from regrow.train.state.moment import put_settings


class PythonState(msgspec.Struct, frozen=True):
    """All state besides tensors of modules; each part is encoded by `hydration.codec`."""

    groups: dict[str, list[list[str]]]
    """For each optimizer, the short names of the parameters in each group."""
    settings: dict[str, bytes]
    state: dict[str, bytes]
    objects: dict[str, bytes]
    modes: bytes = b""
    """Modes of modules; not compared between ranks, since each may evaluate by itself between two steps."""


class Captured(msgspec.Struct):
    """A full copy of protected state in host memory, as a device may have no room for it twice."""

    inventory: Inventory
    values: dict[str, torch.Tensor]
    gradients: list[torch.Tensor | None]


@dataclass
class Arrival:
    """Received state between `prepare` and `finish`: decoded, but its new tensors are not yet in place."""

    step: StepNo
    targets: dict[str, torch.Tensor]
    settings: dict[str, object]
    state: dict[str, object]
    objects: dict[str, object]
    modes: object
    variables: dict[str, bytes]


def owner_of(name: str, owners: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The parameter to whose optimizer state a tensor belongs, by its name, which begins with `optim.<fqn>.<key>`."""
    while name:
        if name in owners:
            return owners[name]
        name = name[: max(name.rfind("."), name.rfind("["), 0)]
    return None


def target(
    name: str,
    offered: dict[str, TensorEntry],
    present: dict[str, torch.Tensor],
    owner: torch.Tensor | None,
    parameters: list[torch.Tensor],
) -> torch.Tensor:
    """Destination for a tensor that belongs to no module: the present one if it fits, else a new one."""
    if name not in offered:
        raise StateError(f"{name} is referred to by the state that was offered, but not in it")
    entry = offered[name]
    dtype = dtype_of(entry.dtype)
    here = present.get(name)
    if owner is not None and here is not None and _fits(entry, here):
        return here.detach()
    nearby = [parameter.device for parameter in ([owner] if owner is not None else parameters)]
    # Optimizers keep some of their state (AdamW's step) in host memory, on whatever device the parameter is.
    device = next((device for device in nearby if device.type == entry.device_type), torch.device(entry.device_type))
    if owner is not None and tuple(owner.shape) == (entry.whole or entry.shape):
        return empty_like(owner, dtype=dtype, device=device)
    if entry.box is not None:
        raise StateError(
            f"{name} is a piece of a tensor of shape {list(entry.whole or ())}, which this worker has not made",
            hint="let the first step create all optimizer state",
        )
    return torch.empty(entry.shape, dtype=dtype, device=device)


def _fits(entry: TensorEntry, here: torch.Tensor) -> bool:
    mine = TensorEntry.of(entry.name, here)
    return (mine.dtype, mine.shape, mine.device_type, mine.box) == (
        entry.dtype,
        entry.shape,
        entry.device_type,
        entry.box,
    )


def shape_of(entry: TensorEntry) -> str:
    """Kind and shape of a tensor, for people."""
    where = "" if entry.box is None else f" at {[start for start, _ in entry.box]} of {list(entry.whole or ())}"
    return f"{entry.dtype}{list(entry.shape)}{where}"


def put_optimizer(
    optimizer: torch.optim.Optimizer, short: dict[str, torch.Tensor], saved_settings: object, state: object
) -> None:
    """Give an optimizer the settings and state that were received; its other entries are dropped."""
    if not isinstance(saved_settings, list) or not isinstance(state, dict):
        raise StateError("the optimizer state that was received is none")
    for group, saved in zip(optimizer.param_groups, saved_settings, strict=True):
        put_settings(group, saved)
    for name, parameter in short.items():
        if name in state:
            optimizer.state[parameter].clear()
            optimizer.state[parameter].update(state[name])
        else:
            optimizer.state.pop(parameter, None)


def sizes(groups: dict[str, list[list[str]]]) -> str:
    """Sizes of parameter groups, for people."""
    return ", ".join(f"{name} {[len(group) for group in each]}" for name, each in groups.items()) or "none"
