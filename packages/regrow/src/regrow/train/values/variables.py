"""The script's own plain variables around its steps (`seen += 1`): restored with a step, sent to newcomers.

These are variables of the functions that run while the script requests and enters a step, and of their modules, and
attributes of objects that hold protected objects (`train/attributes/keepers.py`). A variable is left alone if it holds
other than plain values when it is kept or restored, and nothing here ends a training. Arrays count as plain in
variables that the loop's body may read before it writes them: such a variable carries something to the next body.
"""

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import PosixPath
from typing import Any, Concatenate, ParamSpec

from regrow.core.board import OWN_MOST
from regrow.core.errors import NotPlain, StateError, TooLarge
from regrow.train.attributes.keepers import Keepers
from regrow.train.attributes.kept_values import Attributes, nbytes_of
from regrow.train.values.arrays import ARRAYS, Keep
from regrow.train.values.glances import Glance
from regrow.train.values.plain import (
    ATOMS,
    PLAIN,
    GrownCopy,
    PlainCopy,
    has_grown,
    is_near,
    is_refused,
    keep,
    plain_kind,
    put_back,
    same,
    stays_here,
    still,
    take_over,
)
from regrow.train.values.sent import Sent, is_reading, received, sendable
from regrow.train.values.spaces import Frames, Space, Spaces
from regrow.train.values.unkept import Unkept

Values = dict[str, object]
"""Kept values of the variables of one namespace, by name."""
_Places = set[tuple[str, str]]
_Encoded = dict[str, bytes]
P = ParamSpec("P")
_NAMES = 1_000
"""Most variables of each call and of its module."""
_CONTAINERS, _BYTES = 64, 16 << 20
"""Most containers in each namespace, and most bytes of arrays."""
_MISSING, _VALUES, _SINGLE, _OWN = object(), PLAIN | ARRAYS, ATOMS | ARRAYS, frozenset({int, str, PosixPath})
_OVER = ""
"""Sent in place of a variable's name by a rank that has left the loop."""
_ANSWERS = "\n"
"""Sent in place of a variable's name: the answers of collectives since the last step."""
_UNKEPT = "\t"
"""Prefix of a place for which a fingerprint is sent instead of the value."""


def leaves_training_alone(function: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Decorator: an error in `function` ends the following of the script's variables, and training goes on."""

    @functools.wraps(function)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  what a script's variables may hold is not known
            self.close()
            self.notes.append(f"the script's own variables are not followed: {type(error).__name__}: {error}")

    return run


class Variables:
    """The plain variables of one script. `shared`: returns addresses of protected memory."""

    def __init__(self, shared: Callable[[], set[int]] = set) -> None:
        self._shared = shared
        self.places = Spaces()
        """Places of the script's values."""
        self._unheard: dict[str, Values] = {}
        """The script's own variables before those of others were received, until it requests a step."""
        self._first: dict[str, Values] = defaultdict(dict)
        """Value of each variable when it was seen for the first time."""
        self._now: dict[str, Values] = {}
        self._living: set[tuple[str, str]] = set()
        """Variables that were seen with two different values."""
        self._left: dict[str, bytes] | None = None
        """Values to send once the script has left its loop."""
        self._instead: dict[str, bytes] | None = None
        """Values to send meanwhile instead of `_left`: those of an earlier moment."""
        self.over = False
        """True if the script has left its loop, or those of the ranks that sent values had, so that no step follows."""
        self._glances: dict[str, Glance] = {}
        self._others: dict[str, set[str]] = {}
        self._made: dict[tuple[str, str], list[str]] = {}
        """For each flag: names of things made in the body in which it has changed."""
        self._learnt: dict[str, Values] = {}  # values of the variables after the rehearsal
        self._again = False  # True for a body that runs again: things that its first attempt made count as made in it
        self.is_newcomer = self.rehearsed = False
        """`rehearsed`: True after the rehearsal; variables that appear later are sent to newcomers, too."""
        self.withheld: frozenset[str] = frozenset()
        """Places whose received values are not taken over."""
        self.answers: Callable[[], bytes] = bytes
        """Returns answers of collectives since the last step, if newcomers may need them."""
        self.receive_answers: Callable[[bytes], object] = len
        self.mine: Mapping[str, bytes] = {}
        """Values that this rank's former worker left for it; `kept`: places of those that were taken over."""
        self.kept: list[str] = []
        self.anew: list[str] = []
        """Places of values that this rank begins anew, as nobody can send them."""
        self._since = time.time(), time.monotonic()
        self._unkept = Unkept(self.places, self.is_clock)
        self.notes: list[str] = []
        """Notes for people."""

    # --- one step ----------------------------------------------------------------------------------------------

    def follow(self, frames: Frames, objects: Iterable[Attributes] = (), keepers: Keepers | None = None) -> None:
        """Follow the script's variables from now on. Frames are not kept, as they would keep the values of steps alive.

        Args:
            frames: returns the script's running calls, innermost first.
            objects: objects around the loop that hold plain values; `keepers` finds more of them.
        """
        self.places.follow(frames, objects, keepers)
        self._glances = {}

    @leaves_training_alone
    def requests_step(self) -> None:
        """Find the variables to follow, as the script requests a step; they must still exist as it enters the step."""
        self._unheard = {}
        if self.places.requests_step():
            self._glances = {}

    @leaves_training_alone
    def enters(self) -> None:
        """Follow only variables that still exist as the script enters the step that it has requested."""
        self.places.enters()

    def take(self) -> dict[str, Values]:
        """Copies of the variables as they are now, by namespace."""
        self._look()
        return self._now

    @leaves_training_alone
    def begin(self) -> None:
        """Take fingerprints before the rehearsal; after it, note the values that it has changed and nobody restores."""
        if (changed := self._unkept.begin(self._now)) and not self.is_newcomer:
            shown = ", ".join(f"`{key}` of {name}" for name, key in (each.split("\n") for each in changed[:4]))
            self.notes.append(f"the rehearsal of the loop's body has changed {shown}, which nobody puts back")

    @leaves_training_alone
    def _look(self) -> None:
        before, self._now = self._now, {}
        for name, space in self.places.now().items():
            there = space.read()
            glance = self._glances.get(name)
            if self.rehearsed and glance is not None and name in before and glance.holds(there):
                self._now[name] = before[name]
                continue
            values, arrays = self._now.setdefault(name, {}), functools.partial(self.places.arrays, space)
            made = self._made_now(space, there)
            late, first, former = self.rehearsed and name in self._first, self._first[name], before.get(name, {})
            for key, value in self._followed(space, there).items():
                if type(value) not in ATOMS:
                    known = former.get(key)
                    try:
                        value = known if still(known, value) else keep(value, arrays(key))
                    except (NotPlain, TooLarge, RuntimeError, TypeError, ValueError):  # others are still followed
                        continue
                values[key] = value
                if type(value) is bool and former.get(key, value) is not value:
                    self._made[name, key] = made
                new = late and key not in first
                known = first.setdefault(key, value)
                if new or (known is not value and (name, key) not in self._living and not same(known, value)):
                    self._living.add((name, key))
                thing = getattr(known, "thing", None)
                if thing is not None and (name, key) in self._living and thing is not getattr(value, "thing", None):
                    first[key] = _MISSING  # do not keep an epoch's list beyond the epoch
            self._glances[name] = Glance(there, values, self.places.elsewhere, arrays)
        self._again = False

    def _made_now(self, space: Space, there: Mapping[str, object]) -> list[str]:
        """Names that got a value that is not plain since the last look, except those that each body makes anew."""
        others = {
            key for key, value in there.items() if type(key) is str and not self.places.is_value(space, key, value)
        }
        made = others - self._others.setdefault(space.name, others)
        if not self._again:
            self._others[space.name] = others
        return sorted(key for key in made if isinstance(space, Attributes) or self.places.carries(space, key))

    def _followed(self, space: Space, there: Mapping[str, object]) -> Values:
        found: Values = {}
        containers, nbytes = 0, 0
        for key, value in there.items():
            if type(key) is not str or key.startswith("__") or not self.places.follows(space, key, value):
                continue
            nbytes += nbytes_of(value)
            containers += type(value) not in _SINGLE
            if type(value) in ATOMS or (containers <= _CONTAINERS and nbytes <= _BYTES):
                found[key] = value
            if len(found) >= _NAMES:
                break
        return found

    @leaves_training_alone
    def put_back(self, then: Mapping[str, Values], *, in_place: bool = True) -> None:
        """Restore the variables; containers in place, and arrays too, if `in_place`."""
        if self._left is not None:
            self._instead = self._encoded(then) if then else None
        spaces, shared = self.places.now() if then else {}, functools.cache(self._shared)
        self._again = True
        if not self.rehearsed:
            self._learnt = {
                name: {key: value for key, value in values.items() if type(value) in _OWN}
                for name, values in self._now.items()
            }
        then = {name: values for name, values in then.items() if name in spaces}
        there = {name: spaces[name].read() for name in then}
        made = {name for name, values in then.items() if self._has_made(spaces[name], values, there[name])}
        for name, values in then.items():
            space, now, changed = spaces[name], there[name], Values()
            if self.places.untouched is not None and self.places.untouched.differ(space, values):
                continue
            stays = bool(made) if isinstance(space, Attributes) else name in made
            for key, kept in values.items():
                present = now.get(key)
                if not self.places.follows(space, key, present) or (stays and kept is None and type(present) in ARRAYS):
                    continue  # the array was made together with something that stays
                if self._stays(space, kept, present, in_place=in_place):
                    continue
                if isinstance(kept, PlainCopy | GrownCopy):
                    try:
                        keep(kept.thing, self.places.arrays(space, key))
                    except (NotPlain, TooLarge):
                        continue
                value = put_back(kept, shared if in_place else None)
                if value is not present or key not in now:
                    changed[key] = value
            if changed:
                space.write(changed)

    def _stays(self, space: Space, kept: object, present: object, *, in_place: bool) -> bool:
        """True for a value that is never sent and was made by now, or that a newcomer found out and builds on."""
        rehearses = self.is_newcomer and not self.rehearsed
        if kept is None:
            here = type(present) in ARRAYS and isinstance(space, Attributes) and not space.carries
            return here or (rehearses and is_refused(present, Keep.NOT if type(present) is list else Keep.CONTENT))
        return (not in_place or rehearses) and stays_here(kept)

    def _has_made(self, space: Space, values: Values, now: Values) -> bool:
        """True if a variable that had no value now has one that is not plain."""
        new = [key for key, kept in values.items() if kept is None and plain_kind(type(now.get(key))) not in _VALUES]
        return any(isinstance(space, Attributes) or self.places.carries(space, key) for key in new)

    def postpone(self) -> None:
        """Keep the script's own values until the code after its step has run; the received ones already include it."""
        own, self._unheard = self._unheard, {}
        self.put_back(own, in_place=False)  # an array may be one of the received ones

    # --- as others read and receive them -----------------------------------------------------------------------

    def encoded(self) -> dict[str, bytes]:
        """Variables that change, encoded as they are now, by place, each with the way to take it over."""
        return self.encoded_values() | ({_ANSWERS: answers} if (answers := self.answers()) else {})

    def encoded_values(self) -> dict[str, bytes]:
        """As `encoded`, without the answers of collectives."""
        if self._left is not None:
            return self._left if self._instead is None else self._instead
        return self._all(None) | self._mark

    @property
    def _mark(self) -> dict[str, bytes]:
        return {_OVER: b""} if self.over else {}

    def own(self, which: _Places, values: Mapping[str, Values] | None) -> dict[str, bytes]:
        """Encode these variables, of `values` or else of the last look; without long lists and arrays on a device."""
        there = self._now if values is None else values
        near = {(name, key) for name, key in which if is_near(there.get(name, {}).get(key), OWN_MOST)}
        return self._encoded(there, near, tail=0)

    def sampled(self) -> dict[str, bytes]:
        """Encode the variables that ranks compare; of a long list only the last values."""
        found = self.encoded_values() if self._left is not None else self._all(16)
        return {place: found[place] for place in self.carried(found)}

    def _all(self, tail: int | None) -> dict[str, bytes]:
        found = self._encoded(self.take(), tail=tail)
        with contextlib.suppress(Exception):  # no value of the script may end the step
            found |= {_UNKEPT + place: mark for place, mark in self._unkept.changed(self._now).items()}
        return found

    def _encoded(self, values: Mapping[str, Values], which: _Places | None = None, tail: int | None = None) -> _Encoded:
        reported: _Encoded = {}
        self._encode(values, reported, self._living if which is None else which, tail)
        return reported

    @leaves_training_alone
    def _encode(self, values: Mapping[str, Values], reported: _Encoded, which: _Places, tail: int | None) -> None:
        room = 3 * _BYTES  # all values travel in one message
        for name, key in sorted(which):
            kept, first = values.get(name, {}).get(key, _MISSING), self._first.get(name, {}).get(key)
            if kept is _MISSING or (tail == 0 and has_grown(kept)):
                continue
            thing = getattr(kept, "thing", None)
            in_place = thing is not None and thing is getattr(first, "thing", None)
            with contextlib.suppress(StateError, NotPlain, TooLarge):  # text that is not Unicode, or very long
                value = sendable(kept, tail, self.is_clock)
                made = self._made.get((name, key), []) if type(value) is bool else []
                by_all = first is None and type(kept) in _OWN and self._learnt.get(name, {}).get(key) == kept
                data = Sent(in_place, value, made, by_all).encoded()
                fits, place = len(data) <= room, f"{name}\n{key}"
                room -= len(data) if fits else 0
                reported |= {place: data} if fits else {_UNKEPT + place: b"?"} if tail != 0 else {}

    def carried(self, places: Iterable[str]) -> list[str]:
        """Places that a body may read before it writes them, and attributes that a rank does not find out by itself."""
        found = []
        for place in places:
            name, _, key = place.partition("\n")
            if name.startswith(_UNKEPT):
                found.append(place)
            elif name.startswith("object "):
                mine = self._learnt.get(name, {}).get(key)
                itself = self._first.get(name, {}).get(key) is None and type(mine) in _OWN
                found += [] if itself and self._now.get(name, {}).get(key, mine) == mine else [place]
            elif name and self.places.arrays_named(key) is not Keep.NOT:
                found.append(place)
        return found

    def is_clock(self, value: object) -> bool:
        """True if this may be a clock's reading since the loop began, which means nothing in another process."""
        return is_reading(value, self._since)

    @leaves_training_alone
    def receive(self, reported: Mapping[str, bytes]) -> None:
        """Take over variables that other ranks have sent."""
        reported, self.kept = {**reported, **self.mine}, []
        self.receive_answers(reported.pop(_ANSWERS, b""))
        self._unheard = self.take()
        unkept = {place[1:]: reported.pop(place) for place in list(reported) if place[:1] == _UNKEPT}
        if self.is_newcomer and (left_out := self.places.objects.left_out):
            self.notes.append(f"begun anew by a rank that was replaced, as not sent: {left_out}")
        if self._left is None:
            self.over = _OVER in reported
        else:
            self._left = reported | self._mark
        changed: dict[str, Values] = defaultdict(dict)
        spaces = self.places.now() if reported else {}
        shared, now = functools.cache(self._shared), {name: space.read() for name, space in spaces.items()}
        for place, data in reported.items():
            name, _, key = place.partition("\n")
            if place == _OVER or place in self.withheld or name not in now or key in self.places.elsewhere:
                continue
            present = now[name].get(key)
            try:
                in_place, value, made, by_all = received(data)
            except StateError:  # its class is in a module that this process has not imported
                unkept[place] = b"?"
                continue
            if not self.places.follows(spaces[name], key, present) or plain_kind(type(value)) not in _VALUES:
                continue
            if any(now[name].get(str(each)) is None for each in made):
                continue  # this flag says that something is made, but it does not exist here and would not be made
            mine, space = self._learnt.get(name, {}).get(key), spaces[name]
            if by_all and type(mine) in _OWN and mine != value and isinstance(space, Attributes) and not space.holds:
                continue  # each rank finds out such a value by itself in its rehearsal: its rank, the path of its log
            self._living.add((name, key))
            untouched = self.places.untouched
            if untouched and untouched.receive(space, key, value, present, over=self.over):
                continue
            changed[name][key] = take_over(present, value, in_place=in_place, shared=shared)
        for name, values in changed.items():
            spaces[name].write(values)
        taken = {f"{name}\n{key}" for name, values in changed.items() for key in values}
        self.kept = sorted(taken & self.mine.keys())
        self.anew = self._unkept.differing(unkept, self.take()) if unkept and self.is_newcomer else []

    # --- the end -----------------------------------------------------------------------------------------------

    def leave(self, *, over: bool) -> None:
        """Called when the script leaves its loop: from now on, the present values of the variables are sent.

        Args:
            over: True after a committed step, so that no step follows.
        """
        self.over = self.over or over
        self._left = self.encoded_values() | self._mark
        self.close()

    def close(self) -> None:
        """Stop following the script's calls."""
        self.places.close()
        self._now = {}
