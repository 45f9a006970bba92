"""A newcomer's shadow of a rank that has a part of the state, in each kind of parallelism, and in micro-batches."""

import time

import pytest
from tests.process.elastic import Elastic
from tests.process.launching import PATIENCE, Site
from tests.process.shadows import assert_proven, judgements, proven
from tests.process.training import SCRIPTS

from regrow.core.records import ReplacementJudged
from regrow.observe.ledger import Ledger, read_records

ENDLESS = "100000"
MODES = {"tp_fsdp": ("--mode", "tp_dp", "--tp-fsdp")}


@pytest.mark.parametrize(("mode", "holdings"), [("ddp", 1), ("fsdp2", 4), ("hsdp", 2), ("tp_dp", 2), ("tp_fsdp", 4)])
def test_a_standby_for_each_part_is_proven(here: Site, mode: str, holdings: int) -> None:
    words = ["run", "--job", mode, "--nproc-per-node", "4", "--standby", "4"]
    script = [
        str(SCRIPTS / "train_parallel.py"),
        *MODES.get(mode, ("--mode", mode)),
        "--steps",
        ENDLESS,
        "--pace",
        "0.02",
        "--asks-late",
    ]
    with here.start(*words, *script) as running:
        found = proven(here, mode, running, holdings)
        running.signal(15)
        running.wait()
    assert_proven(found)
    assert Ledger(read_records(here.home / "jobs" / mode)).incidents == []


@pytest.mark.parametrize("mode", ["ddp", "hsdp"])
@pytest.mark.parametrize("how", ["", "--invariant", "--tokens"])
def test_micro_batches_are_proven(here: Site, mode: str, how: str) -> None:
    world, name = (4 if mode == "hsdp" else 2), f"{mode}{how}"
    words = ["run", "--job", name, "--nproc-per-node", str(world), "--standby", str(world)]
    script = [str(SCRIPTS / "train_micro.py"), "--mode", mode, "--steps", ENDLESS, "--pace", "0.02"]
    with here.start(*words, *script, *([how] if how else [])) as running:
        found = proven(here, name, running, 2 if mode == "hsdp" else 1)
        running.signal(15)
        running.wait()
    assert_proven(found)


def test_a_count_of_micro_batches_is_found_and_named(here: Site) -> None:
    words = ["run", "--job", "counts", "--nproc-per-node", "2", "--standby", "1"]
    script = [str(SCRIPTS / "train_micro.py"), "--steps", ENDLESS, "--pace", "0.02", "--counts"]
    with here.start(*words, *script) as running:
        (found,) = proven(here, "counts", running, 1)
        running.signal(15)
        running.wait()
    assert isinstance(found, ReplacementJudged) and "`count.seen`" in found.reason, found


def test_a_standby_of_a_larger_world_is_proven_in_a_smaller_one(here: Site) -> None:
    words = ["run", "--job", "shrunk", "--nproc-per-node", "3", "--replicas", "1:3", "--standby", "1"]
    script = [str(SCRIPTS / "train_micro.py"), "--steps", ENDLESS, "--pace", "0.02"]
    with here.start(*words, *script) as running:
        job = Elastic(here, "shrunk", running)
        job.settled(3)
        before = proven(here, "shrunk", running, 1)
        job.reach(2)
        until = time.monotonic() + PATIENCE
        while len(judgements(here, "shrunk")) == len(before) and time.monotonic() < until:
            running.drain()
            time.sleep(0.05)
        assert len(judgements(here, "shrunk")) > len(before), running.output
        running.signal(15)
        running.wait()
    assert_proven(judgements(here, "shrunk"))
