"""Addresses: the endpoint on node 0, this node's own to listen on, and the host under which others reach it."""

import re

import msgspec

from regrow.core.errors import UsageError
from regrow.core.hosts import ANY, LOOPBACK, is_loopback
from regrow.launch.checks import one_of

DEFAULT_PORT = 29400
"""Port of the endpoint on node 0 if `--rdzv-endpoint` has none; torchrun's default."""
_STATIC_PORT = 29500


class Whereabouts(msgspec.Struct, frozen=True):
    """Addresses of a node. `endpoint`: of the coordinator. `bind`: address on which this node listens.

    `advertise`: host under which others reach this node; empty: derived from the route to the coordinator.
    """

    endpoint: tuple[str, int]
    bind: str
    advertise: str


class AddressFlags(msgspec.Struct, frozen=True):
    """The flags of `regrow run` about addresses, unparsed."""

    rdzv_endpoint: str = ""
    master_addr: str = ""
    master_port: int = 0
    local_addr: str = ""
    bind: str = ""
    standalone: bool = False


def whereabouts(flags: AddressFlags, *, node_rank: int, nodes: int, most: int) -> Whereabouts:
    """Derive the addresses from the flags of `regrow run`.

    Args:
        flags: as given.
        node_rank: of this node.
        nodes: number of machines on which the job starts.
        most: largest number of machines that the job may have later.

    Raises:
        UsageError: names the flag and what to write instead.
    """
    bind = flags.bind or LOOPBACK
    if flags.standalone:
        return Whereabouts((LOOPBACK, 0), bind, flags.local_addr or LOOPBACK)
    text = flags.rdzv_endpoint
    if nodes == 1 and (most == 1 or not (text or flags.master_addr)):
        port = endpoint_of("--rdzv-endpoint", text)[1] if text else 0
        return Whereabouts((LOOPBACK, port), bind, flags.local_addr or _own_address(bind, most))
    if not text and flags.master_addr:
        text = f"{flags.master_addr}:{flags.master_port or _STATIC_PORT}"
    if not text:
        raise UsageError(
            "a job of several nodes needs to know where node 0 is", hint="add --rdzv-endpoint HOST:PORT, on every node"
        )
    host, port = endpoint_of("--rdzv-endpoint", text)
    if port == 0:
        raise UsageError(f"--rdzv-endpoint {text!r} names no port", hint="give HOST:PORT, the same on every node")
    check_reachable(host, bind)
    host = LOOPBACK if host == "localhost" else host
    advertise = flags.local_addr or (host if node_rank == 0 or is_loopback(host) else "")
    return Whereabouts((host, port), bind, advertise)


def _own_address(bind: str, most: int) -> str:
    """Address under which nodes that come later reach this node, the first."""
    if most == 1 or is_loopback(bind):
        return LOOPBACK
    if bind in ANY:
        raise UsageError(
            f"--bind {bind} is no address at which other nodes can reach this one",
            hint="add --rdzv-endpoint HOST:PORT, or --local-addr HOST",
        )
    return bind


def check_reachable(host: str, bind: str) -> None:
    """Raise `UsageError` if this node would listen on loopback only while node 0 is on another machine."""
    if not is_loopback(host) and is_loopback(bind):
        raise UsageError(
            f"{host} is beyond this machine, and without --bind regrow listens on {LOOPBACK} only",
            hint="add --bind with this node's address, or 0.0.0.0",
        )


def endpoint_of(flag: str, text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, or of `HOST` with the default port. Raises `UsageError`, which names the flag."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d{1,5}))?", text)
    if match is None or int(match.group(2) or 0) > 65535:
        raise UsageError(f"{flag} {text!r} is no address", hint="give HOST:PORT")
    return match.group(1).strip("[]"), int(match.group(2)) if match.group(2) else DEFAULT_PORT


def hydration_of(word: str, *, encrypted: bool) -> str:
    """Transport of state, from `--hydration`. Raises `UsageError` for an unknown one, and for one that bypasses TLS."""
    if encrypted and word == "nixl":
        raise UsageError("--hydration nixl reads state past TLS", hint="leave out one of the two")
    return one_of("--hydration", word, ("sockets", "memory", "nixl"))
