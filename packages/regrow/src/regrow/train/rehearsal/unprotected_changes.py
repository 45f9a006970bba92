"""Finds unprotected objects that a body changes: averages, scalers, schedulers, random generators, iterators.

The search covers the places where a script can keep them: the variables of its running functions, and the objects and
containers in these.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from types import FrameType

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from regrow.comm.torch_private.internals import schedulers_in
from regrow.core.errors import UsageError
from regrow.hydration.shards import local
from regrow.train.attributes.kept_values import Generator, position, state_of
from regrow.train.graphs.kinds import OF_LIBRARIES, says_its_state, slot_values
from regrow.train.graphs.object_graph import living
from regrow.train.graphs.walk import own_state
from regrow.train.rehearsal import environments, iterators
from regrow.train.rehearsal.carried_arrays import CarriedArrays
from regrow.train.rehearsal.players import Players
from regrow.train.rehearsal.seeding import Seeding
from regrow.train.script.source import is_scripts
from regrow.train.state.protected import ProtectedState
from regrow.train.values.arrays import flat_bytes
from regrow.train.worker.updates import token

_DEEP = 3
_WIDE = 256
_AT_MOST = 5_000
"""Largest number of objects that are searched, and of parts of a nested state."""
_OF_MODULES = frozenset(vars(nn.Module()))
_SAMPLED = 16
"""Elements of a tensor that show if it was written: writes by `.data` do not count versions."""
Looked = nn.Module | LRScheduler | torch.amp.GradScaler | Generator
_OWN_GENERATORS = frozenset(map(id, OF_LIBRARIES))
"""Ids of the libraries' global generators, which are seeded for each body."""


class Unprotected:
    """A script's unprotected objects, and their state at the first look.

    Args:
        state: the protected state.
        objects: the protected objects as the script gave them.
        frames: frames of the script.
        seeds: whether to find out which generators are seeded before they are drawn from.
        first: whether the body that follows is the first.
        outside: ids of objects of `step.external`, which cannot and need not be put back.
    """

    def __init__(
        self,
        state: ProtectedState,
        objects: Iterable[object],
        frames: Iterable[FrameType],
        *,
        seeds: bool = True,
        first: bool = False,
        outside: Collection[int] = (),
    ) -> None:
        self._outside = outside
        objects, self._optimizers = list(objects), state.optimizers()
        self._tensors = {id(each) for each in state.parameters()}
        for each in objects:
            if isinstance(each, nn.Module):
                self._tensors.update(map(id, chain(each.parameters(), nn.Module.buffers(each))))
        self._stateful = [each for each in objects if _is_stateful(each)]
        known = {id(each) for each in _inside(objects)}
        self._graphs = state.graphs()
        known |= living(self._graphs)
        mine = {id(each) for each in _below(self._stateful)}
        self._things: dict[str, Looked] = {}
        self._environments: dict[str, object] = {}
        self._iterators: dict[str, object] = {}
        self._frames = list(frames)
        frames = self._frames
        for name, each in reachable(frames):
            with contextlib.suppress(Exception):  # as in `reachable`
                if isinstance(each, Looked) and id(each) not in known:
                    self._things[name] = each
                elif id(each) not in known | mine and environments.is_environment(each):
                    self._environments[name] = each
                elif id(each) not in known | mine and iterators.is_scripts_own(each):
                    self._iterators[name] = each
        self._seeding = Seeding(each for each in self._things.values() if seeds and isinstance(each, Generator))
        self.seeded: set[str] = set()
        """Names of generators that the body has seeded before it drew from them."""
        self._players = Players([*self._environments.values(), *objects] if first else (), frames)
        self._arrays = CarriedArrays(frames, known | mine | set(self._tensors)) if self._players else None
        self.look()

    def look(self) -> None:
        """Take the present state as the one with which later states are compared."""
        self._looks = {name: self._look(thing) for name, thing in self._things.items()}
        self._inner = {name: environments.look(each) for name, each in self._environments.items()}
        self._roots, self._put_away = self._variables(), self._generator_states(set())
        self._places = {name: iterators.position(each) for name, each in self._iterators.items()}

    def stop(self) -> None:
        """Stop watching the generators."""
        self._seeding.stop()

    def refuse_changed(self) -> None:
        """Raise `UsageError` if an unprotected object has changed that is not a random generator."""
        if self._arrays is not None and self._players.played():
            self._refuse_environments()
            self._arrays.refuse_changed()
        for name, thing in self._things.items():
            if not isinstance(thing, Generator):
                self._refuse(name, thing, "changes")
        self._refuse_environments()

    def refuse_drawn(self) -> None:
        """Raise `UsageError` if the body has drawn from a generator without seeding it first."""
        self.stop()
        for name, thing in self._things.items():
            if isinstance(thing, Generator) and self._seeding.seeded(thing):
                self.seeded.add(name)
            elif isinstance(thing, Generator):
                self._refuse(name, thing, "draws from")
        self._refuse_swapped()

    def refuse_unseeded(self, seeded: Collection[str]) -> None:
        """Raise `UsageError` if the body has drawn from one of these generators without seeding it this time."""
        self.stop()
        for name, thing in self._things.items():
            if name in seeded and isinstance(thing, Generator) and not self._seeding.seeded(thing):
                self._refuse(name, thing, "seeds in some steps only, and draws from,")

    def _refuse(self, name: str, thing: Looked, does: str) -> None:
        if self._look(thing) != self._looks[name] and not any(_state_covers(each, thing) for each in self._stateful):
            raise UsageError(
                f"the loop's body {does} `{name}` ({type(thing).__name__}), which is not protected: after a fault "
                "ranks would have different ones",
                hint=_cure(name),
            )

    def _refuse_swapped(self) -> None:
        known, roots = set(self._put_away.values()), self._variables()
        mine = {id(each) for each in _below(self._stateful)} | living(self._graphs)
        for name, state in self._generator_states(mine).items():
            holder = re.split(r"[.\[]", name, maxsplit=1)[0]
            kept = holder in self._roots and self._roots[holder] is roots.get(holder)
            if kept and state not in known:  # a state may be found under another name at the next look
                raise UsageError(
                    f"the loop's body puts another state of a generator into `{name}`, which is not protected: after a "
                    "fault ranks would draw others",
                    hint="give what holds it state_dict() and load_state_dict(), and "
                    f"give that to protect(..., {holder}={holder})",
                )

    def _variables(self) -> dict[str, object]:
        variables: dict[str, object] = {}
        for frame in reversed(self._frames):
            variables |= frame.f_globals | frame.f_locals
        return variables

    def _generator_states(self, mine: set[int]) -> dict[str, object]:
        """Generator states that the script keeps in containers and objects; plain variables are followed elsewhere."""
        return {
            name: flat_bytes(each).numpy().tobytes() if isinstance(each, torch.Tensor) else token(each)
            for name, each in reachable(self._frames)
            if not name.isidentifier() and id(each) not in mine and environments.is_generator_state(each)
        }

    def _refuse_environments(self) -> None:
        for name, each in self._environments.items():
            path = environments.difference(self._inner[name], environments.look(each))
            if path and id(each) not in self._outside:
                raise UsageError(
                    f"the loop's body changes `{name}` ({type(each).__name__}: its {path}), which is not protected: "
                    "after a fault ranks would have different ones",
                    hint="give it state_dict() and load_state_dict() for all that steps change, generators and what "
                    f"the next body reads of this one (an observation) too, and {_cure(name)}; where each rank has its "
                    'own, in a call of its own with part=f"rank{session.rank}", and --buddy-every',
                )

    def refuse_taken(self) -> None:
        """Raise `UsageError` if an item was taken from an iterator that the script keeps for itself."""
        for name, each in self._iterators.items():
            if iterators.advanced(self._places[name], iterators.position(each)):
                raise UsageError(
                    f"the loop's body takes from `{name}` ({type(each).__name__}), an iterator of the script's own: "
                    "the rehearsal has taken from it too, a step that runs again takes the next, and a rank that is "
                    "replaced begins with the first",
                    hint="let the step bring it: `for step in session.steps(loader, ...)`, `with step as batch`. Where "
                    "a step needs several, give a function of the step's number that returns them all, or a "
                    "loader of larger batches. Else protect an object that has its position in state_dict",
                )

    def refuse_waiting(self) -> None:
        """Raise `UsageError` for schedulers and averages that will change later, perhaps at the first epoch's end."""
        for name, thing in self._things.items():
            sets_rate = isinstance(thing, LRScheduler) and any(thing.optimizer is mine for mine in self._optimizers)
            average = isinstance(thing, AveragedModel) and not any(
                _state_covers(each, thing) for each in self._stateful
            )
            if sets_rate or average:
                raise UsageError(
                    f"`{name}` ({type(thing).__name__}) follows what is protected, at some step if not at the first, "
                    "and is not protected: after a fault ranks would have different ones",
                    hint=_cure(name),
                )

    def _look(self, thing: Looked) -> object:
        if isinstance(thing, nn.Module):
            named = chain(thing.named_parameters(), nn.Module.named_buffers(thing))
            return {name: (each._version, _first(each)) for name, each in named if id(each) not in self._tensors}
        if isinstance(thing, Generator):
            return position(thing)
        return token(thing.state_dict())


def _cure(name: str) -> str:
    short = name.rpartition(".")[2].rpartition("[")[0] or name.rpartition(".")[2]
    return f"give it to protect(..., {short}={name})"


def _first(tensor: torch.Tensor) -> bytes:
    if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return b""
    here = local(tensor).detach()
    if here.is_meta or not here.numel():
        return b""
    return flat_bytes(here.flatten()[:_SAMPLED]).numpy().tobytes()


def _inside(objects: Iterable[object]) -> Iterator[object]:
    """Protected objects, and the schedulers inside schedulers and wrappers, which belong to them."""
    for thing in objects:
        yield thing
        if isinstance(thing, LRScheduler):
            yield from _inside(schedulers_in(thing))
        elif not isinstance(thing, nn.Module | torch.optim.Optimizer):
            yield from _inside(
                each for each in getattr(thing, "__dict__", {}).values() if isinstance(each, LRScheduler)
            )


def _is_stateful(thing: object) -> bool:
    """True for a protected object of the script's own class that reports its state."""
    says = hasattr(thing, "state_dict") or says_its_state(thing)
    return says and not isinstance(thing, nn.Module | torch.optim.Optimizer | LRScheduler | Generator)


def _below(things: Iterable[object]) -> Iterator[object]:
    """Objects that the script's protected objects hold."""
    near, seen = list(things), set[int]()
    for _ in range(2 * _DEEP):
        near = [each for each in near if id(each) not in seen]
        seen.update(map(id, near))
        yield from near
        near = [each for thing in near for _, each in _held("", thing)]


def _state_covers(protected: object, thing: Looked) -> bool:
    """True if the state of a protected object contains that of `thing`."""
    with contextlib.suppress(Exception):  # the script's own code, not made for a call here
        parts = list(_parts(own_state(protected)))
        if isinstance(thing, nn.Module):
            reported = {each.data_ptr() for each in parts if isinstance(each, torch.Tensor)}
            own = [each for each in chain(thing.parameters(), nn.Module.buffers(thing)) if each.numel()]
            return bool(own) and all(each.data_ptr() in reported for each in own)
        state = _state_of(thing)
        return any(type(each) is not str and token(each) == state for each in parts)
    return False


def _state_of(thing: Looked) -> object:
    return token(state_of(thing) if isinstance(thing, Generator) else thing.state_dict())


def _parts(state: object) -> Iterator[object]:
    """A nested state, and all that is in it."""
    near = [state]
    for _ in range(_AT_MOST):
        if not near:
            return
        each = near.pop()
        yield each
        if isinstance(each, dict):
            near += each.values()
        elif isinstance(each, list | tuple) and len(each) <= _WIDE:
            near += each


def reachable(frames: Iterable[FrameType]) -> Iterator[tuple[str, object]]:
    """Objects that the script can reach, each once, with its name in the script."""
    seen: set[int] = set()
    near: list[tuple[str, object]] = []
    for frame in frames:
        near += frame.f_locals.items()
        near += frame.f_globals.items()
    for _ in range(_DEEP):
        around: list[tuple[str, object]] = []
        for name, thing in near:
            if id(thing) in seen or len(seen) > _AT_MOST:
                continue
            seen.add(id(thing))
            if id(thing) not in _OWN_GENERATORS:
                yield name, thing
            with contextlib.suppress(Exception):  # odd objects run code, and may raise, when they are inspected
                around += [*_held(name, thing)]
        near = around


def _held(name: str, thing: object) -> Iterable[tuple[str, object]]:
    if isinstance(thing, dict | list | tuple) and len(thing) > _WIDE:
        return ()
    if isinstance(thing, dict):
        return [(f"{name}[{key!r}]", each) for key, each in list(thing.items()) if isinstance(key, str | int)]
    if isinstance(thing, list | tuple):
        return [(f"{name}[{at}]", each) for at, each in enumerate(thing)]
    if not is_scripts(type(thing)):
        return ()
    # A module's parts are compared with it.
    plain = list(vars(thing).items()) if hasattr(thing, "__dict__") else []
    shown = [each for each in plain if each[0] not in _OF_MODULES]
    return [(f"{name}.{key}", each) for key, each in (*shown, *slot_values(thing).items())]
