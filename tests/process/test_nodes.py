"""Whole nodes are lost and come back; training goes on, and ends bitwise equal to the run that nobody disturbed."""

import json
import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from tests.ports import held_port
from tests.process.launching import Running, Site, agents_below, site
from tests.process.training import SCRIPTS, Outcome, redone, train

from regrow.core.records import Noted
from regrow.observe.ledger import Ledger, read_records

WORLD, STEPS = 4, 90
LOCAL = ("--local-nodes", "2", "--nproc-per-node", "2")
PLAIN = "import time\nprint('waiting', flush=True)\ntime.sleep(600)"
TRAINING = str(SCRIPTS / "train_small.py")
HELD = """
import runpy, sys, time
from pathlib import Path
while Path("held").exists():
    time.sleep(0.01)
sys.path.insert(0, {folder!r})
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
"""The training, whose new workers do not begin while there is a file `held`."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("nodes")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    """One node of four ranks: how they are spread over nodes changes nothing."""
    outcome = train(here, "undisturbed", world=WORLD, steps=STEPS)
    assert outcome.code == 0, outcome.output
    return outcome


def start(here: Site, name: str, *flags: str, script: str = TRAINING, **more: str) -> Running:
    """The training. Its steps take their time until `end`, so that some are left when a node is lost."""
    (here.folder / "hurry").unlink(missing_ok=True)
    out = here.folder / f"{name}.out"
    words = (script, "--steps", str(STEPS), "--pace", "0.02", "--say-steps")
    return here.start("run", "--job", name, *flags, *words, "--out", str(out), **more)


def end(here: Site, name: str, job: Running) -> Outcome:
    (here.folder / "hurry").touch()
    code = job.wait()
    finals = {}
    for rank in range(WORLD):
        path = here.folder / f"{name}.{rank}.json"
        if path.exists():
            finals[rank] = json.loads(path.read_text())
    return Outcome(code, job.output, Ledger(read_records(here.home / "jobs" / name)), finals)


def agents_of(here: Site, name: str, job: Running) -> dict[str, int]:
    """Node to the process of its agent."""
    job.wait_for("step 1\n")
    status = json.loads(here.regrow("status", name, "--json").stdout)
    agents = {worker["node"]: psutil.Process(worker["pid"]).ppid() for worker in status["ranks"]}
    assert all("regrow.agent" in psutil.Process(agent).cmdline() for agent in agents.values())
    return agents


def successor(job: Running, agents: dict[str, int]) -> int:
    """The agent that has taken the place of a lost one."""
    (new,) = set(agents_below(job)) - set(agents.values())
    return new


def assert_equal(disturbed: Outcome, undisturbed: Outcome, *, lost: set[int]) -> None:
    """Bitwise the same and nothing done twice. An agent that is killed takes its newest lines of the record with it."""
    assert disturbed.code == 0, disturbed.output
    assert disturbed.finals == undisturbed.finals
    assert {at: loss for at, loss in disturbed.losses.items() if undisturbed.losses[at] != loss} == {}
    missing = undisturbed.losses.keys() - disturbed.losses.keys()
    assert {rank for _, rank in missing} <= lost
    assert redone(disturbed.ledger) == []
    assert disturbed.ledger.open_incidents == {}
    assert disturbed.ledger.steps_lost == 0


def test_nodes_of_one_machine_train_as_one_node_would(here: Site, undisturbed: Outcome) -> None:
    with start(here, "calm", *LOCAL) as job:
        calm = end(here, "calm", job)
    assert_equal(calm, undisturbed, lost=set())
    assert sorted(path.name for path in (here.home / "jobs" / "calm").glob("steps.*")) == [
        "steps.node0.jsonl",
        "steps.node1.jsonl",
    ]


@pytest.mark.parametrize(("node", "lost"), [("node0", {0, 1}), ("node1", {2, 3})])
@pytest.mark.parametrize("standbys", ["0", "1"])
def test_a_killed_agent_costs_no_step(
    here: Site, undisturbed: Outcome, node: str, lost: set[int], standbys: str
) -> None:
    name = f"kill-{node}-{standbys}"
    with start(here, name, *LOCAL, "--standby", standbys) as job:
        agents = agents_of(here, name, job)
        job.wait_for("step 20\n")
        os.kill(agents[node], signal.SIGKILL)
        job.wait_for("goes on after")
        outcome = end(here, name, job)
    assert_equal(outcome, undisturbed, lost=lost)
    (incident,) = outcome.ledger.incidents
    assert (incident.kind, incident.rung, set(incident.ranks)) == ("node", "node", lost)
    here.assert_nothing_left()


def test_one_node_after_the_other(here: Site, undisturbed: Outcome) -> None:
    with start(here, "turns", *LOCAL) as job:
        agents = agents_of(here, "turns", job)
        for turn, node in enumerate(("node1", "node0", "node1"), 1):
            os.kill(agents[node], signal.SIGKILL)
            job.wait_for("goes on after", times=turn)
            agents[node] = successor(job, agents)
        outcome = end(here, "turns", job)
    assert_equal(outcome, undisturbed, lost={0, 1, 2, 3})
    assert len(outcome.ledger.incidents) == 3


def test_a_node_lost_while_another_is_mended(here: Site, undisturbed: Outcome) -> None:
    script, held = here.script(HELD.format(folder=str(SCRIPTS), script=TRAINING)), here.folder / "held"
    with start(here, "again", *LOCAL, script=script) as job:
        agents = agents_of(here, "again", job)
        held.touch()  # else it may be mended before the second one is lost
        os.kill(agents["node1"], signal.SIGKILL)
        job.wait_for("node1 is back")
        os.kill(successor(job, agents), signal.SIGKILL)
        job.wait_for("node1 is back", times=2)
        held.unlink()
        outcome = end(here, "again", job)
    assert_equal(outcome, undisturbed, lost={2, 3})
    (incident,) = outcome.ledger.incidents
    assert incident.faults == 2


def test_a_node_whose_agents_do_not_stay_ends_the_job(here: Site) -> None:
    with here.start("run", "--job", "dying", here.script(PLAIN)) as job:
        for times in (1, 2, 3):
            job.wait_for("waiting\n", times=times)
            (agent,) = agents_below(job)
            os.kill(agent, signal.SIGKILL)
        assert job.wait() == 75, job.output
        assert "the agent of node0 was ended by SIGKILL, 3 times with no step committed in between" in job.output
    here.assert_nothing_left()


def two_launchers(here: Site, name: str, *flags: str) -> tuple[Running, Running, list[str]]:
    endpoint = f"127.0.0.1:{held_port()}"
    words = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", endpoint, *flags]
    zero, one = (start(here, name, "--node-rank", rank, *words, REGROW_TOKEN="both know") for rank in ("0", "1"))
    return zero, one, words


def test_a_node_that_does_not_come_back_ends_the_job_at_its_deadline(here: Site) -> None:
    zero, one, _ = two_launchers(here, "away", "--node-timeout", "2s")
    with zero, one:
        zero.wait_for("step 20\n")
        one.signal(signal.SIGKILL)
        assert zero.wait() == 75, zero.output
        assert "node1 was lost and did not come back within 2 s" in zero.output
    here.assert_nothing_left()


def test_a_node_that_is_started_again_joins_the_running_job(here: Site, undisturbed: Outcome) -> None:
    zero, one, words = two_launchers(here, "rejoin")
    with zero, one:
        zero.wait_for("step 20\n")
        one.signal(signal.SIGKILL)
        zero.wait_for("node1 was lost")
        with start(here, "rejoin", "--node-rank", "1", *words, REGROW_TOKEN="both know") as again:
            outcome = end(here, "rejoin", zero)
            assert again.wait() == 0, again.output
    assert_equal(outcome, undisturbed, lost={2, 3})
    assert "node1 is back, on 127.0.0.1" in [line.text for line in notes(here, "rejoin")]


def test_an_agent_that_goes_on_after_its_lease_finds_itself_shut_out(here: Site) -> None:
    zero, one, _ = two_launchers(here, "resumed")
    with zero, one:
        agent = agents_of(here, "resumed", zero)["node1"]
        workers = [child.pid for child in psutil.Process(agent).children()]
        os.kill(agent, signal.SIGSTOP)
        zero.wait_for("node1 was lost")
        assert all(psutil.pid_exists(pid) for pid in workers), "nobody could end them"
        os.kill(agent, signal.SIGCONT)
        zero.wait_for("node1 is back")
        assert not any(psutil.pid_exists(pid) for pid in workers), "the new agent comes after the end of the old one"
        (here.folder / "hurry").touch()
        assert (zero.wait(), one.wait()) == (0, 0), zero.output + one.output
    here.assert_nothing_left()


def notes(here: Site, name: str) -> list[Noted]:
    return [line for line in read_records(here.home / "jobs" / name) if isinstance(line, Noted)]
