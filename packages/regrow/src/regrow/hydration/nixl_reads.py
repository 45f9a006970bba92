"""One-sided reads by NIXL, NVIDIA's library over UCX: RDMA where the network has it, else TCP and shared memory.

An agent of the library exists only while state is read: it has a thread that polls all the time, and it listens at this
machine's addresses. Bytes are read into a separate buffer, never into a tensor: a read that was given up may still
arrive. No part of the library that unpickles is used; addresses are sent in regrow's own frames.
"""

import importlib
import importlib.util
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import torch

from regrow.core.errors import HydrationError
from regrow.core.ids import Instant
from regrow.devices import nvidia
from regrow.devices.accelerators import is_accelerator
from regrow.hydration.direct import NIXL, MemoryPlace
from regrow.hydration.memory import is_straight
from regrow.hydration.plan import CHUNK_BYTES, SMALL_BYTES
from regrow.hydration.streams import STALL

_LIBRARIES = ("nixl", "nixl_cu13", "nixl_cu12")
_KINDS = {"cpu": "DRAM", nvidia.KIND: "VRAM"}
_GLANCES: Final = (0.00002, 0.001)
"""First and longest pause between two checks of a read, in seconds."""
_GIVEN_UP: Final[list[object]] = []
"""Buffers to which an abandoned read may still write, with all that it needs: kept until the process ends."""


def missing() -> str:
    """Reason why NIXL is not available here; empty if it can be imported."""
    found = any(importlib.util.find_spec(name) for name in _LIBRARIES)
    return "" if found else "not installed (regrow[rdma])"


def _agent(*, serves: bool) -> Any:
    """An agent of the library. Raises `HydrationError` if the library is missing or cannot start."""
    logging.getLogger("nixl").setLevel(logging.WARNING)
    try:
        name = next(name for name in _LIBRARIES if importlib.util.find_spec(name))
        api = importlib.import_module(f"{name}._api")
        logging.getLogger("nixl").setLevel(logging.WARNING)
        config = api.nixl_agent_config(
            enable_prog_thread=serves, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        return api.nixl_agent(secrets.token_hex(16), config)
    except StopIteration:
        raise HydrationError(missing()) from None
    except Exception as error:
        raise HydrationError(f"the library cannot start: {error}") from error


class NixlExposure:
    """Memory of a holder, registered for one reader. Raises `HydrationError` if the library cannot register it."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._agent = _agent(serves=True)
        found: dict[str, set[tuple[int, int, int, str]]] = {}
        for each in tensors:
            if each.nbytes >= SMALL_BYTES and is_straight(each) and each.device.type in _KINDS:
                device = (each.device.index or 0) if is_accelerator(each.device) else 0
                place = each.data_ptr(), each.nbytes, device, ""
                found.setdefault(_KINDS[each.device.type], set()).add(place)
        self._registered: list[Any] = []
        try:
            for kind, places in found.items():
                self._registered.append(self._agent.register_memory(sorted(places), kind))
            self.passport = bytes(self._agent.get_agent_metadata())
        except Exception as error:
            self.close()
            raise HydrationError(f"memory cannot be registered: {error}") from error

    def close(self) -> None:
        """End the agent, and all its reads. May be called twice."""
        agent, self._agent = self._agent, None
        for each in self._registered:
            agent.deregister_memory(each)
        self._registered = []


class NixlReader:
    """A newcomer's agent, for all its connections. Created with the first one; raises `HydrationError`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.agent = _agent(serves=False)
        self._peers: dict[bytes, str] = {}
        self._buffers: list[Any] = []
        self.given_up = False

    def reads(self, passport: bytes, sock: socket.socket) -> "NixlReads":
        """Reads for a connection. Raises `HydrationError` if the library does not accept the holder's passport."""
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        with self.lock:
            try:
                if passport not in self._peers:
                    name = self.agent.add_remote_agent(passport)
                    self._peers[passport] = name if isinstance(name, str) else name.decode()
                self._buffers.append(self.agent.register_memory([(buffer.data_ptr(), CHUNK_BYTES, 0, "")], "DRAM"))
            except Exception as error:
                raise HydrationError(f"the holder's memory cannot be reached: {error}") from error
        return NixlReads(self, self._peers[passport], buffer, sock)

    def close(self) -> None:
        """End the agent, unless an abandoned read may still arrive."""
        with self.lock:
            if self.given_up:
                _GIVEN_UP.append(self)
                return
            for name in self._peers.values():
                self.agent.remove_remote_agent(name)
            for each in self._buffers:
                self.agent.deregister_memory(each)
            self.agent = None


class NixlReads:
    """Reads for one connection.

    Args:
        reader: owner of the agent.
        peer: name of the holder's agent.
        buffer: receives the bytes, `CHUNK_BYTES` long.
        sock: the connection; when the holder closes it, reads end.
    """

    kind = NIXL

    def __init__(self, reader: NixlReader, peer: str, buffer: torch.Tensor, sock: socket.socket) -> None:
        self._reader, self._peer, self._buffer = reader, peer, buffer
        self._hung_up = select.poll()
        self._hung_up.register(sock, select.POLLRDHUP)

    def read(self, place: MemoryPlace, room: memoryview, until: Instant) -> None:
        """Fill `room` from `place`, within `STALL`. Raises `OSError`."""
        try:
            self._fetch(place, len(room), until)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        torch.frombuffer(room, dtype=torch.uint8).copy_(self._buffer[: len(room)])

    def _fetch(self, place: MemoryPlace, size: int, until: Instant) -> None:
        agent, lock, began = self._reader.agent, self._reader.lock, time.monotonic()
        with lock:
            mine = agent.get_xfer_descs([(self._buffer.data_ptr(), size, 0)], "DRAM")
            device = max(place.device, 0)
            theirs = agent.get_xfer_descs([(place.address, size, device)], "DRAM" if place.device < 0 else "VRAM")
            handle = agent.initialize_xfer("READ", mine, theirs, self._peer)
            state = agent.transfer(handle)
        pause, longest = _GLANCES
        until = min(until, began + STALL)
        try:
            while state == "PROC":
                if self._hung_up.poll(0):
                    raise EOFError("the holder hung up")
                if time.monotonic() > until:
                    raise TimeoutError("the holder's memory brings nothing")
                time.sleep(pause)
                pause = min(2 * pause, longest)
                with lock:
                    state = agent.check_xfer_state(handle)
        except BaseException:
            self._reader.given_up = True
            _GIVEN_UP.append((handle, self._buffer))
            raise
        with lock:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError("the library could not read it")
