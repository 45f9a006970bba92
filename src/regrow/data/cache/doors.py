"""Speaking to the data door of another node's agent: one connection, kept, with a deadline on everything."""

import contextlib
import http.client
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias, TypeVar

import msgspec

from regrow.core.errors import ProtocolError
from regrow.core.ids import Instant, Seconds

CONNECT_S: Seconds = 1.0
_ANSWER_S: Seconds = 2.0
_BYTES_S = 16 << 20
"""An entry may take `_ANSWER_S`, and a second more for so many bytes."""
_PART_BYTES = 1 << 20
_LONGEST_LISTING = 16 << 20
_LONGEST_ENTRY = 1 << 30
_BAD = 300

Response: TypeAlias = http.client.HTTPResponse
Listed = TypeVar("Listed")


class NoRoom(Exception):
    """The other node keeps enough of this one's entries."""


class NotThere(Exception):
    """The other node does not have the entry, or not any more."""


_REFUSALS = {404: NotThere, 507: NoRoom}


class _Unix(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_S, blocksize=_PART_BYTES)
        self._path = path

    def connect(self) -> None:
        """Connect. Raises `OSError`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_S)
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            raise
        self.sock = sock


class Door:
    """The door of one agent, for one thread. What fails raises `OSError` or `ProtocolError`, besides what it says.

    Args:
        endpoint: `unix:<path>` or `tcp:<host>:<port>`.
        token: the job's secret.
    """

    def __init__(self, endpoint: str, token: str) -> None:
        self._endpoint = endpoint
        self._headers = {"Authorization": f"Bearer {token}"}
        self._connection: http.client.HTTPConnection | None = None

    def names(self, identity: bytes) -> dict[str, int]:
        """The entries that are there, and their bytes."""
        return self._list(f"/data/{identity.hex()}", dict[str, int])

    def kept(self, node: str) -> dict[str, dict[str, int]]:
        """What is kept there for a node: identities in hexadecimal to entries to their bytes."""
        return self._list(f"/data/mirror/{node}", dict[str, dict[str, int]])

    def fetch(self, identity: bytes, name: str) -> bytes:
        """The entry as it is: it is not checked. Raises `NotThere`, too."""
        with self._answer("GET", f"/data/{identity.hex()}/{name}") as response:
            size = response.length
            if size is None or size > _LONGEST_ENTRY:
                raise ProtocolError(f"{self._endpoint} says that {name} has {size} bytes")
            data = bytearray()
            deadline = time.monotonic() + _ANSWER_S + size / _BYTES_S
            while part := response.read(_PART_BYTES):
                data += part
                _check_time(deadline, self._endpoint)
            if len(data) != size:
                raise ProtocolError(f"{self._endpoint} gave {len(data)} of {size} bytes of {name}")
            return bytes(data)

    def leave(self, node: str, identity: bytes, path: Path, *, step: int, keep_from: int) -> None:
        """Have a copy of an entry kept there. Raises `NoRoom`, too."""
        target = f"/data/mirror/{node}/{identity.hex()}/{path.name}?step={step}&keep_from={keep_from}"
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            with self._answer("PUT", target, file, size) as response:
                response.read(_LONGEST_LISTING)

    def close(self) -> None:
        """Hang up. It may be used again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _list(self, target: str, kind: type[Listed]) -> Listed:
        with self._answer("GET", target) as response:
            body = response.read(_LONGEST_LISTING)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{self._endpoint} answers {target} with no list: {error}") from error

    # --- one request -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _answer(self, method: str, target: str, body: BinaryIO | None = None, size: int = 0) -> Iterator[Response]:
        """The answer, if it is a good one. The connection is kept if all of it was read."""
        try:
            response = self._ask(method, target, body, size)
            if response.status in _REFUSALS:
                response.read(_LONGEST_LISTING)
                raise _REFUSALS[response.status](f"{self._endpoint}: {method} {target}")
            if response.status >= _BAD:
                raise ProtocolError(f"{self._endpoint} answers {method} {target} with {response.status}")
            yield response
        except http.client.HTTPException as error:
            self.close()
            raise ProtocolError(f"{self._endpoint} speaks no HTTP: {type(error).__name__} {error}") from error
        except (NoRoom, NotThere):
            raise
        except BaseException:
            self.close()
            raise

    def _ask(self, method: str, target: str, body: BinaryIO | None, size: int) -> Response:
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Length"] = str(size)
        if self._connection is not None:
            # It may have been closed at the other end while nobody used it: then, and only then, it is tried again.
            with contextlib.suppress(http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                return _send(self._connection, method, target, body, headers)
            self.close()
            if body is not None:
                body.seek(0)
        self._connection = _connect(self._endpoint)
        return _send(self._connection, method, target, body, headers)


def _connect(endpoint: str) -> http.client.HTTPConnection:
    kind, _, place = endpoint.partition(":")
    if kind == "unix":
        return _Unix(place)
    host, _, port = place.rpartition(":")
    if kind != "tcp" or not port.isdigit():
        raise ProtocolError(f"{endpoint!r} is no endpoint")
    return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=CONNECT_S, blocksize=_PART_BYTES)


def _send(
    connection: http.client.HTTPConnection, method: str, target: str, body: BinaryIO | None, headers: dict[str, str]
) -> Response:
    connection.request(method, target, body=body, headers=headers)
    if connection.sock is not None:
        connection.sock.settimeout(_ANSWER_S)
    return connection.getresponse()


def _check_time(deadline: Instant, endpoint: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{endpoint} is too slow")
