"""Record of one rank's computation of a step, in order, and the first difference between two records. Pure."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from regrow.core.ids import Seconds, StepNo


class Computation(StrEnum):
    """Kind of a computation that a trace records."""

    BATCH = "batch"
    OUTPUT = "output"
    GRADIENT = "gradient"
    GIVEN = "given"
    LOGGED = "logged"
    DRAWN = "drawn"
    UPDATED = "updated"
    RAISED = "raised"


class Computed(msgspec.Struct, frozen=True, array_like=True):
    """Digest of a value that a rank has computed.

    `key`: equal for the same value in two traces. `label`: name for people; `text`: the value if it is short. `free`:
    True if all answers that it depends on were kept by value. `backward`: it comes from the reduction of gradients.
    """

    kind: Computation
    key: str
    digest: int
    label: str
    text: str = ""
    free: bool = True
    backward: bool = False


class SeenAround(msgspec.Struct, frozen=True, array_like=True):
    """A value that the script keeps: its digest, its kind in words, and the value itself if it is short."""

    digest: int
    what: str
    text: str = ""


class Trace(msgspec.Struct):
    """One rank's step.

    `answers`: answers of its collectives as bytes, by the call's key. `around`: values that the script kept as the body
    began, by place. `used`: names that the body has used; `called`: functions that it has called whose results differ
    each time; both only in detailed traces. `held`: how long the rank was held up.
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
    """Reason why the trace is incomplete; empty if it is complete."""


class Difference(msgspec.Struct, frozen=True):
    """An entry that differs. `rank`, `newcomer`: the value of each, for people; empty if it is long."""

    kind: Computation
    label: str
    rank: str
    newcomer: str


def differences(rank: Trace, newcomer: Trace) -> list[Difference]:
    """All differences, in the rank's order. Entries that depend on an answer that the newcomer lacked are not compared.

    Differences of logged numbers only do not count: these are usually clocks and throughputs.
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
    """True if a difference affects the training itself, not only logged numbers."""
    return any(each.kind is not Computation.LOGGED for each in found)


def _by_key(entries: Iterable[Computed]) -> Mapping[tuple[Computation, str], Computed]:
    return {(entry.kind, entry.key): entry for entry in entries}
