"""Record of one rank's computation of a step, in order, and the first difference between two of them. Pure."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from regrow.core.ids import Seconds, StepNo


class Computation(StrEnum):
    """Kind of computation that an entry records."""

    BATCH = "batch"
    OUTPUT = "output"
    GRADIENT = "gradient"
    GIVEN = "given"
    LOGGED = "logged"
    DRAWN = "drawn"
    UPDATED = "updated"
    RAISED = "raised"


class Computed(msgspec.Struct, frozen=True, array_like=True):
    """A digest of something that a rank has computed.

    `key`: what it is matched by. `label`: what people call it, `text`: its value where that is short. `free`: it
    depends on no answer of a collective that was not kept by value. `backward`: given by the reduction of gradients.
    """

    kind: Computation
    key: str
    digest: int
    label: str
    text: str = ""
    free: bool = True
    backward: bool = False


class SeenAround(msgspec.Struct, frozen=True, array_like=True):
    """A value that the script keeps: a digest, its kind of thing in words, and itself where that is short."""

    digest: int
    what: str
    text: str = ""


class Trace(msgspec.Struct):
    """One rank's step.

    `answers`: of its collectives by the call's key, as bytes. `around`: what the script keeps, by where it keeps it, as
    the body began. `used`: names that the body has used, and what it has called that is another each time; only where
    it was looked at closely. `held`: how long the rank was held up.
    """

    step: StepNo
    entries: list[Computed] = []
    answers: dict[str, list[bytes]] = {}
    around: dict[str, SeenAround] = {}
    used: list[str] = []
    called: list[str] = []
    held: Seconds = 0.0
    threads: int = 0
    failed: str = ""
    """Why it is not whole, where it could not be looked at."""


class Difference(msgspec.Struct, frozen=True):
    """The first entry that differs. `rank`, `newcomer`: what each had, for people; empty: it is long."""

    kind: Computation
    label: str
    rank: str
    newcomer: str


def differences(rank: Trace, newcomer: Trace) -> list[Difference]:
    """All that differs, in the rank's order. Where the newcomer lacked an answer, nothing that rests on it is compared.

    Where only what was logged is in it, nothing that counts differs: clocks and throughputs, as a rule.
    """
    mine, theirs = _by_key(newcomer.entries), _by_key(rank.entries)
    whole = all(entry.free for entry in newcomer.entries)
    found = []
    for key, entry in theirs.items():
        other = mine.get(key)
        if other is None:
            if whole:
                found.append(Difference(entry.kind, entry.label, entry.text or "there", "not there"))
        elif other.free and other.digest != entry.digest:
            found.append(Difference(entry.kind, entry.label, entry.text, other.text))
    for key, entry in mine.items():
        if whole and key not in theirs:
            found.append(Difference(entry.kind, entry.label, "not there", entry.text or "there"))
    return found


def counts(found: Iterable[Difference]) -> bool:
    """True if a difference touches the training itself, not only what is logged."""
    return any(each.kind is not Computation.LOGGED for each in found)


def _by_key(entries: Iterable[Computed]) -> Mapping[tuple[Computation, str], Computed]:
    return {(entry.kind, entry.key): entry for entry in entries}
