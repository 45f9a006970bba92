"""Things that a fork of a process must not inherit: connections, and exit handlers.

A script may fork, by `multiprocessing` or by itself. The child has the parent's descriptors and exit handlers: it would
keep connections open that peers wait to see end, read data meant for the parent, and say its goodbye. So it lets go of
them before it runs a line. Programs that a process starts have neither (descriptors close as they are executed).
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
    """The same socket, closed in children from now on. Its connection stays as it is for this process."""
    _sockets.add(sock)
    return sock


def hide_from_forks(owner: Any) -> None:
    """`owner.let_go()` is called in children from now on: without a lock, as the thread that has one is not there."""
    _letting_go.add(owner)


def at_exit(call: Callable[[], Any]) -> None:
    """Do this as the process ends, but not as a fork of it does."""
    _exits.append(call)
    atexit.register(call)


def not_at_exit(call: Callable[[], Any]) -> None:
    """Not any more."""
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
