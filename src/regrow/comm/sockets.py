"""The sockets a gloo group opened, so that they can be shut at once when a peer is lost.

No call of torch's ends a receive that another thread is blocked in. `shutdown(2)` on the group's own connected sockets
does, within milliseconds; its listening socket must not be touched.
"""

import os
import socket
import stat


def open_sockets() -> frozenset[tuple[int, int]]:
    """(descriptor, inode) of every socket of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(int(name))
        except OSError:
            continue  # closed since it was listed, the listing's own descriptor among them
        if stat.S_ISSOCK(status.st_mode):
            found.add((int(name), status.st_ino))
    return frozenset(found)


def shut(sockets: frozenset[tuple[int, int]], *, host: str, spare_ports: frozenset[int] = frozenset()) -> int:
    """Shut those of these sockets that are connected over TCP from `host`; return how many.

    A descriptor that meanwhile belongs to another socket is left alone: the inode is compared on a duplicate, which
    cannot change hands. Connections with an end on one of `spare_ports` are not gloo's and stay.
    """
    return sum(_shut_one(descriptor, inode, host, spare_ports) for descriptor, inode in sockets)


def _shut_one(descriptor: int, inode: int, host: str, spare_ports: frozenset[int]) -> bool:
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return False  # closed by gloo itself
    try:
        if os.fstat(duplicate).st_ino != inode or not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
            return False
        with socket.socket(fileno=os.dup(duplicate)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            here, there = sock.getsockname(), sock.getpeername()
            if here[0] != host or here[1] in spare_ports or there[1] in spare_ports:
                return False
            sock.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # not connected (any more): nothing is blocked in it
    finally:
        os.close(duplicate)
