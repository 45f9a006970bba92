"""Checks the flags of `regrow run` for the allowed numbers of replicas and nodes."""

import math
import re

import msgspec

from regrow.core.errors import UsageError
from regrow.core.job import JobSpec
from regrow.launch.checks import in_range
from regrow.membership.scaling import Limits

_SPAN = re.compile(r"(\d{1,6})(?::(\d{1,6}))?", re.ASCII)
_NUMBERS = re.compile(r"\d{1,6}(,\d{1,6})*", re.ASCII)


class AllowedRange(msgspec.Struct, frozen=True):
    """Range from `least` to `most`, both included."""

    least: int
    most: int


class Elasticity(msgspec.Struct, frozen=True):
    """The fields of a `JobSpec` about its size. `min_replicas`, `max_replicas`: None if the number never changes."""

    unit: int
    min_replicas: int | None
    max_replicas: int | None
    sizes: list[int]
    most_nodes: int
    spares: int


def span(flag: str, text: str, what: str) -> AllowedRange:
    """Parse `N`, which means `N:N`, or `MIN:MAX`. Raises `UsageError`."""
    match = _SPAN.fullmatch(text)
    least = int(match.group(1)) if match else 0
    most = int(match.group(2) or least) if match else 0
    if least < 1 or most < least:
        raise UsageError(f"{flag} {text!r} is no number of {what}", hint="give N, or MIN:MAX with 1 <= MIN <= MAX")
    return AllowedRange(least, most)


def elasticity(nodes: AllowedRange, nproc: int, *, spares: int = 0, replicas: str, unit: int, sizes: str) -> Elasticity:
    """Combine `--nnodes`, `--nproc-per-node`, `--spares`, `--replicas`, `--replica-ranks` and `--replica-sizes`.

    Raises:
        UsageError: a flag is out of range, or the world size at the start is not an allowed one.
    """
    in_range("--replica-ranks", unit, 1)
    if in_range("--spares", spares, 0) >= nodes.least:
        have = "1 node" if nodes.least == 1 else f"{nodes.least} nodes"
        raise UsageError(
            f"--spares {spares} leaves none of the {have} that the job starts on",
            hint="spares are counted in --nnodes (or --local-nodes): raise it",
        )
    first, most = nodes.least - spares, nodes.most - spares
    world = first * nproc
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    if world % unit:
        raise UsageError(
            f"the job starts with {ranks}, which are no whole replicas of {unit}",
            hint="make --nnodes times --nproc-per-node a multiple of --replica-ranks",
        )
    allowed = _sizes(sizes)
    if replicas:
        limits = span("--replicas", replicas, "replicas")
    elif allowed:
        limits = AllowedRange(allowed[0], allowed[-1])
    elif nodes.most > nodes.least:
        limits = AllowedRange(first * nproc // unit, most * nproc // unit)
    else:
        return Elasticity(unit, None, None, [], nodes.most, spares)
    _check_start(world // unit, ranks, Limits(limits.least, limits.most, unit, tuple(allowed)))
    return Elasticity(unit, limits.least, limits.most, allowed, nodes.most, spares)


def _check_start(start: int, ranks: str, limits: Limits) -> None:
    if refusal := limits.refusal(start):
        raise UsageError(
            f"the job starts with {ranks}, but {refusal}",
            hint="change --nproc-per-node, --nnodes, --replicas or --replica-sizes",
        )


def _sizes(text: str) -> list[int]:
    if not text:
        return []
    numbers = sorted({int(word) for word in text.split(",")}) if _NUMBERS.fullmatch(text) else [0]
    if numbers[0] < 1:
        raise UsageError(f"--replica-sizes {text!r} are no numbers of replicas", hint="give for example 1,2,4")
    return numbers


def default_slots(spec: JobSpec) -> int:
    """Default number of slots (ranks that fit on a node): the node's share of the largest world."""
    most = Limits.of(spec).most * spec.unit
    return max(spec.nproc, math.ceil(most / spec.node_limit))


def slots_of(spec: JobSpec, given: int | None, *, alone: bool) -> int:
    """Number of slots (ranks that fit) of each node started here, from `--slots`.

    Args:
        spec: of the job.
        given: value of the flag; None: not given.
        alone: the job never has nodes other than those started here.

    Raises:
        UsageError: the ranks at the start, or those of the largest world, do not fit.
    """
    slots = default_slots(spec) if given is None else in_range("--slots", given, 1)
    if slots < spec.nproc:
        raise UsageError(
            f"--slots {slots} is less than the {spec.nproc} ranks that the node starts with",
            hint="give --nproc-per-node or more",
        )
    most = Limits.of(spec).most
    if alone and slots * spec.node_limit < most * spec.unit:
        raise UsageError(
            f"{most} replicas of {spec.unit} ranks have no room in {slots} slots on each of {spec.node_limit} nodes",
            hint="raise --slots, or lower --replicas",
        )
    return slots
