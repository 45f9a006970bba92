"""Nodes that come and go, sizes that are asked for, as an operator sees it: commands, signals, exit codes, words."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.process.batch import desk, until
from tests.process.launching import PATIENCE, Running, Site, agents_below, site

from regrow.membership.view import JobView
from regrow.observe.ledger import Ledger, read_records

PACED = """
import sys, time
from pathlib import Path
import torch
import regrow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
session = regrow.init(seed=3)
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
session.protect(model, optimizer)

def batch(step, share):
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + share))

for step in session.steps(batch, until=700, microbatches=8):
    with step as micros:
        for micro in micros:
            micro.backward(model(micro.batch).square().mean())
        optimizer.step()
        if not Path("hurry").exists() and not step.rehearsal:
            time.sleep(0.02 if step.number < 500 else 0.6)  # until the test has seen enough
    if step.committed and step.number % 5 == 0:
        print(f"at {step.number} of {session.world_size}", flush=True)
print(f"trained by {session.world_size}", flush=True)
"""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        made.script(PACED)
        yield made


def view(here: Site) -> JobView:
    return msgspec.json.decode(here.regrow("status", "j", "--json").stdout, type=JobView)


def finish(here: Site, job: Running, *, world: int) -> None:
    """The job goes on to its end, in a world of `world` ranks, and leaves nothing behind."""
    (here.folder / "hurry").touch()
    assert job.wait() == 0, job.output
    assert job.output.count(f"trained by {world}") >= 1, job.output
    here.assert_nothing_left()


def until_world(job: Running, world: int) -> None:
    """Wait for a step of `world` ranks, later than all that has been read until now."""
    before = len(job.output)
    deadline = time.monotonic() + PATIENCE
    while f" of {world}\n" not in job.output[before:]:
        assert time.monotonic() < deadline, job.output
        job.wait_for("at ", job.output.count("at ") + 1)


def changes(here: Site) -> list[tuple[str, str]]:
    """Kind and rung of every incident."""
    return [(each.kind, each.rung) for each in Ledger(read_records(here.home / "jobs" / "j")).incidents]


def test_a_node_joins_a_running_job_and_is_drained_by_a_command(here: Site) -> None:
    with here.start("run", "--job", "j", "--nnodes", "1:2", "train.py") as job:
        until_world(job, 1)
        with here.start("agent", "--join") as node:
            until_world(job, 2)
            assert [each.node for each in view(here).nodes] == ["node0", "node1"]
            refused = here.regrow("agent", "--join", "j")
            assert refused.returncode == 2
            assert "this job has at most 2 nodes (start it with more in --nnodes MIN:MAX)" in refused.stderr
            drained = here.regrow("drain", "node1", "--grace", "20s", "--reason", "its disk is full")
            assert (drained.returncode, drained.stderr) == (0, "")
            assert drained.stdout == "job j: node1 is given back; its ranks have 20 s to leave it\n"
            assert node.wait() == 0, node.output
            assert "node1 has left the job, which goes on without it" in node.output
        until_world(job, 1)
        assert "its disk is full" in job.output
        lines = here.regrow("status").stdout
        assert "replicas: 1, wanted 2 (from 1 to 2)" in lines
        assert re.search(r"^node1 +127.0.0.1 +given back +0 ", lines, re.MULTILINE)
        with here.start("agent", "--join", "j", "--name", "spot", "--stay", "1h") as node:
            until_world(job, 2)
            assert view(here).nodes[2].node == "spot"
            finish(here, job, world=2)
            assert node.wait() == 0, node.output
    assert changes(here) == [("grow", "grow"), ("preempt", "shrink"), ("grow", "grow")]


def test_signals_give_a_node_back_and_a_second_one_ends_it_at_once(here: Site) -> None:
    with here.start("run", "--job", "j", "--nnodes", "1:2", "train.py") as job:
        until_world(job, 1)
        with here.start("agent", "--join", "--grace", "20s") as node:
            until_world(job, 2)
            node.signal(signal.SIGTERM)
            assert node.wait() == 0, node.output
            assert "SIGTERM was received; giving node1 back, its ranks have 20 s (again: at once)" in node.output
        until_world(job, 1)
        # As the operator has it where Kueue takes 0 for the end of the pod's part.
        with here.start("agent", "--join", REGROW_GIVEN_BACK_CODE="75") as node:
            until_world(job, 2)
            os.kill(agents_below(node)[0], signal.SIGUSR1)
            assert node.wait() == 75, node.output
        until_world(job, 1)
        assert "given back within 30 s: signal SIGUSR1" in job.output
        with here.start("agent", "--join") as node:
            until_world(job, 2)
            node.signal(signal.SIGUSR1)
            node.wait_for("giving")
            node.signal(signal.SIGINT)
            assert node.wait() in (0, 75)  # whichever is quicker
        until_world(job, 1)
        finish(here, job, world=1)


def test_a_node_that_joined_and_is_killed_is_not_waited_for(here: Site) -> None:
    with here.start("run", "--job", "j", "--nnodes", "1:2", "train.py") as job:
        until_world(job, 1)
        with here.start("agent", "--join") as node:
            until_world(job, 2)
            until(lambda: not Ledger(read_records(here.home / "jobs" / "j")).open_incidents, every=0.1)
            node.signal(signal.SIGKILL)
            until_world(job, 1)
        assert view(here).nodes[1].away
        with here.start("agent", "--join"):
            until_world(job, 2)
            finish(here, job, world=2)
    assert [rung for _, rung in changes(here)] == ["grow", "shrink", "grow"]


def test_sizes_that_cannot_be_are_refused_and_the_job_goes_on(here: Site) -> None:
    flags = ("--nproc-per-node", "2", "--replica-ranks", "2", "--replicas", "1:4", "--replica-sizes", "1,2,4")
    with here.start("run", "--job", "j", *flags, "train.py") as job:
        until_world(job, 2)
        for asked, said in (
            (("--replicas", "0"), "a job has at least one replica, not 0"),
            (("--replicas", "5"), "5 replicas are more than the maximum of 4"),
            (("--ranks", "3"), "3 ranks are not a multiple of the unit: a replica is 2 ranks"),
            (("--replicas", "3"), "3 replicas are none of the allowed sizes (1, 2, 4)"),
            (("--ranks", "16"), "8 replicas are more than the maximum of 4"),
        ):
            refused = here.regrow("scale", "j", *asked)
            assert (refused.returncode, refused.stderr) == (1, f"regrow: job j: {said}\n"), asked
        assert here.regrow("scale", "j").returncode == 2
        unknown = here.regrow("drain", "node4")
        assert (unknown.returncode, unknown.stderr) == (
            1,
            "regrow: job j: this job has no node node4; its nodes are: node0\n",
        )
        stranger = here.regrow("agent", "--join")
        assert stranger.returncode == 2
        assert "this job has at most 1 node (start it with --nnodes MIN:MAX)" in stranger.stderr
        assert view(here).replicas == 1
        finish(here, job, world=2)
    assert changes(here) == []


def test_a_job_is_made_larger_and_smaller_by_a_command(here: Site) -> None:
    with here.start("run", "--job", "j", "--replicas", "1:3", "train.py") as job:
        until_world(job, 1)
        grown = here.regrow("scale", "--replicas", "3", "--reason", "the night")
        assert grown.returncode == 0, grown.stderr
        assert grown.stdout.startswith("job j: ")
        until_world(job, 3)
        job.wait_for("the night")
        assert "replicas: 3 (from 1 to 3)" in here.regrow("status").stdout
        out_of_range = here.regrow("kill", "--rank", "3")
        assert (out_of_range.returncode, "ranks 0 to 2" in out_of_range.stderr) == (2, True)
        assert here.regrow("scale", "--ranks", "2").returncode == 0
        until_world(job, 2)
        assert "ranks 0 to 1" in here.regrow("kill", "--rank", "2").stderr
        finish(here, job, world=2)
    assert changes(here) == [("grow", "grow"), ("shrink", "shrink")]


def test_a_drained_node_of_this_machine_leaves_and_its_launcher_starts_no_other(here: Site) -> None:
    with here.start("run", "--job", "j", "--local-nodes", "2", "--replicas", "1:2", "train.py") as job:
        until_world(job, 2)
        assert here.regrow("drain", "j", "node1").returncode == 0
        job.wait_for("node1 has left the job, which goes on without it")
        until_world(job, 1)
        assert "starting another" not in job.output
        refused = here.regrow("drain", "j", "node0")
        assert refused.returncode == 1
        assert "without node0 there is room for 0 replicas, and this job needs at least 1" in refused.stderr
        finish(here, job, world=1)
    assert changes(here) == [("preempt", "shrink")]


def test_an_agent_of_an_elastic_job_that_is_told_to_end_gives_its_node_back(here: Site) -> None:
    with here.start("run", "--job", "j", "--local-nodes", "2", "--replicas", "1:2", "train.py") as job:
        until_world(job, 2)
        os.kill(agents_below(job)[1], signal.SIGTERM)
        job.wait_for("has left the job, which goes on without it")
        assert "signal SIGTERM" in job.output
        until_world(job, 1)
        finish(here, job, world=1)


@pytest.mark.parametrize("end", ["late", "again", "killed"])
def test_an_agent_that_ends_after_its_notice_before_its_ranks_have_left_is_not_started_again(
    here: Site, end: str
) -> None:
    stall = 'while Path("stall").exists(): Path(f"stalls-{session.rank}").touch(), time.sleep(0.02)'
    here.script(PACED.replace("optimizer.step()", f"optimizer.step()\n        {stall}"))
    grace = "2s" if end == "late" else "60s"
    flags = ("--local-nodes", "2", "--replicas", "1:2", "--drain-grace", grace)
    with here.start("run", "--job", "j", *flags, "train.py") as job:
        until_world(job, 2)
        (here.folder / "stall").touch()
        until(lambda: any(here.folder.glob("stalls-*")))  # the other may wait for it at the end of its step
        agent = agents_below(job)[1]
        os.kill(agent, signal.SIGTERM)
        job.wait_for("is given back within")
        if end != "late":
            os.kill(agent, signal.SIGTERM if end == "again" else signal.SIGKILL)
        job.wait_for("has left the job, which goes on without it")
        (here.folder / "stall").unlink()
        until_world(job, 1)
        assert "starting another" not in job.output and "is back" not in job.output
        assert [each.left for each in view(here).nodes].count(True) == 1
        finish(here, job, world=1)
    assert [rung for _, rung in changes(here)] == ["shrink"]


def test_the_first_node_can_be_drained_and_its_launcher_goes_on_as_the_coordinators_host(here: Site) -> None:
    with here.start("run", "--job", "j", "--nnodes", "1:2", "train.py") as job:
        until_world(job, 1)
        with here.start("agent", "--join") as node:
            until_world(job, 2)
            os.kill(agents_below(job)[0], signal.SIGUSR1)
            job.wait_for("node0 has left the job, which goes on without it")
            until_world(node, 1)
            until(lambda: agents_below(job) == [])
            (here.folder / "hurry").touch()
            assert (job.wait(), node.wait()) == (0, 0)
            assert "trained by 1" in node.output
            here.assert_nothing_left()


def test_a_node_without_the_script_is_told_so(here: Site, tmp_path: Path) -> None:
    with here.start("run", "--job", "j", "--nnodes", "1:2", "train.py") as job:
        until_world(job, 1)
        (here.folder / "train.py").rename(here.folder / "elsewhere.py")
        lost = here.regrow("agent", "--join")
        assert lost.returncode == 2
        assert "job j cannot run on this node: there is no script train.py" in lost.stderr
        assert f"the job was started in {here.folder}" in lost.stderr
        secretless = here.regrow("agent", "--join", "127.0.0.1:1")
        assert (secretless.returncode, "needs the job's secret" in secretless.stderr) == (2, True)
        finish(here, job, world=1)


def test_a_node_that_is_given_back_infers_until_the_training_takes_it_again(here: Site) -> None:
    with desk(here.folder) as at, here.start("run", "--job", "j", "--nnodes", "1:2", "train.py") as job:
        until_world(job, 1)
        at.rows(*(f"prompt {number}" for number in range(10_000)))
        (here.folder / "pool.txt").touch()
        head = at.start("--workers-file", "pool.txt", "--per-worker", "2")
        with here.start("agent", "--join") as node:
            until_world(job, 2)
            assert here.regrow("drain", "node1").returncode == 0
            assert node.wait() == 0, node.output
        heard = here.folder / "heard"
        worker = at.register("out.jsonl", "--latency", "0.5", "--heard", str(heard))
        until_world(job, 1)
        until(lambda: at.journaled() >= 2)
        worker.send_signal(signal.SIGTERM)
        code, said = at.end(worker)
        assert code == 0 and "rows under way" not in said, said
        until(lambda: at.journaled() == len(heard.read_text().splitlines()))
        at.kill(head)
        with here.start("agent", "--join") as node:
            until_world(job, 2)
            finish(here, job, world=2)
            assert node.wait() == 0, node.output
