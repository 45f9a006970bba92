"""Jobs of several hosts with a network between them: hosts die, links are cut one way and both ways."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.process.batch import until
from tests.process.launching import PATIENCE, Running, Site, site
from tests.process.network import Network, network
from tests.process.test_nodes import WORLD, assert_equal, end
from tests.process.test_spares import nodes_of
from tests.process.training import SCRIPTS, Outcome, train
from tests.process.warm import NETWORK

from regrow.core.ids import Rank
from regrow.core.records import StepCommitted, WorkerForked
from regrow.observe.ledger import read_records

HOSTS = 3
STEPS, LONG = 90, 400


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("network")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(here: Site, hosts: Network) -> Outcome:
    return alone(here, STEPS)


@pytest.fixture(scope="module")
def long_undisturbed(here: Site, hosts: Network) -> Outcome:
    return alone(here, LONG)


def alone(here: Site, steps: int) -> Outcome:
    outcome = train(here, f"undisturbed-{steps}", world=WORLD, steps=steps)
    assert outcome.code == 0, outcome.output
    return outcome


@contextmanager
def job_of(
    here: Site,
    hosts: Network,
    name: str,
    steps: int = STEPS,
    *,
    elastic: bool = False,
    around: Mapping[int, Mapping[str, str]] | None = None,
    pace: float = 0.02,
    lease: str = "10s",
    script: str = str(SCRIPTS / "train_small.py"),
) -> Iterator[list[Running]]:
    """A launcher on each host; two ranks on each of the first two, and the others are spares.

    Steps take their time until `end`, so that some are left when a host is lost, and when it is back.

    `around`: what the environment has besides, by host.
    """
    nodes = len(hosts.hosts)
    words = ["run", "--job", name, "--nnodes", str(nodes), "--nproc-per-node", "2"]
    words += ["--spares", str(nodes - 2)] if nodes > 2 else []
    words += ["--node-lease", lease]
    words += ["--rdzv-endpoint", f"{hosts.address(0)}:29400", *(("--replicas", "4:4") if elastic else ())]
    flags = ["--steps", str(steps), "--pace", str(pace), "--say-steps", "--out", str(here.folder / f"{name}.out")]
    (here.folder / "hurry").unlink(missing_ok=True)
    with ExitStack() as stack:
        launchers = []
        for host in hosts.hosts:
            mine = [*words, "--node-rank", str(host), "--bind", hosts.address(host)]
            more = {"REGROW_TOKEN": "all of them know", NETWORK: hosts.name(host), **(around or {}).get(host, {})}
            launchers.append(stack.enter_context(here.start(*mine, script, *flags, **more)))
        yield launchers


def test_hosts_train_as_one_machine_would(here: Site, hosts: Network, undisturbed: Outcome) -> None:
    with job_of(here, hosts, "calm") as launchers:
        outcome = end(here, "calm", launchers[0])
        assert [launcher.wait() for launcher in launchers[1:]] == [0, 0]
    assert_equal(outcome, undisturbed, lost=set())
    assert nodes_of(here, "calm") == [["node0", "node0", "node1", "node1"]]


@pytest.mark.parametrize("how", ["killed", "without power"])
def test_a_spare_takes_the_ranks_of_a_host_that_dies(
    here: Site, hosts: Network, undisturbed: Outcome, how: str
) -> None:
    name = how.replace(" ", "-")
    with job_of(here, hosts, name) as launchers:
        launchers[0].wait_for("step 20\n")
        if how == "without power":
            hosts.cut(1)  # its kernel says no goodbye
        hosts.kill(1)
        launchers[0].wait_for("goes on after")
        outcome = end(here, name, launchers[0])
        assert launchers[2].wait() == 0, launchers[2].output
    hosts.join(1)
    for left in (*here.runtime.iterdir(), *here.caches()):
        shutil.rmtree(left)  # sockets and memory of a host that has lost all its processes
    assert_equal(outcome, undisturbed, lost={2, 3})
    assert nodes_of(here, name)[-1] == ["node0", "node0", "node2", "node2"]


WAYS = {"both ways": [], "what it sends": [(1, 0), (1, 2)], "what it is sent": [(0, 1), (2, 1)]}


@pytest.mark.parametrize("lost", WAYS)
def test_a_host_that_is_cut_off_commits_nothing_and_is_the_spare_when_its_link_is_back(
    here: Site, hosts: Network, long_undisturbed: Outcome, lost: str
) -> None:
    name = lost.replace(" ", "-")
    with job_of(here, hosts, name, LONG) as launchers:
        launchers[0].wait_for("step 20\n")
        if lost == "both ways":
            hosts.cut(1)
        for way in WAYS[lost]:
            hosts.lose(*way)
        launchers[0].wait_for("goes on after")
        for way in WAYS[lost]:
            hosts.find(*way)
        hosts.join(1)
        launchers[0].wait_for("node1 is back")
        outcome = end(here, name, launchers[0])
        assert [launcher.wait() for launcher in launchers[1:]] == [0, 0], launchers[1].output
    assert_equal(outcome, long_undisturbed, lost={2, 3})
    assert nodes_of(here, name)[-1] == ["node0", "node0", "node2", "node2"]
    (incident,) = outcome.ledger.incidents
    assert (incident.kind, incident.rung, incident.steps_lost) == ("node", "node", 0)


@pytest.mark.full
def test_a_host_whose_link_is_cut_for_some_leases_is_back_as_soon_as_it_is_whole(
    here: Site, long_undisturbed: Outcome
) -> None:
    """Its agent hears at once that it was given up, and asks for another coordinator, which there never is."""
    with network(HOSTS, far=True) as hosts, job_of(here, hosts, "some-leases", LONG, lease="1s") as launchers:
        launchers[0].wait_for("step 20\n")
        for way in WAYS["what it sends"]:
            hosts.lose(*way)
        launchers[0].wait_for("goes on after")
        time.sleep(4.0)
        for way in WAYS["what it sends"]:
            hosts.find(*way)
        whole = time.monotonic()
        launchers[0].wait_for("node1 is back")
        assert time.monotonic() - whole < 60.0, "it takes 2 s; it was 120"
        outcome = end(here, "some-leases", launchers[0])
        assert [launcher.wait() for launcher in launchers[1:]] == [0, 0], launchers[1].output
    assert_equal(outcome, long_undisturbed, lost={2, 3})


@pytest.mark.full
@pytest.mark.parametrize("far", [{"delay": 0.1}, {"loss": 0.05}], ids=["200 ms there and back", "5 % of frames lost"])
def test_slow_and_lossy_links_are_no_fault_and_a_rank_that_dies_there_is_replaced(
    here: Site, far: dict[str, float]
) -> None:
    name, steps = "-".join(far), 12
    calm = alone(here, steps)
    with network(2, far=True) as hosts, job_of(here, hosts, name, steps, pace=0.2) as launchers:
        hosts.weather(**far)
        launchers[0].wait_for("step 4\n")
        os.kill(pid_of(here, name, Rank(3)), signal.SIGKILL)
        launchers[0].wait_for("goes on after")
        outcome = end(here, name, launchers[0])
        assert launchers[1].wait() == 0, launchers[1].output
    assert_equal(outcome, calm, lost=set())
    assert [(incident.kind, incident.ranks) for incident in outcome.ledger.incidents] == [("exit", [3])]
    assert outcome.ledger.steps_lost == 0


def test_what_a_killed_test_has_left_is_removed_with_the_next_network(hosts: Network) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(10)
    left = f"rg{gone.pid}-0-0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with subprocess.Popen(["ip", "netns", "exec", left, "sleep", "600"]) as inside:
        try:
            until(lambda: Path(f"/proc/{inside.pid}/cmdline").read_bytes().startswith(b"sleep"))
            with network(1):
                assert inside.wait(10) == -signal.SIGKILL
        finally:
            inside.kill()
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert left not in listed
    assert hosts.switch in listed, "what belongs to a test that runs stays"


def pid_of(here: Site, name: str, rank: Rank) -> int:
    """Of the worker that has committed a step as this rank; its node may tell of it a little later."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        lines = read_records(here.home / "jobs" / name)
        pids = {line.worker: line.pid for line in lines if isinstance(line, WorkerForked)}
        for line in lines:
            if isinstance(line, StepCommitted) and line.rank == rank and line.worker in pids:
                return pids[line.worker]
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} has committed nothing")
