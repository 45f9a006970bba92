"""All protected objects as one state that can be read, written, remembered, rolled back and compared."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch
import xxhash
from torch import nn

from regrow.core.errors import StateError
from regrow.core.ids import NO_STATE, StepNo
from regrow.data.seeding import derive
from regrow.hydration.codec import decode, encode
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.shards import box_of, local
from regrow.train.attributes.hanging import of_modules
from regrow.train.graphs.object_graph import ObjectGraph
from regrow.train.state.audit import Habits, Look, ScriptPart, changed
from regrow.train.state.between import Between
from regrow.train.state.hydration_targets import (
    Arrival,
    Captured,
    PythonState,
    owner_of,
    put_optimizer,
    shape_of,
    sizes,
    target,
)
from regrow.train.state.looking import Looker
from regrow.train.state.modes import Modes
from regrow.train.state.moment import Moment, Scope, put_object, settings
from regrow.train.state.naming import Protected, ProtectedObjects, roster, unwrapped
from regrow.train.state.rollback import Undo, copied_gradients, give_gradients
from regrow.train.values.variables import Variables


class ProtectedState:
    """Modules, optimizers and other objects with `state_dict()`, as a `StateSource` and a `StateSink`.

    Args:
        objects: objects to protect, named by kind (`model`, `optim`, `scheduler`).
        named: more objects, under names that the script chose.
        part: name of the part of the state that this rank holds, if the names of its objects do not differ by part.
        earlier: arguments of earlier calls, perhaps for other parts.

    Raises:
        UsageError: an object has no state, or a name is not available.
        StateError: two tensors have the same name.
    """

    def __init__(
        self,
        objects: Sequence[object],
        named: Mapping[str, object] | None = None,
        *,
        part: str = "",
        earlier: Sequence[Protected] = (),
    ) -> None:
        self.calls = [*earlier, Protected(objects, named or {}, part)]
        self._roster: ProtectedObjects = roster(*self.calls)
        self.modes = Modes(self._roster.modules, self._roster.parameters)
        self.variables = Variables(lambda: _memory([*self.parameters(), *self._buffers().values()], self.optimizers()))
        hung_on: dict[str, object] = {**self._roster.modules, **self._roster.optimizers}
        self.attributes = of_modules(hung_on, self._roster.parameters, lambda: self._buffers().values())
        self.looker = Looker(self._roster)
        self.habits = Habits()
        self._moments: list[Moment] = []
        self._looked: Look | None = None
        self._updating = True
        self._undo = Undo(self._roster, self.moment())
        self.between = Between(self)
        self._table: dict[str, torch.Tensor] = {}
        self._arrival: Arrival | None = None
        self.state_at: StepNo = NO_STATE
        """The step at which the state is; set by the session, `NO_STATE` while the state is torn."""

    def close(self) -> None:
        """Remove regrow's hooks from the optimizers."""
        self._undo.close()

    def graphs(self) -> list[ObjectGraph]:
        """The graphs that stand for protected objects without a `state_dict()`; one graph may hold several of them."""
        return [each for each in self._roster.objects.values() if isinstance(each, ObjectGraph)]

    def nbytes(self) -> int:
        """Bytes in all tensors."""
        return self._survey(self.state_at)[0].nbytes

    def parameters(self) -> list[torch.Tensor]:
        """Every protected parameter once, in order of definition."""
        return list(self._roster.parameters.values())

    def drop_gradients(self) -> None:
        """Remove all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    @property
    def modules(self) -> set[nn.Module]:
        """The protected modules, with and without the wrappers around them."""
        outer = self._roster.modules.values()
        return {*outer, *map(unwrapped, outer)}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The protected optimizers."""
        return list(self._roster.optimizers.values())

    def parted(self) -> bool:
        """True if this rank may have only a part of the state: the script says so, or a tensor is a `DTensor`."""
        boxes = (box_of(each, name) for name, each in (self._roster.parameters | self._buffers()).items())
        return any(call.part for call in self.calls) or any(box is not None for box in boxes)

    def layout(self) -> str:
        """Digest over names, shapes, pieces and dtypes of parameters (in order) and buffers, and other objects' names.

        Equal on workers that hold the same part of the state, so that one can replace the other.
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

    def follow(self, things: Iterable[object]) -> None:
        """Order regrow's reads and writes of the state after the script's streams, which are among `things`."""
        self._roster.late.follow(things, lambda: self._survey(self.state_at)[1])

    # --- one step ---

    def begin(self, *, closely: bool = False, whole: bool = False) -> None:
        """Remember the start of a step, with all state that bodies are known to change before their update.

        Args:
            closely: learn by digests which state they change.
            whole: remember everything, so that the body can be undone with its updates.
        """
        known = self.looker.scope_of(self.habits.of(ScriptPart.EARLY))
        self._undo.begin(self.everything() if whole else known)
        if not whole:  # such a call follows one without `whole`
            self.attributes.take()
        self._looked = self.looker.look(closely=True) if closely else None
        self._updating = False

    def begin_restartable(self, entry: Moment, scope: Scope) -> None:
        """Remember the start of a restartable function, in a moment of its own."""
        self._undo.begin(scope, start=entry)
        self.attributes.take()

    def updates(self) -> list[str]:
        """Called before each update: learn which state changed before the first one. Returns names that are new."""
        if self._updating:
            return []
        self._updating = True
        early = self._undo.early()
        if self._looked is not None:
            early += changed(self._looked, self.looker.look(closely=True))
        return self.habits.learn(ScriptPart.EARLY, early)

    def reseed(self, *parts: int) -> None:
        """Seed the protected random generators for a step."""
        for name, generator in self._roster.generators.items():
            bits = derive(*parts, int.from_bytes(name.encode(), "little"))
            if isinstance(generator, torch.Generator):
                generator.manual_seed(bits & 0xFFFF_FFFF_FFFF_FFFF)
            else:
                generator.bit_generator.state = type(generator.bit_generator)(bits).state

    def parameters_changed(self) -> bool:
        """True if an update has begun since `begin`."""
        return self._undo.parameters_changed()

    def rollback(self) -> list[str]:
        """Go back to `begin`, if no update has begun; returns names of changed state that was not remembered."""
        lost = self._undo.rollback()
        self.attributes.put_back()
        return lost

    def moment(self) -> Moment:
        """Memory for another moment, to which the state can go back; forgotten when the state is replaced."""
        made = Moment(self._roster, self.modes, self.variables)
        self._moments.append(made)
        return made

    def dismiss(self, moment: Moment) -> None:
        """Drop a moment that is not needed any more."""
        self._moments.remove(moment)

    def everything(self, *, host: bool = False) -> Scope:
        """The scope of all protected state."""
        return Scope.everything(self._roster, host=host)

    # --- a full copy ---

    def capture(self) -> Captured:
        """A full copy of everything, gradients too."""
        inventory, table = self._survey(self.state_at)
        values = {name: local(tensor).detach().to("cpu", copy=True) for name, tensor in table.items()}
        return Captured(inventory, values, copied_gradients(self.parameters()))

    def restore(self, captured: Captured) -> None:
        """Go back to a copy; optimizer state that was created since is dropped. The copy can be used again."""
        targets = self.prepare(captured.inventory)
        with torch.no_grad():
            for name, tensor in targets.items():
                tensor.detach().copy_(captured.values[name])
            give_gradients(self.parameters(), captured.gradients)
        self.finish()

    def canonical(self) -> tuple[Inventory, dict[str, torch.Tensor]]:
        """All state, with the local part of each tensor, in an order that is the same on every worker."""
        inventory, table = self._survey(self.state_at, canonical=True)
        return inventory, {name: local(tensor) for name, tensor in table.items()}

    def buffers_of_no(self, modules: Sequence[torch.nn.Module]) -> set[str]:
        """Names of protected buffers that belong to none of these modules."""
        shared = {id(buffer) for module in modules for buffer in nn.Module.buffers(module)}
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
        """Names, shapes and dtypes, and the Python state. Raises `StateError` if the state is not at `step`."""
        if self.state_at != step:
            where = "is torn" if self.state_at == NO_STATE else f"stands at step {self.state_at}"
            raise StateError(f"state@{step} was asked for; the state of this worker {where}")
        inventory, self._table = self._survey(step)
        return inventory

    def tensor(self, name: str) -> torch.Tensor:
        """Local part of a tensor of the last `inventory`, not a copy. Raises `StateError` for an unknown name."""
        if name not in self._table:
            raise StateError(f"{name} is not part of the protected state")
        return local(self._table[name])

    def finder(self) -> Callable[[str], torch.Tensor | None]:
        """Returns a function from a tensor's name to its parameter or buffer, or to the owner of optimizer state."""
        owners = {f"{name}.{s}": p for name, short in self._roster.optimized.items() for s, p in short.items()}
        owners |= self._roster.parameters | self._buffers()
        return lambda name: owner_of(name, owners)

    def made_by_updates(self) -> int:
        """Number of parameters for which optimizers have state."""
        return sum(len(optimizer.state) for optimizer in self.optimizers())

    def is_optimizers(self, name: str) -> bool:
        """True if a tensor of that name belongs to an optimizer's state."""
        stems = tuple(f"{optimizer}." for optimizer in self._roster.optimizers)
        return name.startswith(stems) and name not in self._roster.parameters

    def changed_by_updates(self) -> set[str]:
        """Names in the last `inventory` of tensors that only an update changes, as far as is known."""
        written = self.habits.all | self.looker.likely().parameters
        if self.between.serves_commits:  # restartable functions may exchange weights at once
            written |= self.looker.large().parameters
        ids = {id(parameter) for name, parameter in self._roster.parameters.items() if name not in written}
        for optimizer in self.optimizers():
            for values in optimizer.state.values():
                ids.update(id(value) for value in values.values() if isinstance(value, torch.Tensor))
        return {name for name, tensor in self._table.items() if id(tensor) in ids}

    def _survey(self, step: StepNo, *, canonical: bool = False) -> tuple[Inventory, dict[str, torch.Tensor]]:
        table = self._roster.parameters | self._buffers()
        self._roster.late.come_behind(() if canonical else self.parameters())

        def lift(path: str, tensor: torch.Tensor) -> str:
            while path in table:
                path += "'"
            table[path] = tensor
            return path

        def packed(value: object, path: str) -> bytes:
            return encode(value, path=path, lift=lift, canonical=canonical)

        optimizers = sorted(self._roster.optimizers)
        python = PythonState(
            groups={name: self._roster.groups(name) for name in optimizers},
            settings={name: packed(self._settings(name), f"{name}.param_groups") for name in optimizers},
            state={name: packed(self._roster.state_of(name), name) for name in optimizers},
            objects={
                name: packed(self._roster.objects[name].state_dict(), name) for name in sorted(self._roster.objects)
            },
            modes=b"" if canonical else encode(self.modes.state(), path="modes"),
        )
        entries = [TensorEntry.of(name, table[name]) for name in sorted(table)]
        variables = {} if canonical else self.variables.encoded()
        return Inventory(step, entries, msgspec.msgpack.encode(python), variables), table

    def _settings(self, optimizer: str) -> list[dict[str, object]]:
        return [settings(group) for group in self._roster.optimizers[optimizer].param_groups]

    # --- as a StateSink ---

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        """Tensors to be filled, new ones for optimizer state that this worker lacks. The state is torn from here on.

        Raises `StateError`, with nothing changed, if the two sides do not fit.
        """
        try:
            python = msgspec.msgpack.decode(inventory.python, type=PythonState)
        except msgspec.MsgspecError as error:
            raise StateError(f"the Python state that was received does not decode: {error}") from error
        offered = {entry.name: entry for entry in inventory.entries}
        _, present = self._survey(self.state_at)
        targets = self._module_targets(offered, present)
        owners = {f"{name}.{s}": p for name, short in self._roster.optimized.items() for s, p in short.items()}

        def resolve(name: str) -> torch.Tensor:
            if name not in targets:
                targets[name] = target(name, offered, present, owner_of(name, owners), self.parameters())
            return targets[name]

        self._check_names(python)
        arrival = Arrival(
            inventory.step,
            targets,
            {name: decode(data, resolve=resolve) for name, data in python.settings.items()},
            {name: decode(data, resolve=resolve) for name, data in python.state.items()},
            {name: decode(data, resolve=resolve) for name, data in python.objects.items()},
            decode(python.modes) if python.modes else None,
            inventory.variables,
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
                    f"{name} is {shape_of(here)} here and {shape_of(there)} in the state",
                    hint="the script must build the same model on every worker",
                )
        return {name: present[name] for name in names}

    def _check_names(self, python: PythonState) -> None:
        here = {name: self._roster.groups(name) for name in self._roster.optimizers}
        if python.groups != here:
            raise StateError(
                f"the optimizers' parameter groups differ: {sizes(here)} here, {sizes(python.groups)} in the state",
                hint="build the optimizers the same way on every worker, before protect()",
            )
        if python.objects.keys() != self._roster.objects.keys():
            raise StateError(
                f"protected here: {sorted(self._roster.objects)}; in the state: {sorted(python.objects)}",
                hint="protect the same objects under the same names on every worker",
            )

    def finish(self) -> None:
        """Complete the state of the inventory, as all targets are filled. Raises `StateError` without `prepare`."""
        if self._arrival is None:
            raise StateError("finish() without prepare()")
        arrival, self._arrival = self._arrival, None
        with torch.no_grad():
            for name, thing in self._roster.objects.items():
                put_object(name, thing, arrival.objects[name], in_place=False)
            for name, optimizer in self._roster.optimizers.items():
                put_optimizer(optimizer, self._roster.optimized[name], arrival.settings[name], arrival.state[name])
        if isinstance(arrival.modes, dict):
            self.modes.receive(arrival.modes)
        self.variables.receive(arrival.variables)
        for moment in self._moments:
            moment.forget()
        self.state_at = arrival.step


def _memory(tensors: list[torch.Tensor], optimizers: list[torch.optim.Optimizer]) -> set[int]:
    """Addresses of the memory to which the script's variables may have views."""
    states = [held for each in optimizers for values in each.state.values() for held in values.values()]
    dense = [each for each in [*tensors, *states] if isinstance(each, torch.Tensor) and each.layout is torch.strided]
    return {local(each).untyped_storage().data_ptr() for each in dense}
