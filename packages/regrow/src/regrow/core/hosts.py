"""Hosts and ports in the form in which people write them, and the address by which others reach this machine."""

import ipaddress
import socket

from regrow.core.errors import RegrowError, UsageError

LOOPBACK = "127.0.0.1"
ANY = ("0.0.0.0", "::")
_LOOPBACK_S = 10.0


def place_to_listen(flag: str, text: str) -> tuple[str, int] | None:
    """Parse a flag's `[HOST:]PORT`; the host defaults to loopback. None for an empty text.

    Raises `UsageError`, which names the flag.
    """
    if not text:
        return None
    host, port = (LOOPBACK, text) if text.isdigit() else text.rpartition(":")[::2]
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{flag} {text!r} is no place to listen", hint="give PORT or HOST:PORT; 0 is any free port")
    return host.strip("[]"), int(port)


def own_addresses(flag: str, text: str) -> list[str]:
    """Parse a flag's `ADDRESS,ADDRESS`. Raises `UsageError`, which names the flag, also for a host name."""
    found = [part.strip().strip("[]") for part in text.split(",") if part.strip()]
    for each in found:
        try:
            named = not ipaddress.ip_address(each).is_unspecified
        except ValueError:
            named = False
        if not named:
            raise UsageError(f"{flag} {each!r} is no address", hint="give addresses of this node, such as 10.0.1.5")
    return list(dict.fromkeys(found))


def address_of(host: str, port: int) -> str:
    """Join host and port as `HOST:PORT`, in the form for URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def nth_place(place: tuple[str, int] | None, number: int) -> tuple[str, int] | None:
    """Address of the `number`-th of several servers on this machine, on successive ports; port 0 (any) stays 0."""
    return (place[0], place[1] + number) if place is not None and place[1] else place


def answers_to(listening: str, asked: str) -> bool:
    """True if a listener at `listening` should answer requests that use the host name `asked`.

    A listener on loopback answers only to loopback's own names: otherwise a foreign web page could read it, by pointing
    a host name of its own at this machine.
    """
    return not is_loopback(listening) or asked == "" or is_loopback(asked.strip("[]"))


def is_loopback(host: str) -> bool:
    """True if the host name or address is reachable only from this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_loopback(host: str) -> None:
    """Check that this machine can reach itself at `host`, if that is a loopback address. Raises `UsageError`."""
    if not is_loopback(host):
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as listener, socket.socket(family) as caller:
            caller.settimeout(_LOOPBACK_S)
            caller.connect(listener.getsockname())
    except OSError as error:
        raise UsageError(
            f"this machine does not reach itself at {host}: {error.strerror or error}",
            hint="bring its loopback up (ip link set lo up); where it has IPv6 alone, give --bind ::1",
        ) from error


def route_to(host: str, port: int, *, flag: str) -> str:
    """This machine's own address on the route to another machine; no packet is sent. Raises `RegrowError`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RegrowError(f"no way to {host}: {error.strerror or error}", hint=f"check {flag}") from error
