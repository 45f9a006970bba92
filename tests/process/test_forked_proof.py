"""Without a standby a newcomer is forked for a proof, in nobody's way, and nothing of it stays."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.process.launching import PATIENCE, Running, Site
from tests.process.training import SCRIPTS

from regrow.core.messages.vocabulary import Role
from regrow.core.records import Noted, Record, ReplacementJudged, StepCommitted, WorkerForked, WorkerGone, WorkerSpawned
from regrow.observe.ledger import Ledger, read_records

JOB = "forked"


def records(here: Site) -> list[Record]:
    folder = here.home / "jobs" / JOB
    return list(read_records(folder)) if (folder / "events.jsonl").exists() else []


def made(here: Site) -> list[str]:
    """Those that were made for a proof."""
    return [each.worker for each in records(here) if isinstance(each, WorkerSpawned) and each.role == Role.PROVER]


def pid_of(here: Site, worker: str) -> int:
    return next(each.pid for each in records(here) if isinstance(each, WorkerForked) and each.worker == worker)


def judged(here: Site) -> list[Record]:
    told = (each for each in records(here) if isinstance(each, ReplacementJudged | Noted))
    return [each for each in told if isinstance(each, ReplacementJudged) or "not proven" in each.text]


def until(running: Running, happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        running.drain()
        assert time.monotonic() < deadline and running.process.poll() is None, running.output
        time.sleep(0.2)


def start(here: Site, *words: str, world: int = 2, **args: str) -> Running:
    own = [word for name, value in args.items() for word in (f"--{name}", value)]
    flags = ["--proof", "fork", "--nproc-per-node", str(world), *words, str(SCRIPTS / "train_shadowed.py"), *own]
    return here.start("run", "--job", JOB, *flags)


def end(here: Site, running: Running) -> Ledger:
    """Let it train to its end, which must be well."""
    (here.folder / "enough").touch()
    assert running.wait() == 0, running.output
    here.assert_nothing_left()
    return Ledger(records(here))


@pytest.mark.parametrize(("world", "words"), [(2, ()), (3, ()), (1, ("--local-nodes", "2"))])
def test_one_is_forked_proves_a_rank_and_is_gone_while_the_job_trains_on(
    here: Site, world: int, words: tuple[str, ...]
) -> None:
    with start(here, *words, world=world) as running:
        until(running, lambda: judged(here))
        (found,) = judged(here)
        (name,) = made(here)
        until(running, lambda: [each for each in records(here) if isinstance(each, WorkerGone)])
        until(running, lambda: not psutil.pid_exists(pid_of(here, name)))
        steps = len([each for each in records(here) if isinstance(each, StepCommitted)])
        until(running, lambda: len([x for x in records(here) if isinstance(x, StepCommitted)]) > steps)
        ledger = end(here, running)
    assert isinstance(found, ReplacementJudged) and found.reason == "", found
    assert found.rank == max(world, 2) - 1 and ledger.incidents == [] and len(made(here)) == 1
    assert not Path(here.folder / "behind").exists(), "what stands behind the body was run in the shadow"


def test_a_tensor_in_an_object_that_nobody_protects_is_found_though_there_is_no_standby(here: Site) -> None:
    with start(here, fault="statistic") as running:
        until(running, lambda: judged(here))
        (found,) = judged(here)
        ledger = end(here, running)
    assert isinstance(found, ReplacementJudged) and "`augment.mean`" in found.reason, found
    assert ledger.incidents == []


def test_a_rank_that_dies_while_one_is_made_is_mended_as_ever_and_the_other_is_ended(here: Site) -> None:
    with start(here, made="waits") as running:
        until(running, (here.folder / "building").exists)
        (name,) = made(here)
        lost = next(x.worker for x in records(here) if isinstance(x, WorkerSpawned) and x.rank == 1)
        os.kill(pid_of(here, lost), signal.SIGKILL)
        until(running, lambda: Ledger(records(here)).incidents)
        until(running, lambda: not psutil.pid_exists(pid_of(here, name)))
        ledger = end(here, running)
    (incident,) = ledger.incidents
    assert list(incident.ranks) == [1] and incident.rung == "fork", incident


def test_a_job_that_ends_while_one_is_made_ends_at_once(here: Site) -> None:
    with start(here, made="waits") as running:
        until(running, (here.folder / "building").exists)
        since = time.monotonic()
        ledger = end(here, running)
        assert time.monotonic() - since < PATIENCE / 4
    assert ledger.incidents == [] and judged(here) == []


def test_a_script_that_fails_in_one_is_told_of_and_fails_nothing(here: Site) -> None:
    with start(here, made="raises") as running:
        until(running, lambda: judged(here))
        (found,) = judged(here)
        told = here.regrow("status", JOB).stdout
        ledger = end(here, running)
    assert isinstance(found, Noted) and "OSError: the port is taken" in found.text, found
    assert "replaceable: not proven, because a newcomer's script fails before its first step" in told, told
    assert ledger.incidents == [] and len(made(here)) == 1


def test_of_a_rank_alone_none_is_made(here: Site) -> None:
    def told() -> bool:
        return "rank 0 has what no other rank has" in here.regrow("status", JOB).stdout

    with start(here, world=1) as running:
        until(running, lambda: [each for each in records(here) if isinstance(each, StepCommitted)])
        until(running, told)
        end(here, running)
    assert made(here) == []
