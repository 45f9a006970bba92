"""The coordinator is lost: another launcher is elected, and training ends bitwise equal to the run nobody disturbed."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.process.launching import PATIENCE, Running, Site, named, site
from tests.process.network import Network, network
from tests.process.test_network import LONG, alone, job_of
from tests.process.test_nodes import assert_equal, end
from tests.process.test_spares import nodes_of
from tests.process.training import SCRIPTS, Outcome
from tests.process.warm import NETWORK
from tests.unit.core.tls_files import Authority, encrypt

from regrow.observe.ledger import Ledger, read_records

HOSTS = 5
LEASE_S = 10.0


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("succession")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network(3) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(here: Site, hosts: Network) -> Outcome:
    return alone(here, LONG)


def forget_lost_hosts(here: Site) -> None:
    """Sockets and memory of hosts that have lost all their processes."""
    for left in (*here.runtime.iterdir(), *here.caches()):
        shutil.rmtree(left)


def the_host_dies(hosts: Network, _: Running) -> None:
    hosts.kill(0)


def the_host_is_without_power(hosts: Network, _: Running) -> None:
    hosts.cut(0)
    hosts.kill(0)


def the_launcher_is_killed(_: Network, launcher: Running) -> None:
    launcher.signal(signal.SIGKILL)


@pytest.mark.parametrize("happens", [the_host_dies, the_host_is_without_power, the_launcher_is_killed])
def test_training_goes_on_without_the_node_that_hosted_the_coordinator(
    here: Site,
    hosts: Network,
    undisturbed: Outcome,
    happens: Callable[[Network, Running], None],
    record_property: Callable[[str, float], None],
) -> None:
    name = happens.__name__.replace("_", "-")
    with job_of(here, hosts, name, LONG) as launchers:
        launchers[0].wait_for("step 20\n")
        happens(hosts, launchers[0])
        next_coordinator(launchers[1:]).wait_for("goes on after")
        outcome = end(here, name, launchers[1])
        assert launchers[2].wait() == 0, launchers[2].output
    hosts.join(0)
    forget_lost_hosts(here)
    assert_equal(outcome, undisturbed, lost={0, 1})
    assert nodes_of(here, name)[-1] == ["node2", "node2", "node1", "node1"]
    (incident,) = outcome.ledger.incidents
    assert (incident.kind, incident.cause) == ("node", "node0, which hosted the coordinator, was lost")
    record_property("seconds until every rank had committed again", round(incident.total, 2))
    assert incident.total < 2 * LEASE_S


def test_coordinators_are_lost_one_after_the_other(here: Site, undisturbed: Outcome) -> None:
    with network(HOSTS) as hosts, job_of(here, hosts, "turns", LONG) as launchers:
        left = dict(enumerate(launchers))
        launchers[0].wait_for("step 20\n")
        lost = 0
        for turn in (1, 2):
            hosts.kill(lost)
            del left[lost]
            said = f"follows the job's coordinator to http://{hosts.address(0)[:-1]}"
            for launcher in left.values():
                launcher.wait_for(said, times=turn)
            (lost,) = [at for at, launcher in left.items() if f"node{at} was elected in its place" in launcher.output]
            left[lost].wait_for("goes on after")
        outcomes = [end(here, "turns", launcher) for launcher in left.values()]
    forget_lost_hosts(here)
    assert [outcome.code for outcome in outcomes] == [0] * len(left), [outcome.output for outcome in outcomes]
    assert outcomes[0].finals == undisturbed.finals
    assert outcomes[0].ledger.steps_lost == 0


def test_the_node_of_a_coordinator_is_given_back(here: Site, undisturbed: Outcome) -> None:
    """The second one: it leaves as any node does, and those that stay elect a third."""
    with network(HOSTS) as hosts, job_of(here, hosts, "given-back", LONG, elastic=True) as launchers:
        launchers[0].wait_for("step 20\n")
        hosts.kill(0)
        second = next_coordinator(launchers[1:])
        second.wait_for("goes on after")
        second.signal(signal.SIGTERM)
        left = [launcher for launcher in launchers[1:] if launcher is not second]
        third = next_coordinator(left)
        assert second.wait() == 0, second.output
        outcomes = [end(here, "given-back", launcher) for launcher in left]
        assert third.output.count("was elected in its place (term") == 1
    forget_lost_hosts(here)
    assert [outcome.code for outcome in outcomes] == [0] * len(left), [outcome.output for outcome in outcomes]
    assert outcomes[0].finals == undisturbed.finals
    assert outcomes[0].ledger.steps_lost == 0


@pytest.mark.parametrize("encrypted", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_coordinator_that_is_only_paused_keeps_its_office_while_nobody_needs_it(
    here: Site,
    hosts: Network,
    undisturbed: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    encrypted: bool,
) -> None:
    """Its machine takes calls; with TLS none of them comes about, and yet it is not away."""
    if encrypted:
        encrypt(monkeypatch, *Authority(tmp_path).issue("one.example"))
    name = "paused-tls" if encrypted else "paused"
    with job_of(here, hosts, name, LONG) as launchers:
        launchers[0].wait_for("step 20\n")
        launchers[0].signal(signal.SIGSTOP)
        time.sleep(1.3 * LEASE_S)
        launchers[0].signal(signal.SIGCONT)
        outcome = end(here, name, launchers[0])
        assert [launcher.wait() for launcher in launchers[1:]] == [0, 0]
        assert not any("elected" in launcher.output for launcher in launchers)
    assert_equal(outcome, undisturbed, lost=set())
    assert outcome.ledger.incidents == []


def test_a_coordinator_that_was_paused_at_a_fault_finds_another_in_its_place_and_comes_back_as_a_node(
    here: Site, hosts: Network, undisturbed: Outcome
) -> None:
    with job_of(here, hosts, "deposed", LONG) as launchers:
        launchers[0].wait_for("step 20\n")
        launchers[0].signal(signal.SIGSTOP)
        victim = worker_of(hosts, 1)
        os.kill(victim, signal.SIGKILL)
        elected = next_coordinator(launchers[1:])
        launchers[0].signal(signal.SIGCONT)  # the others may just be turning to the one that was elected
        elected.wait_for("goes on after")
        elected.wait_for("node0 is back")
        launchers[0].wait_for("another coordinator was elected meanwhile (term 2, at http://10.78.0.")
        assert here.regrow("status", "deposed", **{NETWORK: hosts.name(1)}).returncode == 0, "both write there"
        outcomes = [end(here, "deposed", launcher) for launcher in launchers]
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], [outcome.output for outcome in outcomes]
    assert outcomes[0].finals == undisturbed.finals
    assert outcomes[0].ledger.steps_lost == 0


def worker_of(hosts: Network, host: int) -> int:
    """The process of a rank on a host."""
    return next(pid for pid in hosts.processes(host) if named(pid) == "regrow-worker")


def next_coordinator(launchers: list[Running]) -> Running:
    """The launcher that is elected."""
    until = time.monotonic() + 4 * LEASE_S
    while time.monotonic() < until:
        for launcher in launchers:
            launcher.drain()
            if "was elected in its place" in launcher.output:
                return launcher
        time.sleep(0.05)
    raise AssertionError("nobody was elected: " + "\n".join(launcher.output for launcher in launchers))


@pytest.mark.full
@pytest.mark.parametrize("happens", [the_host_dies, the_host_is_without_power])
def test_of_two_nodes_and_a_witness_the_one_that_is_left_goes_on(
    here: Site, happens: Callable[[Network, Running], None]
) -> None:
    name, disk = f"witnessed-{happens.__name__.replace('_', '-')}", here.folder / "shared"
    (here.folder / "hurry").unlink(missing_ok=True)
    words = ["run", "--job", name, "--nnodes", "2", "--nproc-per-node", "2", "--replicas", "2:4"]
    words += ["--witness", str(disk), *("--rdzv-endpoint", "10.78.0.10:29400")]
    script = [str(SCRIPTS / "train_micro.py"), "--steps", "60", "--invariant", "--pace", "0.2"]
    with ExitStack() as stack:
        hosts = stack.enter_context(network(2))
        launchers = []
        for host in hosts.hosts:
            mine = [*words, "--node-rank", str(host), "--bind", hosts.address(host), *script]
            around = {"REGROW_TOKEN": "all of them know", NETWORK: hosts.name(host)}
            launchers.append(stack.enter_context(here.start(*mine, **around)))
        until = time.monotonic() + PATIENCE
        while max(Ledger(read_records(here.home / "jobs" / name)).commits, default=0) < 20:  # all know of each other
            assert time.monotonic() < until
            time.sleep(0.1)
        happens(hosts, launchers[0])
        launchers[1].wait_for("node1 was elected in its place (term 2)")
        launchers[1].wait_for("goes on after")
        (here.folder / "hurry").touch()
        assert launchers[1].wait() == 0, launchers[1].output
    forget_lost_hosts(here)
    ledger = Ledger(read_records(here.home / "jobs" / name))
    assert [incident.steps_lost for incident in ledger.incidents] == [0]
    assert max(ledger.commits) == 59
    assert list(disk.iterdir()) == [], "who ends the job takes its folder away"
