"""Habits in a world that grows and shrinks while they train: what an undisturbed run gives, or why not."""

import math
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from tests.harm.frame import SIZES
from tests.harm.runs import HERE, IMPORTS, PATIENCE_S, ROOT, References, Run, imports_of, near, same
from tests.harm.table import HABITS, Habit, all_habits
from tests.process.elastic import Elastic
from tests.process.launching import SOURCE, Site, site

from regrow.membership.view import JobView
from regrow.observe.ledger import Ledger, read_records

KNOWN = 2
"""Steps, fewer than the habits make before they wait for the order."""
FEW = ("scheduler_after_the_body_guarded", "shuffled_loader", "micro_batches_invariant")
"""For `make test`."""
ELASTIC = [habit.name for habit in all_habits().values() if not habit.refused]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("elastic"), *IMPORTS) as made:
        yield made
        made.assert_nothing_left()


def play(here: Site, habit: Habit, world: str) -> Run:
    """A habit in a world that stays as it is, or in one that is grown and shrunk."""
    job = f"{habit.name}-{world}"[-60:]
    folder = here.folder / job
    folder.mkdir()
    words = ["run", "--job", job, "--nproc-per-node", str(SIZES[0]), "--replicas", f"1:{max(SIZES)}", *habit.flags]
    words += [str(HERE / "play.py"), habit.name, "--folder", str(folder), "--world", world]
    with here.importing(imports_of(habit)).start(*words, PYTHONPATH=os.pathsep.join([SOURCE, str(ROOT)])) as running:
        if world == "changing":
            change(Elastic(here, job, running), habit, folder)
        code = running.wait(PATIENCE_S)
    return Run(folder, code, running.output, Ledger(read_records(here.home / "jobs" / job)))


def trains(size: int, job: JobView) -> bool:
    return job.phase == "training" and job.replicas == size


def paced(job: Elastic, size: int, now: JobView) -> bool:
    """True if the ranks of that number have made some steps since their world began, for they wait a few later."""
    formed = job.ledger().generations
    return bool(formed) and len(formed[-1].workers) == size and now.step >= formed[-1].step + KNOWN


def changes(size: int, job: JobView) -> bool:
    return job.phase == "switching" or job.replicas == size


def change(job: Elastic, habit: Habit, folder: Path) -> None:
    """Take the job from world to world; who is refused another size stays as it is."""
    for number, (before, after) in enumerate(pairwise(SIZES), 1):
        job.until(partial(trains, before), f"{before} ranks train")
        job.until(partial(paced, job, before), "its pace is known")
        answer = job.scale(after)
        if habit.fixed:
            assert not answer.accepted and habit.fixed in answer.reason, answer
            for each in range(1, len(SIZES)):
                (folder / f"ordered-{each}").touch()
            return
        assert answer.accepted, answer.reason
        job.until(partial(changes, after), "the change is ordered")
        (folder / f"ordered-{number}").touch()


def means(run: Run) -> dict[tuple[int, str], float]:
    """(step, name) to the mean over all ranks: each has as many samples as the others."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for (step, _, name), value in run.numbers.items():
        found[step, name].append(value)
    return {at: fmean(values) for at, values in found.items()}


def assert_as_undisturbed(changing: Run, still: Run, *, bitwise: bool) -> None:
    """The same result on every rank, and the same numbers."""
    alike = same if bitwise else near
    different = [at for at, leaf in still.results.items() if not alike(leaf, changing.results.get(at))]
    assert different == [], "in a world that changes the result is another"
    found, expected = means(changing), means(still)
    assert found.keys() == expected.keys()
    for at, value in expected.items():
        assert alike(value, found[at]) or (math.isnan(value) and math.isnan(found[at])), at


def undisturbed(here: Site, references: References, habit: Habit) -> Run:
    """The habit in a world that stays as it is: torch's own, where that gives the same numbers."""
    if habit.compared and not habit.invariant:
        return references.of("still", habit.name)
    still = play(here, habit, "still")
    assert still.code == 0, still.output
    return still


def verdict(here: Site, references: References, habit: Habit) -> None:
    """Grown and shrunk as if nothing were, or with the reason that the table has."""
    changing = play(here, habit, "changing")
    assert changing.code == 0, changing.output
    assert changing.ledger is not None
    worlds = [len(formed.workers) for formed in changing.ledger.generations]
    assert worlds == [*SIZES[: 1 if habit.fixed else None]], changing.output
    assert sorted(changing.finals) == list(range(worlds[-1])), changing.output
    if habit.fixed or habit.differs:
        return
    assert_as_undisturbed(changing, undisturbed(here, references, habit), bitwise=habit.invariant)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FEW)
def test_a_habit_of_each_kind_comes_through_a_change_of_the_world_or_has_a_fixed_size(
    here: Site, references: References, name: str
) -> None:
    verdict(here, references, HABITS[name])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name in ELASTIC if name not in FEW])
def test_a_habit_comes_through_a_change_of_the_world_or_has_a_fixed_size(
    here: Site, references: References, name: str
) -> None:
    verdict(here, references, HABITS[name])
