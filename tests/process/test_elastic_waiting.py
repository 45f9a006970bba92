"""Below the minimum a job waits with its state in memory; it goes on when there is room, or is saved and ends."""

import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.ports import held_port
from tests.process.elastic import Elastic, assert_same, changes, final, fixed_run, losses
from tests.process.launching import Running, Site
from tests.process.training import SCRIPTS

from regrow.observe.ledger import Ledger, read_records

STEPS = 100
SCRIPT = (str(SCRIPTS / "train_micro.py"), "--steps", str(STEPS), "--invariant", "--out", "job.out")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result of the training in a world of one replica."""
    return fixed_run(tmp_path_factory.mktemp("fixed"), STEPS)


@contextmanager
def two_nodes(here: Site, *flags: str) -> Iterator[tuple[Elastic, Running, str, str]]:
    """A job that needs two replicas, a node each; with it, its second node, its address and its token."""
    address = f"127.0.0.1:{held_port()}"
    token = secrets.token_hex(16)
    words = ("--nnodes", "2:3", "--replicas", "2:3", "--rdzv-endpoint", address, *flags)
    run = ("run", "--job", "job", *words)
    script = (*SCRIPT, "--pace", "0.2")
    with (
        here.start(*run, "--node-rank", "0", *script, REGROW_TOKEN=token) as zero,
        here.start(*run, "--node-rank", "1", *script, REGROW_TOKEN=token) as one,
    ):
        job = Elastic(here, "job", zero)
        job.settled(2)
        yield job, one, address, token


def test_below_the_minimum_the_state_waits_in_memory_until_another_node_comes(
    here: Site, fixed: dict[str, Any]
) -> None:
    with two_nodes(here) as (job, one, address, token):
        one.signal(signal.SIGKILL)
        job.phase("waiting")
        with here.start("agent", "--join", address, REGROW_TOKEN=token) as two:
            job.settled(2)
            ledger = job.finish()
            assert two.wait() == 0, two.output
    assert_same(here, ledger, fixed, ranks=2)
    assert len(ledger.incidents) == 1


def test_below_the_minimum_for_too_long_the_state_is_saved_and_the_job_can_be_run_again(
    here: Site, fixed: dict[str, Any]
) -> None:
    durable = ("--checkpoint-dir", "kept", "--checkpoint-every", "1h")
    with two_nodes(here, "--node-timeout", "2s", *durable) as (job, one, _, _):
        one.signal(signal.SIGKILL)
        job.phase("waiting")
        assert job.job.wait() == 75, job.job.output
    first = losses(job.ledger())
    assert [path.name for path in (here.folder / "kept").iterdir()] == [f"step-{len(first)}"]
    again = here.regrow("run", "--job", "again", "--nproc-per-node", "3", *durable, "--resume", *SCRIPT)
    assert again.returncode == 0, again.stdout + again.stderr
    rest = losses(Ledger(read_records(here.home / "jobs" / "again")))
    assert sorted(first) + sorted(rest) == list(range(STEPS)), "a step was lost or run twice"
    assert first | rest == fixed["losses"]
    assert final(here.folder / "job.2.json") == {"digest": fixed["digest"], "parameters": fixed["parameters"]}


def test_a_lost_node_is_done_without_and_the_next_one_is_grown_onto(here: Site, fixed: dict[str, Any]) -> None:
    with two_nodes(here, "--replicas", "1:2") as (job, one, address, token):
        one.signal(signal.SIGKILL)
        job.settled(1)
        with here.start("agent", "--join", address, REGROW_TOKEN=token) as two:
            job.settled(2)
            ledger = job.finish()
            assert two.wait() == 0, two.output
    assert_same(here, ledger, fixed, ranks=2)
    told = [(each.kind, each.before, each.after) for each in changes(list(read_records(job.folder)))]
    assert told == [("fault", 2, 1), ("grow", 1, 2)]
