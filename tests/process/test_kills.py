"""Training goes straight through kills, and ends bitwise equal to the run that nobody disturbed."""

from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

from regrow.core.process.stage_times import BUILD, CONNECT, FIRST_STEP, HYDRATE, REHEARSE, START

WORLD, STEPS = 3, 42
_LATER = (CONNECT, HYDRATE, FIRST_STEP)
STAGES = ("data", "forward", "backward", "reduce", "update", "commit")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("kills")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    outcome = train(here, "undisturbed", world=WORLD, steps=STEPS)
    assert outcome.code == 0, outcome.output
    assert len(outcome.losses) == WORLD * STEPS
    assert len({str(final["digest"]) for final in outcome.finals.values()}) == 1
    return outcome


@pytest.mark.parametrize("standbys", [0, 1])
def test_every_stage_and_every_rank_killed_one_after_another(here: Site, undisturbed: Outcome, standbys: int) -> None:
    kills = [(stage, rank) for stage in STAGES for rank in range(WORLD)]
    faults = [Fault(rank, 2 + 2 * at, stage) for at, (stage, rank) in enumerate(kills)]
    outcome = train(here, f"each-{standbys}", "--standby", str(standbys), world=WORLD, steps=STEPS, faults=faults)
    assert_equal(outcome, undisturbed, faults=len(faults))
    assert_stages_told(here, f"each-{standbys}", outcome)


def assert_stages_told(here: Site, name: str, outcome: Outcome) -> None:
    """Each replacement has measured its stages; one that was built beforehand has none of those until its loop."""
    by_rung = {"fork": {START, BUILD, REHEARSE, *_LATER}, "standby": set(_LATER)}
    told = [incident for incident in outcome.ledger.incidents if incident.rung in by_rung]
    assert told
    for incident in told:
        # Of two faults mended together, one by a standby, either replacement may be the slower one.
        alone = incident.faults == 1
        assert incident.stages.keys() == by_rung[incident.rung] if alone else incident.stages.keys() >= set(_LATER)
        assert incident.slowest is not None
        # But for the connecting they follow one another, within the incident and on one clock.
        one_by_one = sum(incident.stages.values()) - incident.stages[CONNECT]
        assert 0 < one_by_one <= incident.total, incident
    story = here.regrow("story", name).stdout
    assert all(f"(worker {incident.slowest}: " in story for incident in told)


def test_two_ranks_killed_at_once_at_every_stage(here: Site, undisturbed: Outcome) -> None:
    faults = []
    for at, stage in enumerate(STAGES):
        first = at % WORLD
        faults += [Fault(first, 3 + 5 * at, stage), Fault((first + 1) % WORLD, 3 + 5 * at, stage)]
    outcome = train(here, "pairs", world=WORLD, steps=STEPS, faults=faults)
    # Where the first of a pair died so late that the others had all they needed, the step never runs again for the
    # second.
    assert_equal(outcome, undisturbed, faults=len(faults), missed=2)


@pytest.mark.parametrize("second", ["form", "hydrate"])
def test_killed_again_during_a_recovery(here: Site, undisturbed: Outcome, second: str) -> None:
    faults = []
    for at in range(4):
        victim, next_victim = at % WORLD, (at + at // 2) % WORLD
        step = 4 + 8 * at
        faults += [Fault(victim, step, "reduce"), Fault(next_victim, step, second)]
    outcome = train(here, f"again-{second}", world=WORLD, steps=STEPS, faults=faults)
    assert_equal(outcome, undisturbed, faults=len(faults))


def test_exceptions_out_of_memory_and_exits_at_every_stage(here: Site, undisturbed: Outcome) -> None:
    ways = [(how, stage) for how in ("exception", "oom-like", "exit") for stage in STAGES]
    faults = [Fault(at % WORLD, 2 + 2 * at, stage, how) for at, (how, stage) in enumerate(ways)]
    assert_equal(train(here, "ways", world=WORLD, steps=STEPS, faults=faults), undisturbed, faults=len(faults))


def test_a_stopped_worker_is_found_fenced_and_replaced(here: Site, undisturbed: Outcome) -> None:
    faults = [Fault(1, 5, "forward", "sigstop"), Fault(0, 20, "reduce", "sigstop")]
    outcome = train(here, "stopped", "--hang-timeout", "2s", world=WORLD, steps=STEPS, faults=faults)
    assert_equal(outcome, undisturbed, faults=len(faults))
    assert [incident.kind for incident in outcome.ledger.incidents] == ["hang", "hang"]


def test_a_standby_with_imports_alone_takes_over(here: Site, undisturbed: Outcome) -> None:
    faults = [Fault(2, 10, "backward"), Fault(0, 30, "update")]
    outcome = train(here, "imports", "--standby", "1", "--warmth", "imports", world=WORLD, steps=STEPS, faults=faults)
    assert_equal(outcome, undisturbed, faults=len(faults))
    assert "standby" in {incident.rung for incident in outcome.ledger.incidents}
