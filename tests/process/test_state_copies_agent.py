"""Copies in the memory of real agents: what they say of them, and that they outlive whoever took them."""

import asyncio
import time
from pathlib import Path

import pytest
import torch
from tests.process.agent_harness import TOKEN, agent

from regrow.core.ids import Generation, NodeId, Rank, StepNo
from regrow.core.messages import facts
from regrow.core.messages.copies import CopiesHeld, CopySource, CopyStreamEnded, KeptCopy, PlaceCopies, ReportCopies
from regrow.hydration.copies.restore import restore
from regrow.hydration.inventory import Inventory

# Takes a copy, says that it is stored, takes half of the next, and dies.
SCRIPT = """
import os, signal, threading, time
import torch
from regrow.agent.workers.link import WorkerLink
from regrow.core.messages.copies import SnapshotStored
from regrow.core.messages.facts import WorkerFinished
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.copies.snapshot import SnapshotKeeper

link = WorkerLink.current()
keeper = SnapshotKeeper(link.env.worker, send=link.send)

def obey():
    for order in link.orders():
        if isinstance(order, SnapshotStored):
            keeper.stored(order.step, order.error)

class State:
    def __init__(self, step):
        self.weight, self.dies = torch.full((300_000,), float(step)), step > 5
    def inventory(self, step):
        return Inventory(step, [TensorEntry.of("weight", self.weight)], b"")
    def tensor(self, name):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.weight

threading.Thread(target=obey, daemon=True).start()
for step in (0, 5, 10):
    keeper.take(State(step), step, link.env.rank, "all")
    assert keeper.wait_stored(time.monotonic() + 20)
    link.send(WorkerFinished(link.env.worker, 1, step))
"""


class Sink:
    def __init__(self) -> None:
        self.weight = torch.zeros(300_000)

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def finish(self) -> None:
        pass


async def bring_back(endpoint: str, step: int) -> None:
    sink = Sink()
    source = CopySource(Rank(0), StepNo(step), endpoint)
    await asyncio.to_thread(restore, sink, source, token=TOKEN, deadline=time.monotonic() + 20)
    assert torch.equal(sink.weight, torch.full((300_000,), float(step)))


@pytest.mark.parametrize("local", [True, False])
async def test_copies_are_with_both_agents_when_their_worker_has_died_in_the_middle_of_the_next(
    tmp_path: Path, local: bool
) -> None:
    for name in ("first", "buddy"):
        (tmp_path / name).mkdir()
    two = {"nodes": 2}
    async with (
        agent(tmp_path / "first", SCRIPT, job=two, local=local) as first,
        agent(tmp_path / "buddy", SCRIPT, job=two, local=local) as buddy,
    ):
        vaults = [(await bench.coordinator.expect(facts.NodeJoined)).copy_endpoint for bench in (first, buddy)]
        assert all(copy_endpoint.startswith("unix:" if local else "tcp:") for copy_endpoint in vaults)
        await first.coordinator.order(PlaceCopies(NodeId("n0"), NodeId("n1"), vaults[1]))
        await first.spawn()
        await first.coordinator.expect(facts.WorkerFinished, state_at=5)
        await first.coordinator.expect(facts.WorkerExited, code=-9)
        streamed = await first.coordinator.expect(CopyStreamEnded, step=0)
        assert (streamed.buddy, streamed.rank, streamed.error) == ("n1", 0, "") and streamed.nbytes >= 1_200_000
        for bench, copy_endpoint, steps in ((first, vaults[0], [5]), (buddy, vaults[1], [0, 5])):
            await bench.coordinator.order(ReportCopies(NodeId("n0"), Generation(3)))
            held = await bench.coordinator.expect(CopiesHeld, generation=3)
            assert held.copies == [KeptCopy(Rank(0), "all", StepNo(step), streamed.nbytes) for step in steps]
            for step in steps:
                await bring_back(copy_endpoint, step)
        for bench in (first, buddy):
            assert await bench.stop() == 0
            assert await bench.nothing_left() == []
