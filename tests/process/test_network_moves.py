"""Links of hosts that are cut while newcomers of a move build there: the job goes on, with the same bits."""

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


@pytest.mark.full
@pytest.mark.parametrize(
    ("cut", "said", "faults", "after"),
    [
        (1, "goes on after", [1], ["node0", "node0", "node2", "node2"]),
        (2, "the ranks of node1 are not moved", [], ["node0", "node0", "node1", "node1"]),
    ],
    ids=["its source", "its target"],
)
def test_a_host_is_cut_off_during_a_move(
    here: Site, hosts: Network, undisturbed: Outcome, cut: int, said: str, faults: list[int], after: list[str]
) -> None:
    name = f"cut-{cut}"
    with job_of(here, hosts, name, LONG, script=gated(here, name)) as launchers:
        launchers[0].wait_for("step 20\n")
        asked = here.regrow("move", name, "node1", **{NETWORK: hosts.name(0)})
        assert asked.returncode == 0, asked.stderr
        hosts.cut(cut)
        if not faults:
            launchers[0].wait_for(said)  # else its newcomers end as its agent does, before that agent is given up
        released(here)
        launchers[0].wait_for(said)
        hosts.join(cut)
        launchers[0].wait_for(f"node{cut} is back")
        outcome = end(here, name, launchers[0])
        assert [launcher.wait() for launcher in launchers[1:]] == [0, 0], launchers[cut].output
    assert_equal(outcome, undisturbed, lost={2, 3})
    assert [incident.faults for incident in outcome.ledger.incidents] == faults
    assert nodes_of(here, name)[-1] == after
