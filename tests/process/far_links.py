"""Links that are slow and lose frames, for kernels without `netem`.

`python far_links.py SWITCH SEED HOST...` makes for each host the two ends of a cable, `eth0` in the host's namespace
and `p0`, `p1`... in the switch's, and carries frames between them. It says `ready`. A line `DELAY LOSS` on its input
says how from then on: each frame comes `DELAY` seconds later, or, with the chance `LOSS`, not at all. It ends when its
input is closed.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import sys
import time

_NEW_NETWORK = 0x40000000
_SET_INTERFACE = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_FRAME = 1 << 16


def plug(namespace: str, name: str) -> int:
    """An end of a cable: what the kernel sends through the interface can be read, what is written it receives."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
    return end


def carry(cables: list[tuple[int, int]], draw: random.Random) -> None:
    """Until standard input is closed."""
    delay = loss = 0.0
    poll = selectors.DefaultSelector()
    poll.register(sys.stdin.fileno(), selectors.EVENT_READ)
    other = {}
    for ends in cables:
        for one, another in (ends, ends[::-1]):
            other[one] = another
            poll.register(one, selectors.EVENT_READ)
    under_way: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for key, _ in poll.select(wait):
            if key.fd == sys.stdin.fileno():
                if not (line := sys.stdin.readline()):
                    return
                delay, loss = map(float, line.split())
                continue
            try:
                while frame := os.read(key.fd, _FRAME):
                    number += 1
                    if draw.random() >= loss:
                        heapq.heappush(under_way, (time.monotonic() + delay, number, other[key.fd], frame))
            except BlockingIOError:
                pass
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # that end is down: the frame is lost, as on a cable that is pulled
                os.write(to, frame)


def main() -> None:
    """Make the cables, and carry."""
    switch, seed, *hosts = sys.argv[1:]
    cables = [(plug(host, "eth0"), plug(switch, f"p{number}")) for number, host in enumerate(hosts)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(cables, random.Random(int(seed)))


if __name__ == "__main__":
    main()
