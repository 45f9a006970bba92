"""Plain variables of which each rank has a value of its own, on their way from a worker to who takes its rank."""

import contextlib
from collections.abc import Iterable, Mapping

import msgspec

from regrow.core.board import OWN_MOST
from regrow.core.messages.replicas import OwnValues
from regrow.train.attributes.kept_values import Attributes
from regrow.train.script.namespaces import Namespace
from regrow.train.values.plain import keep_near
from regrow.train.values.variables import Values, Variables

_decoder = msgspec.msgpack.Decoder(dict[str, bytes])


def left(variables: Variables, places: Iterable[str], *, as_begun: bool) -> bytes:
    """Those at these places that have room, the small ones first. `as_begun`: as the step has begun; else as now."""
    which = {(name, key) for name, _, key in (place.partition("\n") for place in places)}
    found = variables.own(which, None if as_begun else _present(variables.places.now(), which))
    values, room = dict[str, bytes](), OWN_MOST - 8
    for place, value in sorted(found.items(), key=lambda each: len(each[1])):
        if (room := room - len(place.encode()) - len(value) - 10) > 0:
            values[place] = value
    return msgspec.msgpack.encode(values)


def _present(spaces: Mapping[str, Namespace | Attributes], which: Iterable[tuple[str, str]]) -> dict[str, Values]:
    there = {name: spaces[name].read() for name in {name for name, _ in which} & spaces.keys()}
    found: dict[str, Values] = {}
    for name, key in which:
        if key in there.get(name, {}):
            with contextlib.suppress(Exception):  # whatever the script has there, the step goes on
                found.setdefault(name, {})[key] = keep_near(there[name][key], OWN_MOST)
    return found


def read(own: OwnValues | None) -> Mapping[str, bytes]:
    """The same, by place; nothing where nothing was left."""
    try:
        return {} if own is None else _decoder.decode(own.values)
    except msgspec.MsgspecError:
        return {}
