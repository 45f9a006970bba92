"""Jobs that grow, are resumed, or do on their accelerator what scripts do there: they end with the processor's bits.

How late each launch comes, and how many a stream holds, is drawn for each case from its name.
"""

import os
import random
import signal

import pytest
from tests.process.elastic import Elastic, assert_same, fixed_run, small
from tests.process.launching import PATIENCE, Site
from tests.process.training import SCRIPTS, Fault, Outcome, assert_equal, outcome_of, train

from regrow.core.records import CheckpointSaved, WorkerForked
from regrow.observe.ledger import read_records

WORLD, STEPS = 2, 16
ELASTIC_STEPS = 160
STAGES = ("forward", "backward", "reduce", "update")
FAULTS = [Fault(at % WORLD, 2 + 3 * at, stage) for at, stage in enumerate(STAGES)]
UNSAID = {(fault.step, fault.rank) for fault in FAULTS if fault.at == "reduce"}
"""As in test_standin.py."""
pytestmark = pytest.mark.timeout(1200)  # the first of all builds the device


def late(case: str, *, groups: bool, devices: int = WORLD) -> dict[str, str]:
    """Environment of a stand-in with lag and queue of a case's own."""
    drawn = random.Random(case)
    return {
        "REGROW_TEST_DEVICE": "standin",
        "STANDIN_GROUPS": str(int(groups)),
        "STANDIN_DEVICES": str(devices),
        "STANDIN_LAG_US": str(drawn.choice((20, 50, 100, 200))),
        "STANDIN_QUEUE": str(drawn.choice((16, 48, 200, 1024))),
    }


HABITS = {
    "a stream of its own": ("foreach,side,noise", False),
    "a scaler and pinned memory": ("fused,amp,echo", True),
    "weights of samples": ("capturable,data,noise,side,echo", True),
}
"""Habits of train_device.py, and True for those that run over groups of the device's own."""


@pytest.mark.full
@pytest.mark.parametrize("case", HABITS)
def test_what_scripts_do_on_a_device_goes_through_kills(standin_site: Site, case: str) -> None:
    habits, groups = HABITS[case]
    name = habits.replace(",", "-")

    def run(kind: str, faults: list[Fault] | None = None, env: dict[str, str] | None = None) -> Outcome:
        words = ("--habits", habits)
        made = f"{name}-{kind}"
        return train(
            standin_site, made, steps=STEPS, world=WORLD, faults=faults, extra=words, script="train_device.py", env=env
        )

    env = late(case, groups=groups)
    # Adam's arithmetic is another where its kernel is fused, or its counts of steps are on the device.
    calm = run("calm", env=None if "foreach" in habits else env)
    assert calm.code == 0, calm.output
    assert_equal(run("killed", FAULTS, env), calm, faults=len(FAULTS), unsaid=UNSAID)


@pytest.mark.full
@pytest.mark.parametrize("groups", [False, True], ids=["over the processor", "over the device"])
def test_a_world_grows_loses_a_rank_and_shrinks(
    here: Site, standin_built: None, tmp_path_factory: pytest.TempPathFactory, groups: bool
) -> None:
    fixed = fixed_run(tmp_path_factory.mktemp("fixed"), ELASTIC_STEPS)
    words = small(
        "job", "--nproc-per-node", "1", "--replicas", "1:3", steps=ELASTIC_STEPS, extra=("--invariant", "--pace", "0.2")
    )
    with here.start(*words, **late("elastic", groups=groups, devices=3)) as started:
        job = Elastic(here, "job", started)
        job.settled(1)
        job.reach(3)
        job.kill(job.worker("member", 1))
        job.settled(3)
        job.reach(2)
        ledger = job.finish()
    assert_same(here, ledger, fixed, ranks=2)


@pytest.mark.full
def test_a_node_is_given_back_after_notice(
    here: Site, standin_built: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fixed = fixed_run(tmp_path_factory.mktemp("fixed"), ELASTIC_STEPS)
    flags = ("--nproc-per-node", "1", "--local-nodes", "2", "--replicas", "1:2")
    words = small("job", *flags, steps=ELASTIC_STEPS, extra=("--invariant", "--pace", "0.2"))
    with here.start(*words, **late("drained", groups=True)) as started:
        job = Elastic(here, "job", started)
        job.settled(2)
        job.drain("node1")
        job.settled(1)
        ledger = job.finish()
    assert_same(here, ledger, fixed, ranks=1)


def checkpoints(here: Site) -> tuple[str, ...]:
    """Flags of a job that writes its state as often as it can."""
    return ("--checkpoint-dir", str(here.folder / "durable"), "--checkpoint-every", "1ms")


def saves(here: Site, job: str) -> list[int]:
    """Steps of the checkpoints that a job has written."""
    records = read_records(here.home / "jobs" / job)
    return [int(each.step) for each in records if isinstance(each, CheckpointSaved)]


def lose_all(here: Site, world: int, steps: int, script: str, words: tuple[str, ...], env: dict[str, str]) -> Outcome:
    """A job whose ranks are all killed at once when it has a checkpoint; it goes on from there to its end."""
    out = here.folder / "lost.out"
    told = (str(SCRIPTS / script), "--steps", str(steps), "--pace", "0.3", "--out", str(out), *words)
    flags = ("--job", "lost", "--nproc-per-node", str(world), *checkpoints(here))
    with here.start("run", *flags, *told, **env) as running:
        job = Elastic(here, "lost", running)
        job.until(lambda now: now.step >= 8 and bool(saves(here, "lost")), "it has a checkpoint")
        pids = [each.pid for each in read_records(here.home / "jobs" / "lost") if isinstance(each, WorkerForked)]
        assert len(pids) == world
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a rank that is stopped gives no state to another
            for pid in pids:
                os.kill(pid, number)
        job.hurry()
        lost = outcome_of(here, "lost", world, running.wait(2 * PATIENCE), running.output)
    assert lost.code == 0, lost.output
    assert [incident.rung for incident in lost.ledger.incidents] == ["restart"]
    return lost


@pytest.mark.full
def test_all_ranks_die_and_go_on_from_a_checkpoint_and_another_job_from_the_last(
    here: Site, standin_built: None
) -> None:
    steps, habits, script = 30, ("--habits", "side,noise,echo"), "train_device.py"
    whole = train(here, "whole", world=WORLD, steps=steps, extra=habits, script=script)
    lost = lose_all(here, WORLD, steps, script, habits, late("checkpoints", groups=True))
    assert lost.finals == whole.finals
    again = train(here, "again", "--resume", *checkpoints(here), world=WORLD, steps=steps, extra=habits, script=script)
    assert again.code == 0, again.output
    assert again.finals == whole.finals, "what a device has written, a processor reads"


@pytest.mark.full
@pytest.mark.parametrize("groups", [False, True], ids=["over the processor", "over the device"])
def test_shards_are_lost_with_all_ranks_and_go_on_from_a_checkpoint_in_parts(
    here: Site, standin_built: None, groups: bool
) -> None:
    steps, mode, script = 24, ("--mode", "fsdp2"), "train_parallel.py"
    whole = train(here, "whole", world=4, steps=steps, extra=mode, script=script)
    lost = lose_all(here, 4, steps, script, mode, late("parts", groups=groups, devices=4))
    assert lost.finals == whole.finals
    assert {at: loss for at, loss in lost.losses.items() if whole.losses[at] != loss} == {}
