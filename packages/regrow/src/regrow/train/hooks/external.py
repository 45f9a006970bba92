"""Results from outside of the training that cannot be requested twice: of a simulator, a browser, a paid service.

Each is drawn once, and returned again to a body that runs again: to a survivor from its own memory, to a replaced rank
from its node's agent. If no copy is left it is drawn again, which is reported. See decision 0113.
"""

import contextlib
import functools
import random
from collections.abc import Callable
from operator import methodcaller
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import torch
from torch.distributed import DistError

from regrow.comm.store import AgentStore
from regrow.core.errors import GenerationHalted, StateError, UsageError
from regrow.core.ids import Generation, StepNo
from regrow.core.messages.facts import WorkerNoted
from regrow.core.messages.store import FIRST_SPAWNED, TABLE_BYTES
from regrow.core.messages.vocabulary import WorldChange
from regrow.data.seeding import generators_kept
from regrow.devices import accelerators
from regrow.hydration.codec import decode, dtype_name, dtype_of, encode
from regrow.train.script.source import is_script
from regrow.train.values.arrays import flat_bytes
from regrow.train.worker.participation import Participation

T = TypeVar("T")
MOST_BYTES = 64 << 20
"""Largest size of the kept results of one rank in one step."""
MOST_COPIED = 32 << 20
"""Largest size of the results that the agent keeps; less if all ranks of a node would fill a quarter of its table."""
_KEPT_STEPS = 2
"""Steps whose results are kept: the present one, and the one before, which this worker may have committed alone."""
_MOST_OBJECTS = 1_000
Place = tuple[int, int, StepNo]
"""World size, rank and job's step of a draw."""


class _Newest(msgspec.Struct, array_like=True, frozen=True):
    """The newest step of a rank on a node, the number of draws begun in it, and the generation in which it ran."""

    world: int
    step: int
    begun: int
    generation: Generation


class ExternalDraws:
    """The draws of one worker.

    Args:
        worker: how this process takes part in a job.
    """

    def __init__(self, worker: Participation) -> None:
        self._worker = worker
        self._kept: dict[Place, list[bytes]] = {}
        self._copies: dict[str, StepNo] = {}
        """Names of copies that the agent keeps, and their steps."""
        self._calls = 0
        self._reported: set[str] = set()
        self._store: AgentStore | None = None
        self._newest: _Newest | None = None
        self._looked_for = -1
        """Rank for which the draws of its former worker have been looked for; -1 at first."""
        self._last = StepNo(-1)
        """Newest step in which this worker has drawn."""
        self._joins = self._draws_unknown = False
        """`_joins`: True for a newcomer. `_draws_unknown`: lost workers may have drawn in its first step."""
        self._joined = StepNo(-1)
        """The first step of a newcomer for which draws are unknown; -1 if there is none."""
        self.used = False
        self.outside: dict[int, object] = {}
        """Objects with which draws are made: they cannot be put back, and need no protection."""

    def arrives(self) -> None:
        """Called after the rehearsal: record for later workers of this node that its ranks have not drawn yet."""
        worker = self._worker
        self._joins = worker.newcomer
        if self._joins:
            return
        self._draws_unknown = worker.groups.generation > 1 and not worker.training.finished  # all have started again
        if self.used and not self._draws_unknown and self._reported_newest() is None:
            self._write(_Newest(worker.world, worker.step, 0, worker.groups.generation))

    def regrouped(self, change: WorldChange | None) -> None:
        """Enter a new generation: find out if lost workers may have drawn. `change`: of the world's size, if any."""
        if self._joins:
            self._draws_unknown = change is None or change.kind == "fault"
        self._joins = False
        if self.used and (newest := self._reported_newest()) is not None and self._is_exact(newest):
            self._write(msgspec.structs.replace(newest, generation=self._worker.groups.generation))

    def begins(self, step: StepNo, *, rehearsal: bool) -> None:
        """Begin a body: drop the results of old steps, and record that draws of this step may begin."""
        self._calls = 0
        if rehearsal:
            return
        if self._draws_unknown:
            self._joined, self._draws_unknown = step, False
        if not self.used:
            return
        self._look()
        place = self._place(step)
        for old in [each for each in self._kept if each[2] <= step - _KEPT_STEPS]:
            del self._kept[old]
        for name in [name for name, at in self._copies.items() if at <= step - _KEPT_STEPS]:
            del self._copies[name]
            self._asked(methodcaller("delete_key", name))
        kept, newest = self._kept.get(place), self._newest
        back = step <= self._last or (newest is not None and newest.step > step)
        if kept or not (back or (step == self._joined and not self._knows_all(step))):  # else the old record is better
            self._begun(place, len(kept or ()))

    def draw(self, step: StepNo, make: Callable[[], Any], like: object, *, rehearsal: bool) -> Any:
        """Result of `make`, drawn once: see `Step.external`."""
        self.used = True
        packed = _packed(like, "like")
        if rehearsal:
            self.outside |= _objects_of(make)
            return _unpacked(packed)
        self._look()
        place, call = self._place(step), self._calls
        self._calls += 1
        kept = self._kept.setdefault(place, [])
        if call == len(kept) and (copy := self._copied(place, call)) is not None:
            kept.append(copy)
        if call < len(kept) and kept[call]:
            return _unpacked(kept[call])
        if call < len(kept):
            self._doubt(step, "it was too large to be kept")
        return self._made(place, call, make)

    # --- the draw ------------------------------------------------------------------------------------------------

    def _made(self, place: Place, call: int, make: Callable[[], Any]) -> Any:
        kept, body = self._kept[place], self._worker.body
        self._begun(place, call + 1)
        # A halt ends a body's forward pass at its next module: a draw must not be lost in that way.
        body.entered, entered = False, body.entered
        try:
            before = _generators()
            with generators_kept():
                value = make()
                after = _generators()
        finally:
            body.entered = entered
        self._last = max(self._last, place[2])
        packed = _packed(value, "the result", after if after != before else b"")
        if call == len(kept):
            kept.append(b"")
        size = sum(map(len, kept)) + len(packed)
        if size > MOST_BYTES:
            self._note(
                f"what a rank draws by step.external in a step has more than {MOST_BYTES / 1e6:,.0f} MB: the rest is "
                "not kept, and is drawn again where a fault strikes after it"
            )
        else:
            kept[call] = packed
            self._copy(place, call, packed, size)
        return _unpacked(packed)

    def _doubt(self, step: StepNo, why: str) -> None:
        text = f"rank {self._worker.rank} has drawn again by step.external in step {step}, after a fault: {why}"
        self._note(text, doubts=True)

    def _note(self, text: str, *, doubts: bool = False) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self._worker.send(WorkerNoted(self._worker.worker_id, text, doubts=doubts))

    # --- copies that the agent of this node keeps ----------------------------------------------------------------

    def _place(self, step: StepNo) -> Place:
        return self._worker.world, self._worker.rank, step

    def _copy(self, place: Place, call: int, packed: bytes, size: int) -> None:
        most = min(MOST_COPIED, TABLE_BYTES // 4 // (_KEPT_STEPS * self._worker.nproc))
        if size > most:
            self._note(
                f"what a rank draws by step.external in a step has more than {most / 1e6:,.0f} MB: the rest is not "
                "copied to its node's agent, and is drawn again where the rank is replaced in that step"
            )
            return
        name = _name(place, call)
        self._copies[name] = place[2]
        self._asked(lambda store: store.set(name, packed))

    def _look(self) -> None:
        """Called when this worker has got its rank: learn how far the rank's former worker on this node has come."""
        if self._looked_for == self._worker.rank:
            return
        self._looked_for, self._newest = self._worker.rank, self._reported_newest()
        for name in self._asked(lambda store: store.list_keys()) or ():
            if name.startswith("external/") and name.count("/") == 4:  # perhaps no other worker is left to delete it
                self._copies[name] = StepNo(int(name.split("/")[3]))

    def _copied(self, place: Place, call: int) -> bytes | None:
        """Result that the rank's former worker drew at this place; None if there is none, or it is lost (reported)."""
        (world, _, step), newest = place, self._newest
        if step <= self._last:
            if not call:
                self._doubt(step, "the results were for another rank or world, or are not kept for so many steps")
            return None
        same = newest is not None and newest.step == step and newest.world == world
        if newest is None or newest.step < step or (same and call >= newest.begun):
            if step == self._joined and not self._knows_all(step):
                self._doubt(step, "what was drawn in it before is known on another node, or was lost with its agent")
            return None
        found = self._read(_name(place, call)) if newest.world == world else None
        if found is None:
            self._doubt(step, "there is no copy of it")
        return found

    def _knows_all(self, step: StepNo) -> bool:
        """True if this rank has drawn in the step on this node only, and the node's agent has not changed meanwhile."""
        newest = self._newest
        exact = newest is not None and newest.step >= step - 1 and self._is_exact(newest)
        return exact or (self._worker.one_node and self._read(FIRST_SPAWNED) == b"1")

    def _is_exact(self, newest: _Newest) -> bool:
        """True if the rank was on this node in the generation before this one, so it has not drawn elsewhere since."""
        return newest.generation >= self._worker.groups.generation - 1

    def _begun(self, place: Place, draws: int) -> None:
        newest = self._newest
        draws = max(draws, newest.begun) if newest is not None and newest.step == place[2] else draws
        self._write(_Newest(place[0], place[2], draws, self._worker.groups.generation))

    def _write(self, newest: _Newest) -> None:
        reported = msgspec.msgpack.encode(newest)
        self._asked(lambda store: store.set(f"external/{self._worker.rank}", reported))

    def _reported_newest(self) -> _Newest | None:
        reported = self._read(f"external/{self._worker.rank}")
        return None if reported is None else msgspec.msgpack.decode(reported, type=_Newest)

    def _read(self, name: str) -> bytes | None:
        return self._asked(lambda store: store.get(name) if store.check([name]) else None)

    def _asked(self, ask: Callable[[AgentStore], T]) -> T | None:
        """Answer of the agent; None if there is no agent, or it does not answer (reported)."""
        try:
            if self._store is None:
                self._store = self._worker.node_store()
            return None if self._store is None else ask(self._store)
        except (DistError, GenerationHalted) as error:
            self._note(f"results of step.external cannot be copied to their node's agent: {error}")
            return None


def _name(place: Place, call: int) -> str:
    return f"external/{place[1]}/{place[0]}/{place[2]}/{call}"


# --- values ------------------------------------------------------------------------------------------------------


def _generators() -> bytes:
    """States of the global random generators."""
    device = accelerators.random_state()
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()]
    return encode([*states, None if device is None else device.cpu().numpy()])


def _put_generators(states: bytes) -> None:
    pythons, numpys, torchs, device = cast(list[Any], decode(states))
    random.setstate(pythons)
    np.random.set_state(numpys)
    torch.set_rng_state(torch.from_numpy(torchs))
    if device is not None:
        accelerators.put_random_state(torch.from_numpy(device))


def _packed(value: object, path: str, generators: bytes = b"") -> bytes:
    """A value as bytes, with the generators' states after the draw if it changed them. Raises `UsageError`."""
    tensors: list[list[object]] = []

    def lift(path: str, tensor: torch.Tensor) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise StateError(f"{path}: a {type(tensor).__name__} of layout {tensor.layout} cannot be kept")
        raw = flat_bytes(tensor).numpy().tobytes()
        tensors.append([dtype_name(tensor.dtype), list(tensor.shape), tensor.device.type, raw])
        return str(len(tensors) - 1)

    try:
        return msgspec.msgpack.encode([encode(value, path=path, lift=lift), tensors, generators])
    except StateError as error:
        raise UsageError(
            f"step.external: {error.cause.replace('cannot be protected', 'cannot be kept')}",
            hint="let it be numbers, texts, bytes, tensors and arrays, in lists, tuples, sets and dicts",
        ) from error


def _unpacked(packed: bytes) -> Any:
    """A new copy of the value; sets the generators as they were after the draw."""
    encoded, tensors, generators = msgspec.msgpack.decode(packed)

    def resolve(name: str) -> torch.Tensor:
        dtype, shape, device, raw = tensors[int(name)]
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return flat.view(dtype_of(dtype)).reshape(shape).to(device)

    value = decode(encoded, resolve=resolve)
    if generators:
        _put_generators(generators)
    return value


def _objects_of(make: object) -> dict[int, object]:
    """Objects, by id, to which a function or the functions that it calls refer."""
    found: dict[int, object] = {}
    near = [make]
    while near and len(found) < _MOST_OBJECTS:
        if id(each := near.pop()) in found:
            continue
        found[id(each)] = each
        if isinstance(each, functools.partial):
            near += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, MethodType):
            near += [each.__self__, each.__func__]
        elif isinstance(each, FunctionType) and is_script(each.__code__.co_filename):
            with contextlib.suppress(ValueError):  # raised for a variable that is not set yet
                near += [cell.cell_contents for cell in each.__closure__ or ()]
            near += [each.__globals__[name] for name in each.__code__.co_names if name in each.__globals__]
            near += each.__defaults__ or ()
    return found
