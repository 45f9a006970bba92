"""A whole node of a pure FSDP job is lost, and with it its shards: the copies in its buddy's memory bring them back."""

import json
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from tests.process.disk_watch import watched
from tests.process.launching import PATIENCE, Running, Site, site
from tests.process.training import SCRIPTS, Outcome, train

from regrow.core.records import Noted
from regrow.observe.ledger import Ledger, read_records

WORLD, STEPS, EVERY = 4, 40, 4


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("shards")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    extra = ("--mode", "fsdp2")
    outcome = train(here, "undisturbed", world=WORLD, steps=STEPS, extra=extra, script="train_parallel.py")
    assert outcome.code == 0, outcome.output
    return outcome


def start(here: Site, name: str, *flags: str, hold: str = "") -> Running:
    (here.folder / "hurry").unlink(missing_ok=True)
    words = ["run", "--job", name, "--local-nodes", "2", "--nproc-per-node", "2", *flags]
    words += [str(SCRIPTS / "train_parallel.py"), "--mode", "fsdp2", "--steps", str(STEPS), "--say-steps"]
    words += ["--hold", hold] if hold else ["--pace", "0.05"]  # so steps are left when a node is ended
    return here.start(*words, "--out", str(here.folder / f"{name}.out"))


def agent_of(here: Site, name: str, node: str) -> int:
    status = json.loads(here.regrow("status", name, "--json").stdout)
    worker = next(worker for worker in status["ranks"] if worker["node"] == node)
    return int(psutil.Process(worker["pid"]).ppid())


def outcome_of(here: Site, name: str, job: Running) -> Outcome:
    (here.folder / "hurry").touch()
    code = job.wait()
    finals = {rank: json.loads((here.folder / f"{name}.{rank}.json").read_text()) for rank in range(WORLD)}
    for final in finals.values():
        del final["losses"]
    return Outcome(code, job.output, Ledger(read_records(here.home / "jobs" / name)), finals)


@pytest.mark.parametrize("nodes", [("node1",), ("node0",), ("node1", "node0", "node1")])
def test_a_lost_node_costs_a_few_steps_and_no_disk(here: Site, undisturbed: Outcome, nodes: tuple[str, ...]) -> None:
    name, folder = f"lost-{len(nodes)}-{nodes[0]}", here.folder / f"{nodes[0]}-{len(nodes)}.checkpoints"
    folder.mkdir()
    with watched(folder) as disk:
        with start(here, name, "--buddy-every", str(EVERY), "--checkpoint-dir", str(folder)) as job:
            for turn, node in enumerate(nodes):
                job.wait_for(f"step {9 + 9 * turn}\n")
                os.kill(agent_of(here, name, node), signal.SIGKILL)
                job.wait_for("goes on after", times=turn + 1)
            outcome = outcome_of(here, name, job)
        disk.update()
        assert disk.reads == {}
    assert outcome.code == 0, outcome.output
    assert outcome.finals == undisturbed.finals
    assert {at: loss for at, loss in outcome.losses.items() if undisturbed.losses[at] != loss} == {}
    assert [incident.kind for incident in outcome.ledger.incidents] == ["node"] * len(nodes)
    assert all(incident.steps_lost <= EVERY for incident in outcome.ledger.incidents)


def test_a_lost_shard_with_a_durable_checkpoint_starts_again_from_it(here: Site, undisturbed: Outcome) -> None:
    """No copies are kept, so the last resort is used, and says which ranks' state is gone."""
    folder = here.folder / "durable.checkpoints"
    flags = ("--checkpoint-dir", str(folder), "--checkpoint-every", "1ms")  # 30 steps may take less than a second
    with start(here, "durable", *flags, hold="30:go") as job:
        job.wait_for("step 20\n")
        deadline = time.monotonic() + PATIENCE
        while not list(folder.glob("step-*/regrow.json")):
            assert time.monotonic() < deadline, job.output
            time.sleep(0.02)
        os.kill(agent_of(here, "durable", "node1"), signal.SIGKILL)
        (here.folder / "go").touch()
        outcome = outcome_of(here, "durable", job)
    assert outcome.code == 0, outcome.output
    assert outcome.finals == undisturbed.finals
    notes = [record.text for record in read_records(here.home / "jobs" / "durable") if isinstance(record, Noted)]
    assert any("the state of ranks 2 and 3 is held by no remaining worker" in text for text in notes), notes
