"""What a script protects, as one state that can be read, written, remembered, rolled back and compared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from regrow.core.errors import StateError
from regrow.core.ids import NO_STATE, StepNo
from regrow.hydration.codec import decode, dtype_of, encode
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.shards import box_of, empty_like, local
from regrow.train.naming import Roster, roster
from regrow.train.rollback import Undo, load, put_settings, settings


class _Python(msgspec.Struct, frozen=True):
    """Everything that is no tensor of a module; each part is encoded by `hydration.codec`."""

    groups: dict[str, list[list[str]]]
    """For each optimizer and parameter group, its parameters' short names."""
    settings: dict[str, bytes]
    state: dict[str, bytes]
    objects: dict[str, bytes]


class Captured(msgspec.Struct):
    """A full copy of protected state in memory, on the devices it lives on."""

    inventory: Inventory
    values: dict[str, torch.Tensor]
    gradients: list[torch.Tensor | None]


@dataclass
class _Arrival:
    """State between `prepare` and `finish`: decoded, its new tensors not yet in place."""

    step: StepNo
    targets: dict[str, torch.Tensor]
    settings: dict[str, object]
    state: dict[str, object]
    objects: dict[str, object]


class ProtectedState:
    """Modules, optimizers and other objects with `state_dict()`, as a `StateSource` and a `StateSink`.

    Args:
        objects: what to protect; named by kind (`model`, `optim`, `scheduler`).
        named: the same under names of the script's choice.
        part: what part of the model this rank holds, where names do not say it.

    Raises:
        UsageError: something has no state, or a name is not to be had.
        StateError: two tensors have the same name.
    """

    def __init__(self, objects: Sequence[object], named: Mapping[str, object] | None = None, *, part: str = "") -> None:
        self._roster: Roster = roster(objects, named or {}, part)
        self._undo = Undo(self._roster)
        self._table: dict[str, torch.Tensor] = {}
        self._arrival: _Arrival | None = None
        self.state_at: StepNo = NO_STATE
        """The step at which the state stands; kept by the session, `NO_STATE` while it is torn."""

    def close(self) -> None:
        """Take our hooks off the optimizers."""
        self._undo.close()

    def parameters(self) -> list[torch.Tensor]:
        """Every protected parameter once, in order of definition."""
        return list(self._roster.parameters.values())

    def drop_gradients(self) -> None:
        """Let no parameter have a gradient."""
        for parameter in self.parameters():
            parameter.grad = None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The protected optimizers."""
        return list(self._roster.optimizers.values())

    def distributed(self) -> bool:
        """Whether any tensor is a `DTensor`, of which this rank may have only a piece."""
        tensors = self._roster.parameters | self._buffers()
        return any(box_of(tensor, name) is not None for name, tensor in tensors.items())

    def layout(self) -> str:
        """Digest over names, shapes, pieces and dtypes of parameters (in order) and buffers, and the names of all else.

        Equal on workers that hold the same state: one can take over from the other.
        """
        tensors = self._roster.parameters | self._buffers()
        shape = [
            [name, str(tensor.dtype), list(tensor.shape), box_of(tensor, name)] for name, tensor in tensors.items()
        ]
        names = [[name, list(short)] for name, short in self._roster.optimized.items()]
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode([shape, names, list(self._roster.objects)]))

    def _buffers(self) -> dict[str, torch.Tensor]:
        present = ((slot.name, slot.home.get(slot.key)) for slot in self._roster.buffers)
        return {name: tensor for name, tensor in present if tensor is not None}

    # --- one step ---

    def begin(self) -> None:
        """Remember the start of a step: see `rollback.py` for what is saved."""
        self._undo.begin()

    def parameters_changed(self) -> bool:
        """Whether an update has begun since `begin`."""
        return self._undo.parameters_changed()

    def rollback(self) -> None:
        """Go back to `begin`, provided no update has begun."""
        self._undo.rollback()

    # --- a full copy ---

    def capture(self) -> Captured:
        """A full copy of everything, gradients too."""
        inventory, table = self._survey(self.state_at)
        values = {name: local(tensor).detach().clone() for name, tensor in table.items()}
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in self.parameters()]
        return Captured(inventory, values, gradients)

    def restore(self, captured: Captured) -> None:
        """Go back to a copy; optimizer state that was created since is dropped. The copy can be used again."""
        targets = self.prepare(captured.inventory)
        with torch.no_grad():
            for name, tensor in targets.items():
                tensor.detach().copy_(captured.values[name])
            for parameter, gradient in zip(self.parameters(), captured.gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
        self.finish()

    def canonical(self) -> tuple[Inventory, dict[str, torch.Tensor]]:
        """Everything there is, and what is here of each tensor, in an order that is the same on every worker."""
        inventory, table = self._survey(self.state_at, canonical=True)
        return inventory, {name: local(tensor) for name, tensor in table.items()}

    def buffers_of_no(self, modules: Sequence[torch.nn.Module]) -> set[str]:
        """The names of protected buffers that belong to none of these modules."""
        shared = {id(buffer) for module in modules for buffer in module.buffers()}
        return {name for name, buffer in self._buffers().items() if id(buffer) not in shared}

    def digest(self) -> str:
        """xxh3_128 over all tensors and Python state; the same on every device and in every order of creation."""
        inventory, table = self._survey(self.state_at, canonical=True)
        total = xxhash.xxh3_128()
        for entry in inventory.entries:
            total.update(f"{entry.name}|{entry.dtype}|{entry.shape}|{entry.box}\n".encode())
            plain = local(table[entry.name]).detach().resolve_conj().resolve_neg().cpu().contiguous()
            total.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        total.update(inventory.python)
        return total.hexdigest()

    # --- as a StateSource ---

    def inventory(self, step: StepNo) -> Inventory:
        """All names, shapes and dtypes, and the Python state. Raises `StateError` if the state is not at `step`."""
        if self.state_at != step:
            where = "is torn" if self.state_at == NO_STATE else f"stands at step {self.state_at}"
            raise StateError(f"state@{step} was asked for; the state of this worker {where}")
        inventory, self._table = self._survey(step)
        return inventory

    def tensor(self, name: str) -> torch.Tensor:
        """What is here of a tensor of the last `inventory`, itself. Raises `StateError` for an unknown name."""
        tensor = self._table.get(name)
        if tensor is None:
            raise StateError(f"{name} is not part of the protected state")
        return local(tensor)

    def finder(self) -> Callable[[str], torch.Tensor | None]:
        """Finds the parameter or buffer of a name, or the parameter whose optimizer state a tensor of that name is."""
        owners = {f"{name}.{s}": p for name, short in self._roster.optimized.items() for s, p in short.items()}
        owners |= self._roster.parameters | self._buffers()
        return lambda name: _owner(name, owners)

    def lasting(self) -> set[str]:
        """Of the last `inventory`, the names of what only an update changes: parameters and optimizer state."""
        ids = {id(parameter) for parameter in self.parameters()}
        for optimizer in self.optimizers():
            for values in optimizer.state.values():
                ids.update(id(value) for value in values.values() if isinstance(value, torch.Tensor))
        return {name for name, tensor in self._table.items() if id(tensor) in ids}

    def _survey(self, step: StepNo, *, canonical: bool = False) -> tuple[Inventory, dict[str, torch.Tensor]]:
        table = self._roster.parameters | self._buffers()

        def lift(path: str, tensor: torch.Tensor) -> str:
            while path in table:
                path += "'"
            table[path] = tensor
            return path

        def packed(value: object, path: str) -> bytes:
            return encode(value, path=path, lift=lift, canonical=canonical)

        optimizers = sorted(self._roster.optimizers)
        python = _Python(
            groups={name: self._groups(name) for name in optimizers},
            settings={name: packed(self._settings(name), f"{name}.param_groups") for name in optimizers},
            state={name: packed(self._optimizer_state(name), name) for name in optimizers},
            objects={
                name: packed(self._roster.objects[name].state_dict(), name) for name in sorted(self._roster.objects)
            },
        )
        entries = [TensorEntry.of(name, table[name]) for name in sorted(table)]
        return Inventory(step, entries, msgspec.msgpack.encode(python)), table

    def _settings(self, optimizer: str) -> list[dict[str, object]]:
        return [settings(group) for group in self._roster.optimizers[optimizer].param_groups]

    def _groups(self, optimizer: str) -> list[list[str]]:
        names = {id(parameter): short for short, parameter in self._roster.optimized[optimizer].items()}
        groups = self._roster.optimizers[optimizer].param_groups
        try:
            return [[names[id(parameter)] for parameter in group["params"]] for group in groups]
        except KeyError as error:
            raise StateError(
                f"{optimizer} was given parameters after protect()", hint="call add_param_group() before protect()"
            ) from error

    def _optimizer_state(self, name: str) -> dict[str, object]:
        optimizer = self._roster.optimizers[name]
        short = {id(parameter): short for short, parameter in self._roster.optimized[name].items()}
        state: dict[str, object] = {}
        for parameter, values in optimizer.state.items():
            if id(parameter) not in short:
                raise StateError(f"{name} keeps state for what is no parameter of its groups: {parameter!r:.80}")
            state[short[id(parameter)]] = values
        return state

    # --- as a StateSink ---

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        """Tensors to write into, new ones for optimizer state that this worker lacks. The state is torn from here on.

        Raises `StateError`, with nothing changed, where the two sides do not fit.
        """
        try:
            python = msgspec.msgpack.decode(inventory.python, type=_Python)
        except msgspec.MsgspecError as error:
            raise StateError(f"the Python state that was received does not decode: {error}") from error
        offered = {entry.name: entry for entry in inventory.entries}
        _, present = self._survey(self.state_at)
        targets = self._module_targets(offered, present)
        owners = {f"{name}.{s}": p for name, short in self._roster.optimized.items() for s, p in short.items()}

        def resolve(name: str) -> torch.Tensor:
            if name not in targets:
                targets[name] = _target(name, offered, present, _owner(name, owners), self.parameters())
            return targets[name]

        self._check_names(python)
        arrival = _Arrival(
            inventory.step,
            targets,
            {name: decode(data, resolve=resolve) for name, data in python.settings.items()},
            {name: decode(data, resolve=resolve) for name, data in python.state.items()},
            {name: decode(data, resolve=resolve) for name, data in python.objects.items()},
        )
        if unknown := sorted(offered.keys() - targets.keys()):
            raise StateError(f"{unknown[0]} is in the state that was offered, but not in this worker's script")
        self._arrival, self.state_at = arrival, NO_STATE
        return {name: local(tensor) for name, tensor in targets.items()}

    def _module_targets(
        self, offered: dict[str, TensorEntry], present: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        names = [*self._roster.parameters, *self._buffers()]
        for name in names:
            if name not in offered:
                raise StateError(f"{name} is in this worker's script, but not in the state that was offered")
            there, here = offered[name], TensorEntry.of(name, present[name])
            if (there.dtype, there.shape, there.box) != (here.dtype, here.shape, here.box):
                raise StateError(
                    f"{name} is {_shape(here)} here and {_shape(there)} in the state",
                    hint="the script must build the same model on every worker",
                )
        return {name: present[name] for name in names}

    def _check_names(self, python: _Python) -> None:
        here = {name: self._groups(name) for name in self._roster.optimizers}
        if python.groups != here:
            raise StateError(
                f"the optimizers' parameter groups differ: {_sizes(here)} here, {_sizes(python.groups)} in the state",
                hint="build the optimizers the same way on every worker, before protect()",
            )
        if python.objects.keys() != self._roster.objects.keys():
            raise StateError(
                f"protected here: {sorted(self._roster.objects)}; in the state: {sorted(python.objects)}",
                hint="protect the same objects under the same names on every worker",
            )

    def finish(self) -> None:
        """All targets are filled: the state is that of the inventory. Raises `StateError` without `prepare`."""
        if self._arrival is None:
            raise StateError("finish() without prepare()")
        arrival, self._arrival = self._arrival, None
        with torch.no_grad():
            for name, optimizer in self._roster.optimizers.items():
                _put_optimizer(optimizer, self._roster.optimized[name], arrival.settings[name], arrival.state[name])
            for name, thing in self._roster.objects.items():
                load(name, thing, arrival.objects[name])
        self._undo.forget()
        self.state_at = arrival.step


def _owner(name: str, owners: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The parameter whose optimizer state a tensor is: `optim.<fqn>.<key>`, or deeper."""
    while name:
        if name in owners:
            return owners[name]
        name = name[: max(name.rfind("."), name.rfind("["), 0)]
    return None


def _target(
    name: str,
    offered: dict[str, TensorEntry],
    present: dict[str, torch.Tensor],
    owner: torch.Tensor | None,
    parameters: list[torch.Tensor],
) -> torch.Tensor:
    """Where to receive a tensor that belongs to no module: the present one if it fits, else a new one."""
    if name not in offered:
        raise StateError(f"{name} is referred to by the state that was offered, but not in it")
    entry = offered[name]
    dtype = dtype_of(entry.dtype)
    here = present.get(name)
    if owner is not None and here is not None and _fits(entry, here):
        return here.detach()
    nearby = [parameter.device for parameter in ([owner] if owner is not None else parameters)]
    # Optimizers keep some of their state (AdamW's step) in the processor's memory, wherever the parameter is.
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


def _shape(entry: TensorEntry) -> str:
    where = "" if entry.box is None else f" at {[start for start, _ in entry.box]} of {list(entry.whole or ())}"
    return f"{entry.dtype}{list(entry.shape)}{where}"


def _put_optimizer(
    optimizer: torch.optim.Optimizer, short: dict[str, torch.Tensor], saved_settings: object, state: object
) -> None:
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


def _sizes(groups: dict[str, list[list[str]]]) -> str:
    return ", ".join(f"{name} {[len(group) for group in each]}" for name, each in groups.items()) or "none"
