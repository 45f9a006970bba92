"""Takes digests of parts of the state now and then, which the coordinator compares without a wait of any rank.

The step alone selects the parts, so replicas take the same ones. Python state is taken whole, tensors in blocks.
"""

import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import msgspec
import torch
import xxhash

from regrow.agent.workers.link import WorkerLink
from regrow.core.ids import Seconds, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.replicas import StateSampled
from regrow.devices.stream_points import LateBytes
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.memory import bytes_of
from regrow.hydration.plan import ByteSpan
from regrow.train.state.protected import ProtectedState
from regrow.train.values.arrays import flat_bytes
from regrow.train.worker.control import Control
from regrow.train.worker.cost_interval import CostInterval

_BLOCKS = 16
_BLOCK_BYTES = 1 << 16
_MOST_NAMES = 256
"""Most digests sent when all tensors, or a part of them, are compared."""
_PART_BYTES = 1 << 26
"""Bytes compared at one step after a recovery: all at once would hold up all ranks for seconds if a rank has
some gigabytes."""
_MADE_BYTES = 1 << 26
_MADE_BLOCK = 1 << 14
"""Tensors made by the first updates are digested whole up to `_MADE_BYTES` in all, else three blocks of each."""
_LOOKS_AT_MADE = 4
_RANKS_A_STEP = 1000
"""In a larger world, parts are compared some steps apart, as the coordinator receives a digest from each rank."""

_Found = TypeVar("_Found")
_Digests = tuple[dict[str, int], dict[str, int]]
"""Digests of tensors, and of Python state, by name."""


class _Piece(NamedTuple):
    """Bytes of a tensor."""

    entry: TensorEntry
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Name of the tensor, with the range of bytes if it is not the whole tensor."""
        whole = self.stop - self.start == self.entry.nbytes
        return self.entry.name if whole else f"{self.entry.name}[{self.start}:{self.stop}]"


class _Begun(NamedTuple):
    """A sample whose bytes devices are still copying, while the host runs ahead of them."""

    fact: StateSampled
    names: list[str]
    data: LateBytes
    spent: Seconds
    step_s: Seconds
    """Duration of a step since the sample before; 0 if not known."""


class Sampler:
    """Computes digests of one worker's state and sends them to the coordinator, which compares those of replicas.

    Args:
        own: called before digests are computed; returns names of tensors that may differ between replicas.
    """

    def __init__(
        self, link: WorkerLink, control: Control, state: ProtectedState, *, own: Callable[[], Iterable[str]]
    ) -> None:
        self._link, self._control, self._state, self._own = link, control, state, own
        self._pace = CostInterval()
        self._replicated = self._failed = False
        self._whole_from: StepNo | None = None
        """First of the steps at which all state is compared, part by part; None if that is done."""
        self._apart = 1
        self._last: tuple[StepNo, Seconds] | None = None
        self._made = self._looks_at_made = 0
        self._begun: _Begun | None = None

    def join(self, form: orders.FormGeneration, *, again: bool) -> None:
        """Start anew in a membership. `again`: it is not the first, so all is compared once from its first step on."""
        holdings = [member.holding for member in form.members]
        self._replicated = len(set(holdings)) < len(holdings)
        self._pace.world = len(form.members)
        self._whole_from = StepNo(form.step + 1) if again else None
        self._apart = -(-len(form.members) // _RANKS_A_STEP)
        self._last = self._begun = None

    def tick(self, step: StepNo, *, last: bool) -> None:
        """Report the digests that are due at the boundary before `step`, or after the last one."""
        part = None if last else self._part_at(step)
        whole = last or part is not None
        if self._failed or not self._replicated:
            return
        self._report_begun(wait=whole)
        if whole:
            self._report_whole(step, part)
        elif self._made_anew(step):
            self._report_made(step)
        elif step > 0 and step % self._pace.every == 0:  # the initial state was compared before
            self._report_begun(wait=True)
            self._begin(step)

    def _report_whole(self, step: StepNo, part: int | None) -> None:
        found = self.look(part=part)
        if found is None:
            return
        if part and not found[0]:  # the first part is sent even if it has Python state only
            self._whole_from = None
            return
        self._link.send(msgspec.structs.replace(self._fact(step), tensors=found[0], python=found[1], whole=True))
        self._last = step, time.perf_counter()

    def _begin(self, step: StepNo) -> None:
        """Take the due sample. The device copies the bytes in its own order; they are read about a step later."""
        started = time.perf_counter()
        found = self._guarded(lambda: sampled(self._state, frozenset(self._own()), step))
        if found is None:
            return
        blocks, python = found
        fact = msgspec.structs.replace(self._fact(step), python=python)
        spent, step_s = time.perf_counter() - started, 0.0
        if self._last is not None and step > self._last[0]:
            step_s = (started - self._last[1]) / (step - self._last[0])
        self._begun = _Begun(fact, list(blocks), LateBytes(list(blocks.values())), spent, step_s)
        self._last = step, started + spent
        self._report_begun(wait=False)

    def _report_begun(self, *, wait: bool) -> None:
        """Report the sample that was begun, if its bytes have arrived; `wait`: wait for them."""
        begun = self._begun
        if begun is None:
            return
        known = self._guarded(lambda: wait or begun.data.known())
        if known is False:
            return
        self._begun = None
        if self._guarded(begun.data.read) is None:
            return
        started = time.perf_counter()
        tensors = _hashed(begun.names, begun.data)
        self._link.send(msgspec.structs.replace(begun.fact, tensors=tensors))
        if begun.step_s:
            self._pace.took(begun.spent + time.perf_counter() - started, begun.step_s)

    def _fact(self, step: StepNo) -> StateSampled:
        worker, generation = self._link.env.worker, self._control.generation
        return StateSampled(worker, generation, step, {}, {}, variables=self._variables())

    def _made_anew(self, step: StepNo) -> bool:
        """True if updates have made new state that was not compared, or if this may be so on another rank."""
        before, self._made = self._made, self._state.made_by_updates()
        if (self._made <= before and step != 1) or self._looks_at_made >= _LOOKS_AT_MADE:
            return False
        self._looks_at_made += 1
        return True

    def _report_made(self, step: StepNo) -> None:
        found = self.look(made=True)
        if found is not None:
            made = {name: value for name, value in found[0].items() if self._state.is_optimizers(name)}
            tensors = {name: value for name, value in found[0].items() if name not in made}
            self._link.send(msgspec.structs.replace(self._fact(step), tensors=tensors, made=made))

    def _variables(self) -> dict[str, int]:
        found = self._state.variables.sampled()
        return {place: xxhash.xxh3_64_intdigest(value) for place, value in found.items()}

    def _part_at(self, step: StepNo) -> int | None:
        """Number of the part to compare before `step`, after a recovery; None if no part is due."""
        if self._whole_from is None or step < self._whole_from or (step - self._whole_from) % self._apart:
            return None
        return (step - self._whole_from) // self._apart

    def look(self, *, part: int | None = None, made: bool = False) -> _Digests | None:
        """Compute digests of this worker's state; for `part` and `made` see `digests`.

        If the state cannot be read, report why, stop the regular comparisons and return None: training goes on.
        """
        return self._guarded(lambda: digests(self._state, frozenset(self._own()), part=part, made=made))

    def _guarded(self, look: Callable[[], _Found]) -> _Found | None:
        try:
            return look()
        except Exception as error:  # noqa: BLE001  anything that the script's objects raise
            self._failed = True
            text = f"replicas are not compared: {type(error).__name__}: {error}"
            self._link.send(facts.WorkerNoted(self._link.env.worker, text))
            return None


def digests(
    state: ProtectedState,
    left_out: frozenset[str],
    *,
    sample: StepNo | None = None,
    part: int | None = None,
    made: bool = False,
) -> _Digests:
    """Digests of tensors, or of pieces of them, and of Python state, by name; equal on replicas.

    Args:
        left_out: tensors that each rank has for itself.
        sample: digest some blocks of tensors, selected by this step.
        part: digest this part of all tensors; empty after the last part. Without both: all of them.
        made: digest tensors that updates have made, and the others, each whole or in three blocks.
    """
    if sample is not None:
        blocks, python = sampled(state, left_out, sample)
        return _hashed(blocks, LateBytes(list(blocks.values()))), python
    inventory, tensors = state.canonical()
    entries = _compared(inventory, left_out)
    if made:
        return _made(state, entries, tensors), {}
    pieces = [_Piece(entry, 0, entry.nbytes) for entry in entries] if part is None else list(_part(entries, part))
    return _every(pieces, tensors), _fields(inventory)


def _hashed(names: Iterable[str], data: LateBytes) -> dict[str, int]:
    return dict(zip(names, map(xxhash.xxh3_64_intdigest, data.read()), strict=True))


def sampled(
    state: ProtectedState, left_out: frozenset[str], step: StepNo
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Blocks of tensors selected by the step, on their devices, and digests of Python state, by name."""
    inventory, tensors = state.canonical()
    return _sample(_compared(inventory, left_out), tensors, step), _fields(inventory)


def _compared(inventory: Inventory, left_out: frozenset[str]) -> list[TensorEntry]:
    return [entry for entry in inventory.entries if entry.name not in left_out and entry.nbytes]


def _part(entries: Iterable[TensorEntry], number: int) -> Iterator[_Piece]:
    """Pieces in one of the equal ranges into which all tensors' bytes are divided."""
    start, at = number * _PART_BYTES, 0
    for entry in entries:
        first, last = max(start, at), min(start + _PART_BYTES, at + entry.nbytes)
        if first < last:
            yield _Piece(entry, first - at, last - at)
        at += entry.nbytes


def _every(pieces: list[_Piece], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Digests of all pieces, in groups of neighbours if there are many."""
    size = max(1, -(-len(pieces) // _MOST_NAMES))
    found = {}
    for group in (pieces[at : at + size] for at in range(0, len(pieces), size)):
        total = xxhash.xxh3_64()
        for piece in group:
            entry = piece.entry
            total.update(f"{piece.name}|{entry.dtype}|{entry.shape}|{entry.box}\n".encode())
            total.update(_bytes(tensors[entry.name], piece.start, piece.stop).numpy().data)
        names = group[0].name if len(group) == 1 else f"{group[0].name} to {group[-1].name}"
        found[names] = total.intdigest()
    return found


def _made(state: ProtectedState, entries: list[TensorEntry], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    found: dict[str, int] = {}
    for made in (False, True):
        group = [entry for entry in entries if state.is_optimizers(entry.name) is made]
        all_of_it = sum(entry.nbytes for entry in group) <= _MADE_BYTES
        found |= _every([piece for entry in group for piece in _blocks(entry, all_of_it=all_of_it)], tensors)
    return found


def _blocks(entry: TensorEntry, *, all_of_it: bool) -> Iterator[_Piece]:
    """A tensor as one piece, or its first, middle and last blocks."""
    if all_of_it or entry.nbytes <= 3 * _MADE_BLOCK:
        yield _Piece(entry, 0, entry.nbytes)
        return
    for start in (0, entry.nbytes // 2, entry.nbytes - _MADE_BLOCK):
        yield _Piece(entry, start, start + _MADE_BLOCK)


def _sample(entries: list[TensorEntry], tensors: Mapping[str, torch.Tensor], step: StepNo) -> dict[str, torch.Tensor]:
    """Some blocks: half drawn by bytes, half by tensors, as small tensors such as biases would rarely be drawn."""
    ends = list(itertools.accumulate(entry.nbytes for entry in entries))
    found = {}
    for number in range(min(_BLOCKS, 2 * len(entries))):
        drawn = xxhash.xxh3_64_intdigest(f"{step}/{number}".encode())
        at = bisect.bisect_right(ends, drawn % ends[-1]) if number % 2 else drawn % len(entries)
        entry = entries[at]
        block = (drawn >> 20) % -(-entry.nbytes // _BLOCK_BYTES)
        start, stop = block * _BLOCK_BYTES, min((block + 1) * _BLOCK_BYTES, entry.nbytes)
        span = ByteSpan(entry.name, start, stop - start)
        found[f"{entry.name}[{start}:{stop}]"] = bytes_of(tensors[entry.name], span)
    return found


def _bytes(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Some of a tensor's bytes, without a copy of the others if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        return flat_bytes(plain)[start:stop]
    return plain.reshape(-1).view(torch.uint8)[start:stop].cpu()


def _fields(inventory: Inventory) -> dict[str, int]:
    """Digests of the Python state, one for each field of every protected object."""
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
