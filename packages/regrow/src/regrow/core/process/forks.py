"""Connections and exit handlers that a fork of a process must not inherit.

A script may fork, by `multiprocessing` or by itself. The child has the parent's descriptors and exit handlers: it would
keep connections open whose end peers wait for, read data meant for the parent, and run the parent's exit handlers. So
it drops them before it runs a line. Started programs inherit neither (descriptors are close-on-exec).
"""

import atexit
import os
import socket
import weakref
from collections.abc import Callable
from typing import Any

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
_exits: list[Callable[[], Any]] = []
_letting_go: "weakref.WeakSet[Any]" = weakref.WeakSet()


def keep_from_forks(sock: socket.socket) -> socket.socket:
    """Return the same socket, which is from now on closed in forks without ending this process's connection."""
    _sockets.add(sock)
    return sock


def hide_from_forks(owner: Any) -> None:
    """From now on call `owner.let_go()` in each fork. It must take no lock, whose holder may not exist in the fork."""
    _letting_go.add(owner)


def at_exit(call: Callable[[], Any]) -> None:
    """Call this when this process exits, but not when its forks exit."""
    _exits.append(call)
    atexit.register(call)


def not_at_exit(call: Callable[[], Any]) -> None:
    """Undo `at_exit`."""
    if call in _exits:
        _exits.remove(call)
    atexit.unregister(call)


def _in_child() -> None:
    for call in _exits:
        atexit.unregister(call)
    _exits.clear()
    for owner in list(_letting_go):
        owner.let_go()
    for sock in list(_sockets):
        descriptor = sock.detach()  # not `shutdown`, which would end the parent's connection
        if descriptor >= 0:
            os.close(descriptor)
    _sockets.clear()


os.register_at_fork(after_in_child=_in_child)
