"""`network.py [BIND]`: rank 0 sends to the last rank, with one flow and with four, as fast as it can.

It sends to the address BIND of the last rank's node, by default loopback; for 0.0.0.0 to all its other addresses.
Rank 0 writes lines of JSON to `rates.jsonl`: address, flows, GB/s, and an error if an address cannot be used.
"""

import hmac
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import regrow
from regrow.core.hosts import ANY, LOOPBACK

FLOWS = (1, 4)
SECONDS = 0.6
CONNECT_S, PATIENCE_S = 5.0, 20.0
CHUNK = 1 << 20
MOST = 8
"""Most addresses that are measured; an address that does not answer takes `CONNECT_S`."""
MESSAGE_BYTES = 4096
"""Size of the message with addresses, ports and the token."""


def addresses(bind: str) -> list[str]:
    """Addresses to listen on: the given one, or for 0.0.0.0 those of all IPv4 interfaces that are up but loopback."""
    if bind not in ANY:
        return [bind or LOOPBACK]
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    known = [
        each.address
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for each in entries
        if each.family is socket.AF_INET
    ]
    return [address for address in known if not address.startswith("127.")][:MOST]


def family_of(host: str) -> socket.AddressFamily:
    """Address family of a host to listen on."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Receiver:
    """Listens on addresses of this machine; reads data that begins with the token, and answers with its size."""

    def __init__(self, hosts: Sequence[str], token: bytes) -> None:
        self._token = token
        self._sockets = [socket.create_server((host, 0), family=family_of(host)) for host in hosts]
        self.places = [each.getsockname()[:2] for each in self._sockets]
        for each in self._sockets:
            threading.Thread(target=self._accept, args=(each,), daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        buffer, count = bytearray(CHUNK), 0
        try:
            with connection:
                connection.settimeout(PATIENCE_S)
                if not hmac.compare_digest(connection.recv(len(self._token), socket.MSG_WAITALL), self._token):
                    return
                while got := connection.recv_into(buffer):
                    count += got
                connection.sendall(count.to_bytes(8, "big"))
        except OSError:
            return  # the sender gets an error too, and reports it

    def close(self) -> None:
        """Stop listening."""
        for each in self._sockets:
            each.close()


def send(place: tuple[str, int], token: bytes, received: list[int], errors: list[str]) -> None:
    """Send one flow for `SECONDS`; appends the number of bytes received to `received`, or an error to `errors`."""
    chunk = bytes(CHUNK)
    try:
        with socket.create_connection(place, timeout=CONNECT_S) as connection:
            connection.settimeout(PATIENCE_S)
            connection.sendall(token)
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                connection.sendall(chunk)
            connection.shutdown(socket.SHUT_WR)
            received.append(int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big"))
    except OSError as error:
        errors.append(error.strerror or str(error))


def measure(place: tuple[str, int], flows: int, token: bytes) -> dict[str, object]:
    """Measure the rate to one address."""
    received: list[int] = []
    errors: list[str] = []
    threads = [threading.Thread(target=send, args=(place, token, received, errors)) for _ in range(flows)]
    began = time.monotonic()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    rate = sum(received) / (time.monotonic() - began) / 1e9
    return {"address": place[0], "flows": flows, "gbps": 0.0 if errors else rate, "error": "".join(errors[:1])}


def share(text: str, root: int) -> str:
    """Broadcast a text from rank `root` to all, as bytes, without pickle."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    message[: len(text.encode())] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    if device is not None:
        message = message.to(device)
    dist.broadcast(message, root)
    return bytes(message.cpu().tolist()).rstrip(b"\0").decode()


def main(bind: str) -> None:
    """Measure all addresses."""
    session = regrow.init(seed=0)
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(session.local_rank % torch.accelerator.device_count())
    last = session.world_size - 1
    receiver = None
    message = ""
    if session.rank == last:
        token = secrets.token_bytes(16)
        receiver = Receiver(addresses(bind), token)
        message = json.dumps({"places": receiver.places, "token": token.hex()})
    answer = json.loads(share(message, last))
    if session.rank == 0:
        token = bytes.fromhex(answer["token"])
        with Path("rates.jsonl").open("w") as file:
            for host, port in answer["places"]:
                for flows in FLOWS:
                    rate = measure((host, port), flows, token)
                    file.write(json.dumps(rate) + "\n")
                    file.flush()
                    if rate["error"]:
                        break  # more flows would wait for the same timeout again
    share("over", 0)
    if receiver is not None:
        receiver.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
