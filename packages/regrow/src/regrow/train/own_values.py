"""Hands plain variables of which each rank has its own value from a worker to the next worker that takes its rank."""

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
    """Encode the values at these places, small ones first, up to a bound; those of the step's begin if `as_begun`."""
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
            with contextlib.suppress(Exception):  # no value of the script may end the step
                found.setdefault(name, {})[key] = keep_near(there[name][key], OWN_MOST)
    return found


def read(own: OwnValues | None) -> Mapping[str, bytes]:
    """Decode the values that `left` has encoded, by place; empty if there are none."""
    try:
        return {} if own is None else _decoder.decode(own.values)
    except msgspec.MsgspecError:
        return {}
