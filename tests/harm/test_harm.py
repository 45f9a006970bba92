"""What torchrun trains, regrow trains, the same or not at all: the habits of the world, one small script each."""

import math
import os
import select
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harm.table import OPEN, Habit, all_habits, named
from tests.process.launching import SOURCE, Site, site, warm

from regrow.observe.ledger import Ledger, read_records

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORLD = 3
PATIENCE_S = 300.0
CLOSE = 2e-4
"""Relative: what another order of summation does in a few steps."""
IMPORTS = ("torch.distributed.optim", "torch._dynamo")
"""What habits import: a second for each worker, otherwise."""
HABITS = all_habits()
FEW = ("scheduler_after_the_body_guarded", "static_graph")
"""One of each verdict, for `make test`."""


def imports_of(habit: Habit) -> tuple[str, ...]:
    """What the process has imported from which a habit's are forked."""
    return habit.imports or IMPORTS


class Run:
    """One run of a habit: exit code, what it said, every committed number, what each rank called its result."""

    def __init__(self, folder: Path, code: int, output: str, ledger: Ledger | None = None) -> None:
        self.folder, self.code, self.output, self.ledger = folder, code, output, ledger
        self.finals: dict[int, Any] = {}
        for path in sorted(folder.glob("final.*.pt")):
            self.finals[int(path.suffixes[-2][1:])] = torch.load(path, weights_only=False)

    @property
    def numbers(self) -> dict[tuple[int, int, str], float]:
        """(step, rank, name) to what was logged."""
        if self.ledger is not None:
            return {
                (step, rank, name): value
                for (step, rank), metrics in self.ledger.numbers.items()
                for name, value in metrics.items()
            }
        return {(step, rank, name): value for rank, final in self.finals.items() for step, name, value in final["logs"]}

    @property
    def kills(self) -> list[tuple[int, int]]:
        """(step, rank) of whoever was killed."""
        mine = (path.name.split("-")[2:] for path in self.folder.glob("struck-*"))
        injected = self.ledger.injected if self.ledger is not None else []
        return [*((int(step), int(rank)) for rank, step in mine), *((f.step, f.rank or 0) for f in injected)]

    @property
    def results(self) -> dict[tuple[int, str], Any]:
        """(rank, path) to a leaf of the result."""
        return {(rank, path): leaf for rank, final in self.finals.items() for path, leaf in final["kept"].items()}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("harm"), *IMPORTS) as made:
        yield made
        made.assert_nothing_left()


class Referee:
    """A process that has imported what habits import, and runs them without regrow, and alone."""

    def __init__(self, folder: Path, imports: tuple[str, ...]) -> None:
        path = os.pathsep.join([SOURCE, str(ROOT)])
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        (asked, self._asks), (self._answers, answers) = os.pipe(), os.pipe()
        words, streams = [str(folder), str(WORLD)], (asked, answers, 2)
        self._process = warm(imports).start("tests.harm.reference", words, cwd=str(ROOT), env=env, streams=streams)
        os.close(asked)
        os.close(answers)

    def run(self, name: str) -> None:
        """Have a habit run."""
        os.write(self._asks, f"{name}\n".encode())
        ready, _, _ = select.select([self._answers], [], [], PATIENCE_S)
        assert ready and os.read(self._answers, 1 << 10).decode().strip() == name, "no answer"

    def close(self) -> None:
        """End the process."""
        os.close(self._asks)
        self._process.wait(PATIENCE_S)
        os.close(self._answers)


class References:
    """Runs of plain torch and of plain python, each habit's made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._referees: dict[tuple[str, ...], Referee] = {}

    def of(self, kind: str, name: str) -> Run:
        """`plain`, `single` or `alone`. Fails where that run did."""
        folder = self._folder / kind / name
        if not folder.exists():
            imports = imports_of(named(name))
            if imports not in self._referees:
                self._referees[imports] = Referee(self._folder, imports)
            self._referees[imports].run(name)
        said = "\n".join(path.read_text() for path in folder.glob("log.*"))
        assert (folder / "ok").exists(), f"the reference itself fails ({kind}): {said}"
        return Run(folder, 0, said)

    def close(self) -> None:
        """End the processes."""
        for referee in self._referees.values():
            referee.close()


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    made = References(tmp_path_factory.mktemp("references"))
    yield made
    made.close()


def play(here: Site, habit: Habit, kind: str, *flags: str, strikes: tuple[str, ...] = ()) -> Run:
    """A habit under `regrow run`."""
    job = f"{habit.name}-{kind}"[-60:]
    folder = here.folder / job
    folder.mkdir()
    words = ["run", "--job", job, "--nproc-per-node", str(WORLD), "--max-faults", "15", *flags]
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
    return play(here, habit, "struck", "--fault-plan", str(plan), "--standby", "1", strikes=("between:2:7", "left:0:8"))


def assert_close(one: Run, other: Run) -> None:
    """The same numbers but for the order of summation."""
    assert one.results.keys() == other.results.keys()
    different = [at for at, leaf in one.results.items() if not near(leaf, other.results[at])]
    assert different == [], "without regrow the result is another"
    if one.numbers and other.numbers:
        assert one.numbers.keys() == other.numbers.keys()
        for place, value in one.numbers.items():
            assert near(value, other.numbers[place]), place


def near(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and a.is_floating_point():
        return torch.allclose(a, b, rtol=CLOSE, atol=CLOSE / 10)
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE / 10)
    return same(a, b)


def same(a: Any, b: Any) -> bool:
    """Bit by bit."""
    if type(a) is not type(b):
        return False
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)


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
    """What was not refused is what torch makes of it, and struck the same."""
    assert calm.code == 0, calm.output
    assert sorted(calm.finals) == list(range(WORLD)), calm.output
    if habit.alone:
        assert_close(references.of("alone", habit.name), references.of("single", habit.name))
    if habit.compared:
        assert_close(calm, references.of("plain", habit.name))
    struck = strike(here, habit)
    assert struck.code == 0, struck.output
    assert struck.ledger is not None
    assert len(struck.kills) == len(habit.faults) + 2 + habit.between, struck.output
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
