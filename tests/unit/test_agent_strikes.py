"""A fault on demand that comes before its worker has a process strikes the process as it comes."""

import asyncio
import signal
import subprocess

from regrow.agent.workers.worker import Worker
from regrow.core.ids import Generation, NodeId, Rank, WorkerId
from regrow.core.messages import orders
from regrow.core.messages.vocabulary import Role


async def test_a_signal_that_comes_first_is_given_to_the_process_when_there_is_one() -> None:
    order = orders.SpawnWorker(
        NodeId("n0"), WorkerId("n0.w0"), Role.RANK, Rank(0), 0, 1, Generation(0), restarts=0, resume=False
    )
    worker = Worker(order, on_fact=lambda *_: None)
    worker.strike(signal.SIGTERM)
    child = subprocess.Popen(["sleep", "600"])
    ended = asyncio.Event()
    try:
        worker.started(child.pid, lambda _: ended.set())
        await asyncio.wait_for(ended.wait(), 60)
        assert child.wait(60) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()
        worker.close()
