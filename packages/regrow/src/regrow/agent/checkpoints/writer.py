"""The process that writes durable checkpoints: `python -m regrow.agent.checkpoints.writer DESCRIPTOR`.

It reads the place of the checkpoints from standard input. It reads snapshots of the ranks' state from shared memory, so
that no worker waits for a disk, and has a low priority. Its orders come over a socket pair, with the snapshots'
descriptors; it ends with its agent.
"""

import importlib
import signal
import socket
import sys
from collections.abc import Callable
from typing import cast

import msgspec

from regrow.agent.workers.processes import call_process, die_with_parent, heed_nobody
from regrow.core.errors import RegrowError
from regrow.core.messages.checkpoints import CheckpointFailed, CheckpointPlace, WriterFact, WriterOrder
from regrow.core.process.priority import step_back
from regrow.core.wire import encoded

PACKET_BYTES = 256 << 10
DESCRIPTORS = 250
"""Largest number of descriptors in a message, more than ranks of a node; the kernel passes 253 at a time."""
_NICE = 5
"""Niceness for a third of a worker's share of a core. With much less, imports take a minute if all cores are busy."""
_encoder = msgspec.msgpack.Encoder()
_WORK = "regrow.hydration.durable.work"


def main() -> None:
    """Import what is needed, then write on request until the agent closes the connection."""
    die_with_parent(signal.SIGKILL)
    call_process("regrow-writer")
    heed_nobody()
    step_back(_NICE)
    place = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckpointPlace)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        # Imported by name, because the control plane is kept free of torch; only this process of the agent needs it.
        work = cast(Callable[..., WriterFact | None], importlib.import_module(_WORK).work)
        _serve(control, place, work)


def _serve(control: socket.socket, place: CheckpointPlace, work: Callable[..., WriterFact | None]) -> None:
    decoder: msgspec.msgpack.Decoder[WriterOrder] = msgspec.msgpack.Decoder(WriterOrder)
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, DESCRIPTORS)
        if not packet:
            return
        order = decoder.decode(packet)
        try:
            fact = work(place, order, descriptors)
        except (RegrowError, OSError) as error:
            fact = _failed(order, _reason(error), torn=type(error).__name__ == "TornSnapshot")
        except Exception as error:  # noqa: BLE001 - object stores raise their own kinds; all are reported
            fact = _failed(order, f"{type(error).__name__}: {error}")
        if fact is not None:
            control.send(encoded(_encoder, fact))


def _failed(order: WriterOrder, reason: str, *, torn: bool = False) -> CheckpointFailed:
    return CheckpointFailed(order.node, order.attempt, order.step, reason, torn)


def _reason(error: RegrowError | OSError) -> str:
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return str(error)


if __name__ == "__main__":
    main()
