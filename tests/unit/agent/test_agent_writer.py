"""The process that writes checkpoints, as its agent sees it."""

import socket

import msgspec

from regrow.agent.checkpoints.writer_client import WriterClient
from regrow.core.ids import NodeId, StepNo
from regrow.core.messages.checkpoints import CheckpointFailed


async def test_what_a_killed_writer_said_last_is_told_though_it_left_orders_unread() -> None:
    told: list[object] = []
    client = WriterClient(NodeId("n0"), None, report=told.append)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    last = CheckpointFailed(NodeId("n0"), 1, StepNo(4), "the disk is full")
    ours.send(b"an order")
    theirs.send(msgspec.msgpack.encode(last))
    theirs.close()
    client._control = ours
    client._readable(ours)
    assert told == [last]
    assert client._control is None, "its end was not seen"
