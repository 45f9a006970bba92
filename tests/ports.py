"""Ports for jobs that are told theirs before they listen on it."""

import socket

_held: list[socket.socket] = []


def held_port() -> int:
    """A port of loopback that nobody is given by chance until this process ends; who asks for it by number gets it.

    So it is with a socket that is bound, does not listen, and lets its address be used again (socket(7)).
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    _held.append(sock)
    return int(sock.getsockname()[1])
