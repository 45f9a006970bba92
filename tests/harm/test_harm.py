"""Everything that torchrun trains, regrow trains the same or refuses: the habits of the world, a small script each."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from tests.harm.reference import RANKS
from tests.harm.runs import HERE, IMPORTS, PATIENCE_S, ROOT, References, Run, imports_of, near, same
from tests.harm.table import OPEN, Habit, all_habits
from tests.process.launching import SOURCE, Site, site

from regrow.observe.ledger import Ledger, read_records

WORLD = RANKS["plain"]
HABITS = all_habits()
FEW = ("scheduler_after_the_body_guarded", "static_graph")
"""One of each verdict, for `make test`."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("harm"), *IMPORTS) as made:
        yield made
        made.assert_nothing_left()


def play(here: Site, habit: Habit, kind: str, *flags: str, strikes: tuple[str, ...] = ()) -> Run:
    """A habit under `regrow run`."""
    job = f"{habit.name}-{kind}"[-60:]
    folder = here.folder / job
    folder.mkdir()
    words = ["run", "--job", job, "--nproc-per-node", str(WORLD), "--max-faults", "15", *habit.flags, *flags]
    words += [str(HERE / "play.py"), habit.name, "--folder", str(folder)]
    for strike in strikes:
        words += ["--strike", strike]
    with here.importing(imports_of(habit)).start(*words, PYTHONPATH=os.pathsep.join([SOURCE, str(ROOT)])) as running:
        code = running.wait(PATIENCE_S)
    return Run(folder, code, running.output, Ledger(read_records(here.home / "jobs" / job)))


def strike(here: Site, habit: Habit) -> Run:
    """Struck at three stages of a step, and twice between steps; by a standby and by forks."""
    plan = here.folder / f"{habit.name}.toml"
    faults = [*habit.faults, *([(2, 4, "between")] if habit.between else [])]
    plan.write_text("\n".join(f'[[fault]]\nrank = {r}\nstep = {n}\nat = "{at}"\n' for r, n, at in faults))
    return play(
        here,
        habit,
        "struck",
        "--fault-plan",
        str(plan),
        "--standby",
        "1",
        strikes=("between:2:7", "left:0:8", *habit.strikes),
    )


def assert_close(one: Run, other: Run) -> None:
    """The same numbers but for the order of summation."""
    assert one.results.keys() == other.results.keys()
    different = [at for at, leaf in one.results.items() if not near(leaf, other.results[at])]
    assert different == [], "without regrow the result is another"
    if one.numbers and other.numbers:
        assert one.numbers.keys() == other.numbers.keys()
        for place, value in one.numbers.items():
            assert near(value, other.numbers[place]), place


def assert_equal(struck: Run, calm: Run) -> None:
    """Bitwise the same result on every rank, and every committed number of every rank."""
    assert sorted(struck.finals) == sorted(calm.finals) == list(range(WORLD)), struck.output
    different = [at for at, leaf in calm.results.items() if not same(leaf, struck.results.get(at))]
    assert different == [], f"another result: {struck.output}"
    assert struck.results.keys() == calm.results.keys()
    assert {at: value for at, value in struck.numbers.items() if repr(calm.numbers.get(at)) != repr(value)} == {}
    # What a rank logs behind its reductions is lost with it, or with its body where others had all they needed; when
    # one dies at the begin of a step, some may still be at the end of the one before.
    lost = {step for step, _, _ in calm.numbers.keys() - struck.numbers.keys()}
    struck_at = {step for step, _ in struck.kills}
    assert lost <= struck_at | {step - 1 for step in struck_at}, "losses that were never committed"


def verdict(here: Site, references: References, habit: Habit) -> None:
    """The one law: equal in every way, or refused before step 0."""
    calm = play(here, habit, "calm")
    if habit.refused:
        assert calm.code in (1, 2), calm.output
        assert habit.refused in " ".join(calm.output.split()), calm.output
        assert calm.ledger is not None and not calm.ledger.commits, "refused after steps were made"
        return
    assert_lawful(here, references, habit, calm)


def assert_lawful(here: Site, references: References, habit: Habit, calm: Run) -> None:
    """Check that a habit which was not refused has torch's result, and has it under kills too."""
    assert calm.code == 0, calm.output
    assert sorted(calm.finals) == list(range(WORLD)), calm.output
    if habit.alone:
        assert_close(references.of("alone", habit.name), references.of("single", habit.name))
    if habit.compared:
        assert_close(calm, references.of("plain", habit.name))
    struck = strike(here, habit)
    assert struck.code == 0, struck.output
    assert struck.ledger is not None
    assert len(struck.kills) == len(habit.faults) + 2 + habit.between + len(habit.strikes), struck.output
    assert_equal(struck, calm)


def cases(names: Iterable[str]) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=OPEN[name])] if name in OPEN else [])
        for name in names
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", cases(FEW))
def test_a_habit_of_each_verdict_is_trained_the_same_or_refused(here: Site, references: References, name: str) -> None:
    verdict(here, references, HABITS[name])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", cases(name for name in HABITS if name not in FEW))
def test_a_habit_of_the_world_is_trained_the_same_or_refused(here: Site, references: References, name: str) -> None:
    verdict(here, references, HABITS[name])
