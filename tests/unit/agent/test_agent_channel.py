import asyncio
import socket
import struct

from tests.unit.agent.frames import next_message

from regrow.agent.workers.channel import WorkerChannel
from regrow.core.errors import ProtocolError
from regrow.core.ids import Generation, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.unions import WorkerFact, WorkerOrder
from regrow.core.wire import FrameCodec

FACT = facts.WorkerHalted(WorkerId("w"), Generation(1), StepNo(4))


class Ends:
    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.facts: list[WorkerFact] = []
        self.garbage: list[ProtocolError] = []
        self.channel = WorkerChannel(ours, on_fact=self.facts.append, on_garbage=self.garbage.append)
        self.channel.open()
        self.frame = FrameCodec[WorkerOrder](WorkerOrder).frame(FACT)

    def close(self) -> None:
        self.channel.close()
        self.theirs.close()


async def test_a_fact_cut_in_pieces_arrives_whole() -> None:
    ends = Ends()
    for byte in ends.frame + ends.frame:
        ends.theirs.send(bytes([byte]))
        ends.channel.drain()
    assert ends.facts == [FACT, FACT]
    ends.close()


async def test_what_a_dead_worker_said_last_is_heard() -> None:
    ends = Ends()
    ends.theirs.sendall(ends.frame * 1000)
    ends.theirs.close()
    ends.channel.drain()
    assert len(ends.facts) == 1000
    ends.close()


async def test_garbage_is_told_once_and_nothing_after_it_is_heard() -> None:
    ends = Ends()
    ends.theirs.sendall(ends.frame + struct.pack(">I", 3) + b"abc" + ends.frame)
    ends.channel.drain()
    ends.channel.drain()
    assert (len(ends.facts), len(ends.garbage)) == (1, 1)
    ends.close()


async def test_an_announced_frame_of_gigabytes_is_garbage() -> None:
    ends = Ends()
    ends.theirs.sendall(struct.pack(">I", 1 << 31))
    ends.channel.drain()
    assert len(ends.garbage) == 1
    ends.close()


async def test_orders_to_a_worker_that_does_not_read_wait_without_blocking_and_come_in_order() -> None:
    ends = Ends()
    count = 20_000
    for number in range(count):
        ends.channel.send(orders.HaltGeneration(WorkerId("w"), Generation(number), "x" * 40))
    ends.theirs.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=ends.theirs)
    codec: FrameCodec[WorkerOrder] = FrameCodec(WorkerOrder)
    for number in range(count):
        order = await next_message(codec, reader, 10.0)
        assert isinstance(order, orders.HaltGeneration) and order.generation == number
    writer.close()
    ends.channel.close()
