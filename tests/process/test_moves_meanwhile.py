"""Moves while something else happens to the job: scales, drains, other moves; moves of sharded and of resumed jobs."""

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.process.batch import until
from tests.process.elastic import Elastic, assert_same, fixed_run
from tests.process.launching import Site, site, still_running
from tests.process.test_moves import MOVED, STEPS, move, planned, start
from tests.process.test_nodes import TRAINING, WORLD, agents_of, assert_equal, end
from tests.process.test_spares import SPARED, nodes_of
from tests.process.training import SCRIPTS, Outcome, redone, train

MICRO_STEPS = 160
GATED = """
import os, runpy, sys, time
from pathlib import Path
def first():
    for number in range({world}):
        try:
            os.close(os.open(f"gate.{name}.{{number}}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return True
    return False
while not first() and Path("held").exists():
    time.sleep(0.01)
sys.path.insert(0, {folder!r})
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""
"""A training whose workers, all but the first, do not begin while there is a file `held`."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("meanwhile")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    outcome = train(here, "undisturbed", world=WORLD, steps=STEPS)
    assert outcome.code == 0, outcome.output
    return outcome


def gated(here: Site, name: str, script: str = TRAINING) -> str:
    """The training, whose newcomers wait for `released`."""
    (here.folder / "held").touch()
    text = GATED.format(world=WORLD, name=name, folder=str(SCRIPTS), script=script)
    return here.script(text, f"{name}.py")


def released(here: Site) -> None:
    (here.folder / "held").unlink()


@pytest.mark.full
def test_a_rank_of_a_sharded_job_and_then_a_node_move(here: Site) -> None:
    words = ("--mode", "hsdp", "--steps", "90", "--pace", "0.5", "--say-steps")
    calm = train(here, "calm-hsdp", world=WORLD, steps=90, script="train_parallel.py", extra=words[:2])
    (here.folder / "hurry").unlink(missing_ok=True)
    run = ("run", "--job", "hsdp", *SPARED, "--replica-ranks", "2", str(SCRIPTS / "train_parallel.py"))
    with here.start(*run, *words, "--out", str(here.folder / "hsdp.out")) as job:
        agents_of(here, "hsdp", job)
        move(here, "hsdp", "3", "--to", "node2")
        job.wait_for(MOVED)
        move(here, "hsdp", "node0")
        job.wait_for(MOVED, times=2)
        outcome = planned(here, "hsdp", job)
    for final in outcome.finals.values():
        final.pop("losses")
    assert_equal(outcome, calm, lost={0, 1, 2, 3})
    assert nodes_of(here, "hsdp")[1:] == [["node0", "node0", "node1", "node2"], ["node2", "node1", "node1", "node2"]]


@pytest.mark.full
def test_ranks_of_a_resumed_job_move(here: Site, undisturbed: Outcome) -> None:
    durable = ("--checkpoint-dir", str(here.folder / "kept"), "--checkpoint-every", "1h")
    with start(here, "before", *SPARED, *durable) as job:
        job.wait_for("step 10\n")
        assert here.regrow("stop", "before").returncode == 0
        assert job.wait() == 75
    with start(here, "resumed", *SPARED, *durable, "--resume=must") as job:
        job.wait_for("step 20\n")
        move(here, "resumed", "node1")
        job.wait_for(MOVED)
        move(here, "resumed", "1", "--to", "node1")
        job.wait_for(MOVED, times=2)
        outcome = planned(here, "resumed", job)
    assert outcome.code == 0 and outcome.finals == undisturbed.finals
    assert {at: loss for at, loss in outcome.losses.items() if undisturbed.losses[at] != loss} == {}
    assert redone(outcome.ledger) == []


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Result of the training in micro-batches in a world of one replica."""
    return fixed_run(tmp_path_factory.mktemp("fixed"), MICRO_STEPS)


@pytest.mark.full
@pytest.mark.parametrize("first", ["move", "scale"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_move_and_a_change_of_size_follow_one_another(
    here: Site, fixed: dict[str, object], first: str, size: int
) -> None:
    name = f"{first}-{size}"
    script = gated(here, name, str(SCRIPTS / "train_micro.py"))
    words = ("--steps", str(MICRO_STEPS), "--invariant", "--pace", "0.15", "--out", "job.out")
    (here.folder / "hurry").unlink(missing_ok=True)
    with here.start("run", "--job", name, *SPARED, "--replicas", "2:4", script, *words) as running:
        job = Elastic(here, name, running)
        job.settled(4)
        if size == 4:
            job.reach(2)
        asks: list[Callable[[], object]] = [lambda: move(here, name, "node0"), lambda: job.scale(size)]
        for ask in asks if first == "move" else asks[::-1]:
            ask()
        released(here)
        running.wait_for(MOVED)
        job.settled(size)
        ledger = job.finish()
    assert_same(here, ledger, fixed, ranks=size)
    assert [each.faults for each in ledger.incidents] == [0] * len(ledger.incidents)
    here.assert_nothing_left()


@pytest.mark.full
@pytest.mark.parametrize(
    ("drained", "said", "after"),
    [
        ("node1", "given back: regrow drain); pause", ["node0", "node0", "node2", "node2"]),
        ("node2", "the ranks of node1 are not moved", ["node0", "node0", "node1", "node1"]),
        ("node0", "given back: regrow drain); pause", ["node2", "node2", "node1", "node1"]),
    ],
    ids=["its source", "its target", "another"],
)
def test_a_node_is_given_back_during_a_move(
    here: Site, undisturbed: Outcome, drained: str, said: str, after: list[str]
) -> None:
    name = f"drained-{drained}"
    with start(here, name, *SPARED, script=gated(here, name)) as job:
        agents_of(here, name, job)
        move(here, name, "node1")
        given = here.regrow("drain", name, drained, "--grace", "10min")
        assert given.returncode == 0, given.stderr
        refused = here.regrow("move", name, drained)
        # The spare node has no rank, so it may have gone by now.
        reasons = [f"{drained} is given back already", *([f"no node {drained}"] if drained == "node2" else [])]
        assert refused.returncode == 1 and any(reason in refused.stderr for reason in reasons), refused.stderr
        released(here)
        job.wait_for(said)
        outcome = end(here, name, job)
    assert_equal(outcome, undisturbed, lost={0, 1, 2, 3})
    assert [(each.faults, each.steps_lost) for each in outcome.ledger.incidents] in ([], [(0, 0)])
    assert nodes_of(here, name)[-1] == after
    here.assert_nothing_left()


@pytest.mark.full
def test_two_moves_of_a_rank_at_once_are_one(here: Site, undisturbed: Outcome) -> None:
    with start(here, "twice", *SPARED, script=gated(here, "twice")) as job, ThreadPoolExecutor(3) as pool:
        agents_of(here, "twice", job)
        asked = [pool.submit(here.regrow, "move", "twice", "3") for _ in range(3)]
        answers = [each.result() for each in asked]
        assert [answer.returncode for answer in answers] == [0, 0, 0], [answer.stderr for answer in answers]
        assert sum("are on their way already" in answer.stdout for answer in answers) == 2
        released(here)
        job.wait_for(MOVED)
        outcome = planned(here, "twice", job)
    assert_equal(outcome, undisturbed, lost={0, 1, 2, 3})
    assert nodes_of(here, "twice")[1:] == [["node0", "node0", "node1", "node2"]]


@pytest.mark.full
def test_a_rolling_restart_that_was_ended_is_gone_on_with_and_its_command_has_ended(
    here: Site, undisturbed: Outcome
) -> None:
    began = here.folder / "began"
    waits = f"sleep 600 & echo $! > {began}; wait"
    with start(here, "ended", *SPARED) as job:
        agents = agents_of(here, "ended", job)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
            with here.start("rolling-restart", "ended", "--node", "node1", "--run", waits) as client:
                until(lambda: began.exists() and began.read_text().endswith("\n"))
                client.signal(number)
                code = client.wait()
            assert code == (75 if number == signal.SIGINT else -number), client.output
            assert still_running([int(began.read_text())], seconds=15.0) == []
            began.unlink()
        kill = shlex.join([sys.executable, "-c", f"import os; os.kill({agents['node1']}, {int(signal.SIGKILL)})"])
        done = here.regrow("rolling-restart", "ended", "--node", "node1", "--run", kill)
        assert done.returncode == 0, done.stdout + done.stderr
        outcome = end(here, "ended", job)
    assert outcome.output.count(MOVED) == 1
    assert_equal(outcome, undisturbed, lost={2, 3})
    assert nodes_of(here, "ended")[-1] == ["node0", "node0", "node2", "node2"]
    here.assert_nothing_left()
