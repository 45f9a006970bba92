"""Hosts on this machine: network namespaces with addresses of their own, joined by a bridge in one more namespace.

The machine's own network is not touched. A link can be cut, both ways or one way in silence, and all that runs on a
host can be killed at once. Links can be slow and lossy; as `tc netem` is not in every kernel, a process of ours carries
the frames then (`far_links.py`). It needs root.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_NOBODY = "02:00:00:00:00:99"
"""An address of hardware that none has: what is sent there is lost, and nobody says so."""
_numbers = itertools.count()
_NAME = re.compile(r"rg(\d+)-")


class Network:
    """Hosts with the addresses 10.78.0.10, .11 and so on.

    Args:
        hosts: how many.
        far: whether links can be made slow and lossy, by `weather`.
    """

    def __init__(self, hosts: int, *, far: bool = False) -> None:
        self._far = far
        self._carrier: subprocess.Popen[bytes] | None = None
        self._mark = f"rg{os.getpid()}-{next(_numbers)}"
        self.switch = self._switch = f"{self._mark}-s"
        """The namespace that the bridge is in."""
        self.hosts = range(hosts)

    def name(self, host: int) -> str:
        """Of a host's namespace."""
        return f"{self._mark}-{host}"

    def address(self, host: int) -> str:
        """Of a host, for the others."""
        return f"10.78.0.{10 + host}"

    def open(self) -> None:
        """Make it. Raises `subprocess.CalledProcessError` where that is not allowed."""
        _sweep()
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            _ip("netns", "add", self.name(host))
        if self._far:
            self._carrier = self._carry()
        for host in self.hosts:
            name, port = self.name(host), f"p{host}"
            if self._carrier is None:
                _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def _carry(self) -> subprocess.Popen[bytes]:
        """The process behind the links."""
        script, names = Path(__file__).with_name("far_links.py"), [self.name(host) for host in self.hosts]
        words = [self._switch, "0", *names]
        carrier = subprocess.Popen([sys.executable, str(script), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert carrier.stdout is not None
        if carrier.stdout.readline() != b"ready\n":
            raise subprocess.CalledProcessError(carrier.wait(), words, stderr="links cannot be made here")
        return carrier

    def weather(self, *, delay: float = 0.0, loss: float = 0.0) -> None:
        """Delay each frame from one host to another from now on, or lose it with that chance."""
        assert self._carrier is not None
        assert self._carrier.stdin is not None
        # Half of it on each host's link: a frame goes over two of them.
        self._carrier.stdin.write(f"{delay / 2} {1 - (1 - loss) ** 0.5}\n".encode())
        self._carrier.stdin.flush()

    def cut(self, host: int) -> None:
        """Nothing comes to it or from it any more."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def join(self, host: int) -> None:
        """Its link is as before."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "up")

    def lose(self, sender: int, receiver: int) -> None:
        """Lose the packets of one host to another from now on, in silence; the other way all arrives."""
        away = ("neighbor", "replace", self.address(receiver), "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
        _ip("-n", self.name(sender), *away)

    def find(self, sender: int, receiver: int) -> None:
        """Let the packets arrive again."""
        _ip("-n", self.name(sender), "neighbor", "delete", self.address(receiver), "dev", "eth0")

    def processes(self, host: int) -> list[int]:
        """All that run there."""
        return _inside(self.name(host))

    def kill(self, host: int) -> None:
        """All of its processes end at once: none sees another one's end."""
        _kill(self.name(host))

    def close(self) -> None:
        """Remove it, and end what runs in it."""
        if self._carrier is not None:
            self._carrier.communicate(timeout=10)
        _remove(name for name in _made() if name.startswith(f"{self._mark}-"))


def _sweep() -> None:
    """Remove what test processes that have been killed could not."""
    for name in _made():
        if (left := _NAME.match(name)) and not os.path.exists(f"/proc/{left[1]}"):
            with contextlib.suppress(subprocess.CalledProcessError):  # another test process may do the same
                _remove([name])


def _made() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _remove(names: Iterable[str]) -> None:
    for name in names:
        _kill(name)
        _ip("netns", "delete", name)


def _inside(name: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", name).split()]


def _kill(name: str) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in _inside(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30).stdout


@contextmanager
def network(hosts: int, *, far: bool = False) -> Iterator[Network]:
    """Hosts that can reach each other; skips the test where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (iproute2)")
    made = Network(hosts, far=far)
    try:
        try:
            made.open()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made
    finally:
        made.close()
