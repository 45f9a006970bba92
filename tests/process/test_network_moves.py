"""Links that are cut in the middle of a move, on several hosts."""

from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.network import Network, network
from tests.process.test_moves_meanwhile import gated, released
from tests.process.test_network import HOSTS, LONG, alone, job_of
from tests.process.test_nodes import assert_equal, end
from tests.process.test_spares import nodes_of
from tests.process.training import Outcome
from tests.process.warm import NETWORK


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("network-moves")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(here: Site, hosts: Network) -> Outcome:
    return alone(here, LONG)


@pytest.mark.parametrize(
    ("moves", "cut", "said"),
    [
        ("node1", [1], "goes on after"),
        ("node1", [2], "are not moved"),
        ("node0", [(1, 2), (2, 1)], "goes on after"),
        ("node0", [(2, 1)], "goes on after"),
    ],
)
def test_cut(here: Site, hosts: Network, undisturbed: Outcome, moves: str, cut: list[object], said: str) -> None:
    name = f"cut-{moves}-{cut}".translate(str.maketrans("[](), ", "------"))
    with job_of(here, hosts, name, LONG, script=gated(here, name)) as launchers:
        launchers[0].wait_for("step 20\n")
        asked = here.regrow("move", name, moves, **{NETWORK: hosts.name(0)})
        assert asked.returncode == 0, asked.stderr
        for way in cut:
            hosts.lose(*way) if isinstance(way, tuple) else hosts.cut(way)
        if isinstance(cut[0], tuple):
            released(here)
        else:
            if "not" in said: launchers[0].wait_for(said)
            released(here)
        import time
        t = time.monotonic()
        try:
            launchers[0].wait_for(said)
        finally:
            print("waited", time.monotonic() - t)
            print(launchers[0].output[-3000:])
        for way in cut:
            hosts.find(*way) if isinstance(way, tuple) else hosts.join(way)
        if not isinstance(cut[0], tuple):
            launchers[0].wait_for("is back")
        outcome = end(here, name, launchers[0])
        print([launcher.wait() for launcher in launchers[1:]])
    print(outcome.output[-3000:])
    print([(i.kind, i.rung, i.faults, i.steps_lost, i.ranks, i.cause) for i in outcome.ledger.incidents])
    print(nodes_of(here, name))
    assert_equal(outcome, undisturbed, lost={0, 1, 2, 3})
