"""A library's own connections, built anew by `session.on_regroup`: real kills at every place, and the same bits."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from tests.process.elastic import Elastic
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS, Outcome, assert_equal, train

WORLD, STEPS = 3, 8


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("ring")) as made:
        yield made
        made.assert_nothing_left()


def ring(here: Site, name: str, *flags: str, extra: tuple[str, ...] = ()) -> Outcome:
    return train(here, name, *flags, world=WORLD, steps=STEPS, extra=extra, script="train_ring.py")


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    outcome = ring(here, "undisturbed")
    assert outcome.code == 0, outcome.output
    assert len(outcome.losses) == WORLD * STEPS
    return outcome


def calls(here: Site, name: str) -> dict[int, list[tuple[str, int]]]:
    """The hooks that each process has called, in order, with the generation."""
    found = defaultdict(list)
    for line in (here.folder / f"{name}.hooks").read_text().splitlines():
        pid, what, generation, _, _ = json.loads(line)
        found[pid].append((what, generation))
    return found


def assert_in_turns(called: dict[int, list[tuple[str, int]]]) -> None:
    """Each process has given up all that it had built but the last, and has built it for a later generation."""
    for each in called.values():
        gave_up = [generation for what, generation in each if what == "before"]
        built = [generation for what, generation in each if what == "after"]
        assert [what for what, _ in each] == (["after", "before"] * len(each))[: len(each)]
        assert gave_up == built[: len(gave_up)] and built == sorted(set(built))


def test_an_undisturbed_job_calls_it_once_in_its_set_up(here: Site, undisturbed: Outcome) -> None:
    assert list(calls(here, "undisturbed").values()) == [[("after", 1)]] * WORLD


@pytest.mark.parametrize(
    "places",
    [
        ("1@body 2", "0@body 5"),
        ("2@body 2", "0@before"),  # a survivor, too, while it gives up
        ("1@body 2", "1@after", "0@built"),  # the newcomer while it builds, and another one when it has
    ],
    ids=["in bodies", "while given up", "while built"],
)
@pytest.mark.parametrize(
    "flags",
    [pytest.param((), id="fork"), pytest.param(("--standby", "1"), id="standby", marks=pytest.mark.full)],
)
def test_it_is_built_anew_among_the_processes_of_each_generation(
    here: Site, undisturbed: Outcome, places: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    name = f"killed-{len(places)}-{places[-1][2:6].strip()}-{len(flags)}"
    outcome = ring(here, name, *flags, extra=("--die", *places))
    for place in places:
        assert (here.folder / f"{name}.died-{place.replace(' ', '-')}").exists(), f"{place}: {outcome.output}"
    assert_equal(outcome, undisturbed, faults=0)
    assert_in_turns(calls(here, name))


def test_errors_of_hooks_are_told_and_heal(here: Site, undisturbed: Outcome) -> None:
    outcome = ring(here, "failing", extra=("--die", "1@body 2", "--fail", "0@before", "2@after"))
    assert_equal(outcome, undisturbed, faults=0)
    assert (
        "the `before` hook give_up of session.on_regroup raised RuntimeError: the ring is out of order at before"
        in (outcome.output)
    )
    assert "the ring is out of order at after" in outcome.output
    first, *_, last = (dict(formed.workers) for formed in outcome.ledger.generations)
    assert {rank for rank in last if last[rank] != first[rank]} == {"1"}, "nobody was ended for an error of a hook"


def test_an_error_of_a_hook_that_comes_again_ends_the_job_and_is_named(here: Site) -> None:
    outcome = ring(here, "broken", extra=("--die", "1@body 2", "--fail", "2@after!"))
    assert outcome.code == 1, outcome.output
    assert "the ring is out of order at after" in outcome.output
    assert "in the `after` hook build of session.on_regroup" in outcome.output


@pytest.mark.full
def test_it_is_built_anew_in_a_world_of_another_size(here: Site) -> None:
    name = "sizes"
    words = ("--steps", "160", "--out", f"{name}.out", "--global-batch", "12", "--pace", "0.15")
    run = ("run", "--job", name, "--nproc-per-node", "2", "--replicas", "1:3")
    with here.start(*run, str(SCRIPTS / "train_ring.py"), *words) as running:
        job = Elastic(here, name, running)
        job.settled(2)
        for size in (3, 1, 2):
            job.reach(size)
        ledger = job.finish()
    assert [(each.kind, each.before, each.after) for each in ledger.incidents] == [
        ("grow", 2, 3),
        ("shrink", 3, 1),
        ("grow", 1, 2),
    ]
    called = calls(here, name)
    assert_in_turns(called)
    left = [each[-1] for each in called.values() if ("after", ledger.generations[-1].generation) not in each]
    assert left == [("before", ledger.generations[1].generation)] * 2, "who leaves gives up what it has built"
    built = Counter(generation for each in called.values() for what, generation in each if what == "after")
    assert [built[formed.generation] for formed in ledger.generations] == [2, 3, 1, 2]
    finals = {(here.folder / f"{name}.{rank}.json").read_text() for rank in range(2)}
    assert len(finals) == 1
