"""A world that grows and shrinks while it trains, with kills on the way: the same bits as a world that does not."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.process.elastic import Elastic, assert_same, changes, final, fixed_run, losses
from tests.process.launching import Site
from tests.process.training import SCRIPTS, Fault, redone

from regrow.observe.ledger import Ledger, read_records

STEPS, PACE = 160, "0.15"
GPT = Path(__file__).parents[2] / "examples" / "07-elastic.py"


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result of the small training in a world of one replica, in world-invariant mode."""
    return fixed_run(tmp_path_factory.mktemp("fixed"), STEPS)


def _words(name: str, nproc: int, *extra: str, flags: tuple[str, ...] = (), steps: int = STEPS) -> list[str]:
    run = ["run", "--job", name, "--nproc-per-node", str(nproc), *flags]
    return [*run, str(SCRIPTS / "train_micro.py"), "--steps", str(steps), "--out", f"{name}.out", *extra]


@contextmanager
def training(
    here: Site, nproc: int, *flags: str, faults: tuple[Fault, ...] = (), extra: tuple[str, ...] = ()
) -> Iterator[Elastic]:
    """The small training, slowed down until `Elastic.finish`, in world-invariant mode."""
    if faults:
        (here.folder / "plan.toml").write_text("\n".join(fault.toml() for fault in faults))
        flags = (*flags, "--fault-plan", "plan.toml")
    words = _words("job", nproc, "--invariant", "--pace", PACE, *extra, flags=("--replicas", "1:4", *flags))
    with here.start(*words) as job:
        yield Elastic(here, "job", job)


def test_a_run_of_1_2_4_3_2_and_4_replicas_is_bitwise_that_of_fixed_ones(here: Site, fixed: dict[str, Any]) -> None:
    with training(here, 1) as job:
        job.settled(1)
        for size in (2, 4, 3, 2, 4):
            job.reach(size)
        ledger = job.finish()
    assert_same(here, ledger, fixed, ranks=4)
    assert [(each.kind, each.before, each.after) for each in ledger.incidents] == [
        ("grow", 1, 2),
        ("grow", 2, 4),
        ("shrink", 4, 3),
        ("shrink", 3, 2),
        ("grow", 2, 4),
    ]
    assert [len(formed.workers) for formed in ledger.generations] == [1, 2, 4, 3, 2, 4]
    for rank in range(4):  # who stays is never started again
        assert len({formed.workers.get(str(rank)) for formed in ledger.generations} - {None}) <= (1, 1, 3, 2)[rank]


def test_the_default_mode_stays_within_float_tolerance_of_the_fixed_run(here: Site, fixed: dict[str, Any]) -> None:
    words = _words("job", 1, "--pace", PACE, flags=("--replicas", "1:4"))
    with here.start(*words) as started:
        job = Elastic(here, "job", started)
        job.settled(1)
        for size in (2, 4, 3, 2, 4):
            job.reach(size)
        found = losses(job.finish())
    worst = max(abs(found[step] - loss) for step, loss in fixed["losses"].items())
    assert found.keys() == fixed["losses"].keys()
    assert worst < 1e-5, f"losses differ by up to {worst}"


@contextmanager
def _held(job: Elastic) -> Iterator[None]:
    """Candidates that are asked for wait with their building, so that it is seen."""
    wait = job.site.folder / "wait"
    wait.touch()
    yield
    wait.unlink()


def _building(job: Elastic) -> None:
    with _held(job):
        answer = job.scale(4)
        assert answer.accepted, answer.reason
        job.kill(job.worker("starting"))


def _survivor_while_others_build(job: Elastic) -> None:
    with _held(job):
        answer = job.scale(4)
        assert answer.accepted, answer.reason
        job.worker("starting")
        lost = job.worker("member", 1)
        job.kill(lost)
        job.until(lambda now: lost.worker not in [each.worker for each in now.ranks], "the kill was seen")


def _ask(size: int) -> Callable[[Elastic], None]:
    def ask(job: Elastic) -> None:
        answer = job.scale(size)
        assert answer.accepted, answer.reason

    return ask


def _leaver(job: Elastic) -> None:
    leaver = job.worker("member", 3)
    answer = job.scale(2)
    assert answer.accepted, answer.reason
    job.kill(leaver)


# From how many replicas to how many, what is done, and the faults of a plan.
_KILLS: dict[str, tuple[int, int, Callable[[Elastic], None], tuple[Fault, ...]]] = {
    "grow: a candidate that builds": (2, 4, _building, ()),
    "grow: a survivor while candidates build": (2, 4, _survivor_while_others_build, ()),
    "grow: a survivor that forms": (2, 4, _ask(4), (Fault(0, 1, "form"),)),
    "grow: a newcomer that forms": (2, 4, _ask(4), (Fault(3, 1, "form"),)),
    "grow: a newcomer that is hydrated": (2, 4, _ask(4), (Fault(2, 1, "hydrate"),)),
    "grow: a holder during hydration": (2, 4, _ask(4), (Fault(1, 1, "hydrate"),)),
    "grow: the only survivor but one, and a newcomer": (
        2,
        4,
        _ask(4),
        (Fault(0, 1, "hydrate"), Fault(3, 1, "hydrate")),
    ),
    "shrink: a survivor that forms": (4, 2, _ask(2), (Fault(1, 1, "form"),)),
    "shrink: a survivor before its first step": (4, 2, _ask(2), (Fault(0, 1, "hydrate"),)),
    "shrink: one that was to leave": (4, 2, _leaver, ()),
}


@pytest.mark.parametrize("case", _KILLS)
def test_a_kill_in_the_middle_of_a_change_costs_nothing(here: Site, fixed: dict[str, Any], case: str) -> None:
    before, after, act, faults = _KILLS[case]
    with training(here, before, faults=faults) as job:
        job.settled(before)
        act(job)
        job.settled(after)
        ledger = job.finish()
    assert_same(here, ledger, fixed, ranks=after)
    assert len(ledger.injected) == len(faults)
    assert [(each.before, each.after) for each in changes(list(read_records(job.folder)))][-1] == (before, after)


def test_replicas_of_two_shards_come_and_go_whole(here: Site) -> None:
    sharded = ("--invariant", "--mode", "hsdp", "--shard", "2")
    done = here.regrow(*_words("fixed", 2, *sharded, steps=80))
    assert done.returncode == 0, done.stdout + done.stderr
    words = _words("job", 2, *sharded, "--pace", "0.2", flags=("--replicas", "1:3", "--replica-ranks", "2"), steps=80)
    with here.start(*words) as started:
        job = Elastic(here, "job", started)
        job.settled(1)
        for size in (2, 3, 1, 2):
            job.reach(size)
        job.kill(job.worker("member", 1))
        job.settled(2)
        ledger = job.finish()
    assert losses(ledger) == losses(Ledger(read_records(here.home / "jobs" / "fixed")))
    assert redone(ledger) == []
    parameters = {
        (here.folder / f"{name}.{rank}.json") for name, ranks in (("fixed", 2), ("job", 4)) for rank in range(ranks)
    }
    assert len({json.dumps(final(path)["parameters"]) for path in parameters}) == 1


def test_scripts_hear_of_each_change_on_every_rank_at_the_same_boundary(here: Site) -> None:
    with training(here, 2) as job:
        job.settled(2)
        job.reach(3)
        job.reach(1)
        job.finish()
    heard = [json.loads(path.read_text()) for path in sorted(here.folder.glob("job.*.events"))]
    grown = {"kind": "grow", "before": 2, "after": 3, "deadline": None, "reason": "a test", "leaving": False}
    assert [_without_step(events[0]) for events in heard] == [grown | {"world": 3}] * 3
    shrunk = {"kind": "shrink", "before": 3, "after": 1, "deadline": None, "reason": "a test"}
    last = sorted((events[1] for events in heard), key=lambda event: bool(event["leaving"]))
    assert _without_step(last[0]) == shrunk | {"leaving": False, "world": 1}
    assert [_without_step(event) for event in last[1:]] == [shrunk | {"leaving": True, "world": 3}] * 2
    for at in (0, 1):
        assert len({events[at]["step"] for events in heard}) == 1, "not at the same boundary"


def _without_step(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "step"}


def test_who_must_leave_in_the_middle_of_a_step_hears_of_it_once_and_ends_quietly(
    here: Site, fixed: dict[str, Any]
) -> None:
    flags = ("--local-nodes", "2", "--replicas", "1:2")
    with training(here, 1, *flags, extra=("--pace", "1.5")) as job:
        job.settled(2)
        job.drain("node1", grace=2.0)
        job.settled(1)
        ledger = job.finish()
    assert_same(here, ledger, fixed, ranks=1)
    heard = [event for path in here.folder.glob("job.*.events") for event in json.loads(path.read_text())]
    assert sorted((event["kind"], event["leaving"]) for event in heard) == [("preempt", False), ("preempt", True)]
    assert "Traceback" not in job.job.output and "ignored" not in job.job.output, job.job.output


def test_a_job_that_cannot_fill_a_rank_goes_on_with_fewer_replicas(here: Site, fixed: dict[str, Any]) -> None:
    flags = ("--local-nodes", "2", "--replicas", "1:2", "--node-timeout", "20s")
    with training(here, 1, *flags) as job:
        job.settled(2)
        job.drain("node1")
        job.settled(1)
        ledger = job.finish()
    assert_same(here, ledger, fixed, ranks=1)
    assert [(each.kind, each.before, each.after) for each in ledger.incidents] == [("preempt", 2, 1)]


@pytest.mark.parametrize("size, reason", [(0, "at least one replica"), (5, "more than the maximum of 4")])
def test_sizes_that_cannot_be_are_refused_and_the_job_goes_on(
    here: Site, fixed: dict[str, Any], size: int, reason: str
) -> None:
    with training(here, 2) as job:
        job.settled(2)
        answer = job.scale(size)
        assert not answer.accepted and reason in answer.reason
        ledger = job.finish()
    assert_same(here, ledger, fixed, ranks=2)
    assert ledger.incidents == []


def test_more_replicas_than_micro_batches_are_refused(here: Site) -> None:
    with training(here, 2, extra=("--microbatches", "3")) as job:
        job.settled(2)
        answer = job.scale(4)
        assert not answer.accepted and "3 micro-batches" in answer.reason
        job.reach(3)
        assert job.finish().incidents[-1].after == 3


def test_the_small_gpt_is_the_same_in_a_world_that_changes_and_in_fixed_ones(here: Site) -> None:
    steps = "60"
    words = ("--steps", steps, "--invariant", "--microbatches", "4", "--batch-size", "2", "--megabytes", "0.2")
    told = {}
    for world in (1, 4):
        flags = ("--job", f"fixed{world}", "--nproc-per-node", str(world))
        done = here.regrow("run", *flags, str(GPT), *words, "--out", f"fixed{world}.json")
        assert done.returncode == 0, done.stdout + done.stderr
        told[world] = losses(Ledger(read_records(here.home / "jobs" / f"fixed{world}")))
    elastic = ("--job", "job", "--nproc-per-node", "1", "--replicas", "1:4")
    paced = (str(SCRIPTS / "paced.py"), "0.3", steps, str(GPT))
    with here.start("run", *elastic, *paced, *words, "--out", "job.json") as started:
        job = Elastic(here, "job", started)
        job.settled(1)
        for size in (2, 4, 3, 2, 4):
            job.reach(size)
        found = losses(job.finish())
    assert found == told[1] == told[4]
    assert all(math.isfinite(loss) for loss in found.values())
    states = [json.loads((here.folder / f"{name}.json").read_text())["state"] for name in ("fixed1", "fixed4", "job")]
    assert len(set(states)) == 1
