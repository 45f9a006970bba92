"""An agent has its node examined, beside what goes on, and tells the coordinator what is not as it should be."""

import asyncio
import stat
from pathlib import Path
from typing import Any

from tests.process.agent_harness import NODE, Bench, agent
from tests.process.launching import site

from regrow.core.ids import Generation, NodeId, Rank, StepNo
from regrow.core.messages import orders
from regrow.core.messages.health import NodeExamined
from regrow.core.messages.vocabulary import WorldChange
from regrow.core.records import NodeJudged
from regrow.core.verdicts import Action, HealthVerdict, Severity
from regrow.observe.ledger import read_records


def check(folder: Path, text: str) -> str:
    path = folder / "check.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def health(*checks: str) -> dict[str, Any]:
    return {"health": True, "health_checks": list(checks)}


async def formed(bench: Bench, generation: int) -> None:
    note = orders.NoteGeneration(NODE, Generation(generation), StepNo(3))
    await bench.coordinator.order(note)


async def test_a_node_is_examined_when_it_joins_and_after_a_fault(tmp_path: Path) -> None:
    sick = check(
        tmp_path, """echo '{"severity": "leave", "action": "reboot", "evidence": "a cable on '$REGROW_NODE'"}'"""
    )
    async with agent(tmp_path, job=health(sick)) as bench:
        first = await bench.coordinator.expect(NodeExamined, occasion="joined")
        said = HealthVerdict(NodeId(NODE), "", Severity.LEAVE, Action.REBOOT, "check:check.sh", f"a cable on {NODE}")
        assert said in first.verdicts
        assert all(each.severity is not Severity.OK for each in first.verdicts), "what is well is not sent"
        await formed(bench, 1)
        started = await bench.spawn()
        second = Generation(2)
        await bench.form(started.worker, second, Rank(0), StepNo(3), WorldChange("grow", second, 1, 2))
        await formed(bench, 3)
        await formed(bench, 3)
        after = await bench.coordinator.expect(NodeExamined, occasion="before generation 3")
        assert said in after.verdicts
        assert len(bench.coordinator.all(NodeExamined)) == 2, "the first one and a planned change are no faults"
        assert await bench.stop() == 0
        assert await bench.nothing_left() == []


async def test_a_check_that_hangs_delays_neither_workers_nor_the_end(tmp_path: Path) -> None:
    note = tmp_path / "begun"
    async with agent(tmp_path, job=health(check(tmp_path, f"touch {note}; sleep 3600"))) as bench:
        while not note.exists():
            await asyncio.sleep(0.01)
        await bench.spawn("w0")
        bench.note_processes()
        assert await asyncio.wait_for(bench.stop(grace=0.1), 60.0) == 0
        assert await bench.nothing_left() == []
        assert bench.coordinator.all(NodeExamined) == []


async def test_an_examination_that_is_killed_harms_nobody(tmp_path: Path) -> None:
    note = tmp_path / "begun"
    async with agent(tmp_path, job=health(check(tmp_path, f"touch {note}; kill -KILL $PPID; sleep 3600"))) as bench:
        async with asyncio.timeout(60.0):
            while "gave no answer" not in bench.complaints():
                await asyncio.sleep(0.01)
        assert note.exists()
        await bench.spawn("w0")
        assert await bench.stop(grace=0.1) == 0
        assert bench.coordinator.all(NodeExamined) == []


async def test_without_the_wish_nothing_is_examined(tmp_path: Path) -> None:
    note = tmp_path / "begun"
    checks = {"health": False, "health_checks": [check(tmp_path, f"touch {note}")]}
    async with agent(tmp_path, job=checks) as bench:
        await bench.spawn("w0")
        assert await bench.stop(grace=0.1) == 0
    assert not note.exists()


SCRIPT = """
import os, time
from pathlib import Path
import torch
import regrow

session = regrow.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model, optimizer)
events = Path(os.environ["REGROW_HOME"]) / "jobs" / "sick" / "events.jsonl"
deadline = time.monotonic() + 60
while "NodeJudged" not in events.read_text() and time.monotonic() < deadline:
    time.sleep(0.05)
for step in session.steps(lambda number: torch.ones(1, 2), until=3):
    with step as batch:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_job_whose_only_node_is_sick_says_so_and_goes_on(tmp_path: Path) -> None:
    with site(tmp_path) as here:
        sick = check(here.folder, """echo '{"severity": "leave", "action": "reboot", "evidence": "a loose cable"}'""")
        words = ["run", "--job", "sick", "--nproc-per-node", "2", "--health-check", sick, here.script(SCRIPT)]
        done = here.regrow(*words, REGROW_NO_HEALTH="")
        assert done.returncode == 0, done.stderr
        judged = [line for line in read_records(here.home / "jobs" / "sick") if isinstance(line, NodeJudged)]
        assert [(line.severity, line.action, line.evidence) for line in judged if line.source == "check:check.sh"] == [
            ("leave", "reboot", "a loose cable")
        ]
        assert "a loose cable" in done.stderr
        here.assert_nothing_left()
