"""Each worker takes digests of parts of its state now and then, for the coordinator to compare: nobody waits for that.

Which parts follows from the step alone, so replicas take the same ones. Python state is taken whole, tensors in blocks.
"""

import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import torch
import xxhash

from regrow.agent.workers.link import WorkerLink
from regrow.core.ids import Seconds, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.replicas import StateSampled
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.train.state.fingerprints import flat_bytes
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.control import Control
from regrow.train.worker.cost_interval import CostInterval

_BLOCKS = 16
_BLOCK_BYTES = 1 << 16
_MOST_PARTS = 256
"""Into so many parts all tensors are divided where all of them are compared."""


class Sampler:
    """One worker's part in it.

    Args:
        own: protected tensors' names that each rank has for itself, asked each time.
    """

    def __init__(
        self, link: WorkerLink, control: Control, state: ProtectedState, *, own: Callable[[], Iterable[str]]
    ) -> None:
        self._link, self._control, self._state, self._own = link, control, state, own
        self._pace = CostInterval()
        self._replicated = self._failed = False
        self._whole_at: StepNo | None = None
        self._last: tuple[StepNo, Seconds] | None = None

    def stand(self, form: orders.FormGeneration, *, again: bool) -> None:
        """A membership was ordered. `again`: it follows another, so all is compared once, after its first step."""
        holdings = [member.holding for member in form.members]
        self._replicated = len(set(holdings)) < len(holdings)
        self._pace.world = len(form.members)
        self._whole_at = StepNo(form.step + 1) if again else None
        self._last = None

    def tick(self, step: StepNo, *, last: bool) -> None:
        """At the boundary before `step`, or after the last one: say what is due."""
        whole = last or step == self._whole_at
        if self._failed or not self._replicated or not (whole or (step > 0 and step % self._pace.every == 0)):
            return  # what all start from was compared before
        started = time.perf_counter()
        found = self.look(None if whole else step)
        if found is None:
            return
        tensors, python = found
        worker, generation = self._link.env.worker, self._control.generation
        self._link.send(StateSampled(worker, generation, step, tensors, python, whole=whole))
        spent = time.perf_counter() - started
        if self._last is not None and step > self._last[0] and not whole:
            steps = step - self._last[0]
            self._pace.took(spent, (started - self._last[1]) / steps)
        self._last = step, started + spent

    def look(self, step: StepNo | None) -> tuple[dict[str, int], dict[str, int]] | None:
        """As `digests`; None, which is said, where the state cannot be looked at: training does not depend on it."""
        try:
            return digests(self._state, frozenset(self._own()), step)
        except Exception as error:  # noqa: BLE001  whatever the script's objects raise when they are asked
            self._failed = True
            text = f"replicas are not compared: {type(error).__name__}: {error}"
            self._link.send(facts.WorkerNoted(self._link.env.worker, text))
            return None


def digests(
    state: ProtectedState, left_out: frozenset[str], step: StepNo | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Digests of parts of tensors and of Python state, by name; equal on replicas.

    Args:
        left_out: tensors that each rank has for itself.
        step: whose sample; None: all of it.
    """
    inventory, tensors = state.canonical()
    entries = [entry for entry in inventory.entries if entry.name not in left_out and entry.nbytes]
    found = _all_of(entries, tensors) if step is None else _sample(entries, tensors, step)
    return found, _fields(inventory)


def _all_of(entries: list[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Every tensor, in groups of neighbours where there are many."""
    size = max(1, -(-len(entries) // _MOST_PARTS))
    found = {}
    for group in _batched(entries, size):
        total = xxhash.xxh3_64()
        for entry in group:
            total.update(f"{entry.name}|{entry.dtype}|{entry.shape}|{entry.box}\n".encode())
            total.update(flat_bytes(tensors[entry.name]).numpy().data)
        names = group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}"
        found[names] = total.intdigest()
    return found


def _batched(entries: list[TensorEntry], size: int) -> Iterable[list[TensorEntry]]:
    return (entries[at : at + size] for at in range(0, len(entries), size))


def _sample(entries: list[TensorEntry], tensors: Mapping[str, torch.Tensor], step: StepNo) -> dict[str, int]:
    """Some blocks: half of them where the bytes are, half from any tensor, since biases are small."""
    ends = list(itertools.accumulate(entry.nbytes for entry in entries))
    found = {}
    for number in range(min(_BLOCKS, 2 * len(entries))):
        drawn = xxhash.xxh3_64_intdigest(f"{step}/{number}".encode())
        at = bisect.bisect_right(ends, drawn % ends[-1]) if number % 2 else drawn % len(entries)
        entry = entries[at]
        block = (drawn >> 20) % -(-entry.nbytes // _BLOCK_BYTES)
        start, stop = block * _BLOCK_BYTES, min((block + 1) * _BLOCK_BYTES, entry.nbytes)
        piece = _piece(tensors[entry.name], start, stop)
        found[f"{entry.name}[{start}:{stop}]"] = xxhash.xxh3_64_intdigest(piece.numpy().data)
    return found


def _piece(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Some of a tensor's bytes, without a copy of the others where they lie in a row."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        return flat_bytes(plain)[start:stop]
    return plain.reshape(-1).view(torch.uint8)[start:stop].cpu()


def _fields(inventory: Inventory) -> dict[str, int]:
    """The Python state: of every protected object each field by itself."""
    python = msgspec.msgpack.decode(inventory.python)
    found = {"the optimizers' parameter groups": _digest(python["groups"])}
    for kind, suffix in (("settings", ".param_groups"), ("state", ".state"), ("objects", "")):
        for name, data in python[kind].items():
            value = _decoder.decode(data)
            if kind == "objects" and isinstance(value, dict):
                found |= {f"{name}.{key}": _digest(field) for key, field in value.items()}
            else:
                found[f"{name}{suffix}"] = xxhash.xxh3_64_intdigest(data)
    return found


def _digest(value: object) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(value))


def _opaque(code: int, payload: memoryview) -> object:
    return msgspec.msgpack.Ext(code, bytes(payload))


_decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(ext_hook=_opaque)
