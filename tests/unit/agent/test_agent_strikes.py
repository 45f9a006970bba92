"""A worker as its agent follows it: from a fault on demand before it has a process to an end that nobody waits for."""

import asyncio
import signal
import subprocess

from regrow.agent.workers.worker import Worker
from regrow.core.ids import Generation, NodeId, Rank, WorkerId
from regrow.core.messages import orders
from regrow.core.messages.vocabulary import Role


def _order() -> orders.SpawnWorker:
    return orders.SpawnWorker(
        NodeId("n0"), WorkerId("n0.w0"), Role.RANK, Rank(0), 0, 1, Generation(0), restarts=0, resume=False
    )


async def test_a_signal_that_comes_first_is_given_to_the_process_when_there_is_one() -> None:
    worker = Worker(_order(), on_fact=lambda *_: None)
    worker.send_signal(signal.SIGTERM)
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


async def test_the_end_of_a_worker_that_nobody_waits_for_any_more_is_not_heard() -> None:
    worker, heard = Worker(_order(), on_fact=lambda *_: None), list[Worker]()
    child, other = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    later = Worker(_order(), on_fact=lambda *_: None)
    try:
        worker.started(child.pid, heard.append)
        ended = asyncio.Event()
        later.started(other.pid, lambda _: ended.set())
        worker.close()
        for each in (child, other):
            each.kill()
            each.wait()  # as the agent does with what is left at its end
        await asyncio.wait_for(ended.wait(), 60)
        assert heard == []
    finally:
        later.close()
