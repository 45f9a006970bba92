"""A job whose hosts encrypt what they say: somebody taps the network between them."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.process.launching import Site, site
from tests.process.network import Network, network
from tests.process.test_network import HOSTS, STEPS, job_of
from tests.process.test_nodes import WORLD, assert_equal, end
from tests.process.test_spares import nodes_of
from tests.process.training import Outcome, train
from tests.unit.core.tls_files import Authority

TOKEN = "all of them know"


class Heard(msgspec.Struct, frozen=True):
    """Report of `eavesdropper.py`."""

    ways: int
    clear: list[tuple[str, int, str, int]]
    seen: list[str]
    bytes: int


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("tls")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network(HOSTS) as made:
        yield made


@contextmanager
def tapped(hosts: Network, into: list[Heard]) -> Iterator[None]:
    script = Path(__file__).with_name("eavesdropper.py")
    words = ["ip", "netns", "exec", hosts.switch, sys.executable, str(script), TOKEN, "HTTP/1.1", "Bearer"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ear:
        assert ear.stdout is not None
        assert ear.stdout.readline() == "ready\n"
        yield
        told, _ = ear.communicate(timeout=60)
        into.append(msgspec.convert(json.loads(told), Heard))


def own_certificates(authority: Authority, hosts: Network) -> dict[int, dict[str, str]]:
    """Each host has its own, for its own address."""
    made = {}
    for host in hosts.hosts:
        cert, key = authority.issue(hosts.address(host), called=f"host{host}")
        made[host] = {"REGROW_TLS_CERT": cert, "REGROW_TLS_KEY": key, "REGROW_TLS_CA": str(authority.file)}
    return made


def test_a_host_dies_a_spare_takes_over_and_nothing_is_said_in_clear(
    here: Site, hosts: Network, tmp_path: Path
) -> None:
    calm = train(here, "undisturbed", world=WORLD, steps=STEPS)
    assert calm.code == 0, calm.output
    heard: list[Heard] = []
    tls = own_certificates(Authority(tmp_path), hosts)
    with tapped(hosts, heard), job_of(here, hosts, "secret", around=tls) as launchers:
        launchers[0].wait_for("step 20\n")
        hosts.kill(1)
        launchers[0].wait_for("goes on after")
        outcome: Outcome = end(here, "secret", launchers[0])
        assert launchers[2].wait() == 0, launchers[2].output
    here.sweep()
    assert_equal(outcome, calm, lost={2, 3})
    assert nodes_of(here, "secret")[-1] == ["node0", "node0", "node2", "node2"]
    assert "in clear" not in launchers[0].output
    (said,) = heard
    assert said.ways > 20 and said.bytes > 100_000, said
    assert (said.clear, said.seen) == ([], []), said


@pytest.mark.full
def test_the_same_tap_hears_all_of_a_job_without_tls_which_says_so(here: Site, hosts: Network) -> None:
    heard: list[Heard] = []
    with tapped(hosts, heard), job_of(here, hosts, "open", 5) as launchers:
        assert [launcher.wait() for launcher in launchers] == [0, 0, 0], launchers[0].output
    assert "token and its state cross the network in clear: give --tls-cert and --tls-key" in launchers[0].output
    (said,) = heard
    assert said.seen == ["Bearer", "HTTP/1.1", TOKEN]
    assert len(said.clear) == said.ways > 20


def test_a_host_with_another_certificate_is_told_why_it_may_not_join(
    here: Site, hosts: Network, tmp_path: Path
) -> None:
    tls = own_certificates(Authority(tmp_path), hosts)
    tls[1] = own_certificates(Authority(tmp_path, "strange"), hosts)[1]
    del tls[2]
    with job_of(here, hosts, "mixed", 5, around=tls) as launchers:
        assert launchers[1].wait() == 2
        launchers[2].wait_for("closes the connection without an answer: perhaps a job with TLS")
        for launcher in (launchers[2], launchers[0]):
            launcher.signal(signal.SIGTERM)
            launcher.wait()
    assert "there is no TLS connection to https://10.78.0.10:29400" in launchers[1].output
    assert "--tls-cert" in launchers[1].output and "--tls-cert" in launchers[2].output
